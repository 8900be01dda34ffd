#!/usr/bin/env python3
"""Writes the example prompts: a long tale with a number hidden in it, and the question for the number at its end.

The last line on stdout is JSON: the files with the numbers that are the right answers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from longgen.config import parse_length
from longgen.evaluation.filler import tales
from longgen.evaluation.needle import MAGIC_NUMBER, PASS_KEY, Needle, hide

EXAMPLES = (
    ("pass-key.txt", Needle(PASS_KEY, "71432"), 0.4),
    ("magic-number.txt", Needle(MAGIC_NUMBER, "5820397", "lighthouse"), 0.15),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parents[1] / "examples")
    parser.add_argument("--length", type=parse_length, default=parse_length("32K"), help="bytes of a prompt")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, needle, depth) in enumerate(EXAMPLES):
        document = hide([(depth, needle)], tales(seed), args.length - len(needle.question))
        (args.folder / name).write_text(document.prompt(needle), encoding="utf-8")
    print(json.dumps({str(args.folder / name): needle.number for name, needle, _ in EXAMPLES}))


if __name__ == "__main__":
    main()
