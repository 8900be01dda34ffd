#!/usr/bin/env python3
"""Writes a tiny random Qwen checkpoint, an ordinary folder, for trying the program without a download.

The last line on stdout is JSON: where it is and what it holds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

from longgen.model.checkpoint import SUPPORTED_TYPES
from longgen.model.tiny import make_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write it; made if it is not there")
    parser.add_argument("--type", dest="model_type", default="qwen3", choices=SUPPORTED_TYPES, help="default: qwen3")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: 0)")
    parser.add_argument("--head-dim", type=int, default=16, help="of attention layers (default: 16)")
    parser.add_argument("--layers", type=int, default=None, help="default: 3, of hybrids 4")
    parser.add_argument("--sliding", action="store_true", help="sliding-window layers")
    parser.add_argument("--yarn", action="store_true", help="YaRN rope scaling, factor 4")
    parser.add_argument("--tied", action="store_true", help="the head shares the embedding's weights")
    args = parser.parse_args()
    folder = make_checkpoint(**vars(args))
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(json.dumps({"folder": str(folder), "model_type": args.model_type, "seed": args.seed, "bytes": size}))


if __name__ == "__main__":
    main()
