#!/usr/bin/env python3
"""Writes the tasks of RULER (arXiv:2404.06654) that need no download, in its format and with its templates.

OUT/LENGTH/TASK.jsonl holds the samples of a task at a length: `index, input, outputs, length, length_w_model_temp,
answer_prefix` as RULER has them, and `max_new_tokens` with the published budget, for `longgen run --prompt`. Prompt,
answer prefix and budget come to LENGTH tokens of the model's tokenizer at most, and to less only because sentences and
words are not cut; with --chat, the tokens of the chat template count too.

What differs from the published sets: keys and words are drawn from a list of longgen's own instead of wonderwords', and
where an essay is the haystack, noise stands in unless --essay gives a text. Without it, niah_single_2 is left out: it
would be niah_single_1. Questions over documents (qa) are left out, since they need SQuAD and HotpotQA.

A task that a length is too short for is left out with a line on stderr; one named by --tasks is an error then. The last
line on stdout is JSON: the samples written, by length and task.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

from ruler.records import make_records
from ruler.tasks import make_task, task_names

from longgen.config import parse_length
from longgen.errors import LongGenError, UsageError
from longgen.evaluation.same_model import check_same_model
from longgen.model.checkpoint import resolve_checkpoint
from longgen.model.quiet import quiet_transformers
from longgen.model.tokenizer import TextTokenizer
from longgen.names import checkpoint_name
from longgen.units import show_count


def write_all(args: argparse.Namespace, tokenizer: TextTokenizer) -> dict[str, dict[str, int]]:
    """Writes every task at every length; returns how many samples each file has."""
    essay = read_essay(args.essay) if args.essay else []
    chat = tokenizer.has_chat_template if args.chat is None else args.chat
    names = args.tasks.split(",") if args.tasks else task_names(bool(essay))
    written: dict[str, dict[str, int]] = {}
    for length in map(parse_length, args.lengths.split(",")):
        folder = args.out / str(length)
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            task = make_task(name, length, essay, lambda text: len(tokenizer.encode(text, chat=False)))
            try:
                records = list(make_records(tokenizer, chat, name, task, length, args.samples, args.seed))
            except UsageError as error:
                if args.tasks:
                    raise
                print(f"{length:>9,} {name}: left out: {error}", file=sys.stderr)
                continue
            lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
            (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")
            written.setdefault(str(length), {})[name] = len(records)
            print(f"{length:>9,} {name}: {show_count(len(records), 'sample')}", file=sys.stderr, flush=True)
    return written


def read_essay(path: Path) -> list[str]:
    """The words of a text file. Raises UsageError if it cannot be read or has none."""
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the essay {path} cannot be read as UTF-8 text: {error}") from None
    if not words:
        raise UsageError(f"the essay {path} has no words")
    return words


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder, hub id or short name; its tokenizer counts")
    parser.add_argument("--lengths", required=True, help="tokens, such as 4K,64K,1M")
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    parser.add_argument("--results", type=Path, help="folder of answers; those of another model are refused")
    parser.add_argument("--tasks", help="such as niah_single_1,vt; default: all")
    parser.add_argument("--samples", type=int, default=10, help="of each task at each length (default: 10)")
    parser.add_argument("--seed", type=int, default=42, help="start of the random numbers (default: 42)")
    parser.add_argument("--essay", type=Path, help="UTF-8 text for the haystacks that are essays")
    parser.add_argument("--chat", action="store_true", default=None, help="count the chat template's tokens too")
    parser.add_argument("--raw", dest="chat", action="store_false", help="do not (default: as longgen run does)")
    args = parser.parse_args(argv)
    if args.samples < 1:
        parser.error(f"--samples is {args.samples}; it must be 1 or more")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        for file in sorted(args.results.glob("*/*.jsonl")) if args.results else []:
            check_same_model(file, args.model)
        with quiet_transformers():
            tokenizer = TextTokenizer.load(resolve_checkpoint(checkpoint_name(args.model)))
            written = write_all(args, tokenizer)
    except LongGenError as error:
        print(f"make_ruler: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
