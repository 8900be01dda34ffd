#!/usr/bin/env python3
"""Writes the example prompts: a long tale with a number hidden in it, and the question for the number at its end.

The last line on stdout is JSON: the files with the numbers that are the right answers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

from longgen.config import parse_length
from longgen.errors import LongGenError, UsageError
from longgen.evaluation.filler import tales
from longgen.evaluation.needle import MAGIC_NUMBER, PASS_KEY, Needle, hide

EXAMPLES = (
    ("pass-key.txt", Needle(PASS_KEY, "71432"), 0.4),
    ("magic-number.txt", Needle(MAGIC_NUMBER, "5820397", "lighthouse"), 0.15),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parents[1] / "examples")
    parser.add_argument("--length", default="32K", help="bytes of a prompt (default: 32K)")
    args = parser.parse_args(arguments)
    try:
        texts = _texts(parse_length(args.length))
        args.folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (args.folder / name).write_text(text, encoding="utf-8")
    except (LongGenError, OSError) as error:
        print(f"make_needle_examples: {error}", file=sys.stderr)
        return UsageError.exit_code
    print(json.dumps({str(args.folder / name): needle.number for name, needle, _ in EXAMPLES}))
    return 0


def _texts(length: int) -> dict[str, str]:
    """The prompts of so many bytes, by the names of their files."""
    return {
        name: hide([(depth, needle)], tales(seed), length - len(needle.question)).prompt(needle)
        for seed, (name, needle, depth) in enumerate(EXAMPLES)
    }


if __name__ == "__main__":
    sys.exit(main())
