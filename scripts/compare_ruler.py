#!/usr/bin/env python3
"""Answers RULER's tasks with longgen and with transformers' `generate`, greedily in float32: are they equal?

DATA is the folder that make_ruler.py wrote; of each DATA/LENGTH/TASK.jsonl the first --samples are answered, each by
both. The prompts' token ids, every token of the answer and so the scores must be equal. A row goes to stderr as soon as
a file is done; the last line on stdout is JSON; the exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

from compare_with_transformers import Comparison, compare, longgen_answers, note, transformers_answers
from prose_prompts import Prompt
from ruler.tasks import metric
from transformers import AutoTokenizer

from longgen.engine import EngineOptions
from longgen.errors import LongGenError, UsageError
from longgen.model.checkpoint import resolve_checkpoint
from longgen.model.quiet import quiet_transformers
from longgen.model.tokenizer import TextTokenizer
from longgen.names import checkpoint_name

HEADER = f"{'task':<16} {'tokens':>7} {'new':>4} {'score':>6} {'transf.':>8}  result"


@dataclass(frozen=True, slots=True)
class Row:
    """One sample. score, transformers_score: 0 to 1."""

    task: str
    prompt_tokens: int
    new_tokens: int
    prompt_ids_equal: bool
    comparison: Comparison
    pred: str
    score: float
    transformers_score: float
    seconds: float
    transformers_seconds: float

    @property
    def equal(self) -> bool:
        return self.prompt_ids_equal and self.comparison.equal

    def __str__(self) -> str:
        found = self.comparison
        result = f"equal (logits within {found.logit_difference:.1g}, smallest margin {found.margin:.1g})"
        if not found.equal:
            result = f"DIFFERENT after {found.equal_tokens} tokens: {found.first_difference}"
        if not self.prompt_ids_equal:
            result = f"DIFFERENT prompt ids; {result}"
        counts = f"{self.task:<16} {self.prompt_tokens:>7,} {self.new_tokens:>4}"
        return f"{counts} {100 * self.score:>6.1f} {100 * self.transformers_score:>8.1f}  {result}"


def compare_file(
    folder: Path, tokenizer: TextTokenizer, options: EngineOptions, file: Path, args: argparse.Namespace
) -> Iterator[Row]:
    """The rows of one file's first samples."""
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[: args.samples]]
    chat = tokenizer.has_chat_template if args.chat is None else args.chat
    prompts = []
    for record in records:
        ids = tokenizer.encode_prompt(record["input"], chat, opening=record["answer_prefix"]).ids
        prompts.append(
            Prompt(f"{file.parent.name} {file.stem} {record['index']}", record["input"], tuple(ids.tolist()))
        )
    budget = min(args.new_tokens or records[0]["max_new_tokens"], records[0]["max_new_tokens"])
    stop_ids = tokenizer.eos_ids(folder)
    ours = longgen_answers(folder, options, prompts, budget, stop_ids)
    theirs = transformers_answers(folder, options, prompts, budget, stop_ids)
    own: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for record, prompt, answer, other in zip(records, prompts, ours, theirs, strict=True):
        texts = [tokenizer.decode(list(each.tokens)) for each in (answer, other)]
        scores = [metric(file.stem)(text, record["outputs"]) for text in texts]
        yield Row(
            task=file.stem,
            prompt_tokens=len(prompt.ids),
            new_tokens=len(answer.tokens),
            prompt_ids_equal=prompt.ids == transformers_ids(own, record, chat),
            comparison=compare(answer, other),
            pred=texts[0],
            score=scores[0],
            transformers_score=scores[1],
            seconds=round(answer.seconds, 1),
            transformers_seconds=round(other.seconds, 1),
        )


def transformers_ids(tokenizer: Any, record: dict[str, Any], chat: bool) -> tuple[int, ...]:
    """The prompt's ids by transformers' own tokenizer and chat template."""
    if not chat:
        return tuple(tokenizer(record["input"] + record["answer_prefix"])["input_ids"])
    message = [{"role": "user", "content": record["input"]}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer(text + record["answer_prefix"], add_special_tokens=False)["input_ids"])


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="checkpoint folder, hub id or short name")
    parser.add_argument("data", type=Path, help="folder with LENGTH/TASK.jsonl")
    parser.add_argument("--samples", type=int, default=1, help="of each file (default: 1)")
    parser.add_argument("--new-tokens", type=int, help="most tokens of an answer; default: the task's budget")
    parser.add_argument("--chat", action="store_true", default=None, help="use the chat template")
    parser.add_argument("--raw", dest="chat", action="store_false", help="do not (default: where there is one)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument(
        "--block-size", type=int, default=EngineOptions().block_size, help="of longgen (default: %(default)s)"
    )
    parser.add_argument("--chunk-size", type=int, default=None, help="of longgen (default: about 4096)")
    parser.add_argument("--resident-blocks", type=int, default=0, help="of each layer, on the device (default: 0)")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> list[Row]:
    """All rows. Raises UsageError if there is nothing to answer."""
    files = sorted(args.data.glob("*/*.jsonl"))
    if not files:
        raise UsageError(f"{args.data} has no LENGTH/TASK.jsonl; make_ruler.py writes them")
    options = EngineOptions(
        device=args.device,
        dtype="float32",
        block_size=args.block_size,
        chunk_size=args.chunk_size,
        resident_blocks=args.resident_blocks,
    )
    folder = resolve_checkpoint(checkpoint_name(args.checkpoint))
    tokenizer = TextTokenizer.load(folder)
    note(HEADER)
    rows = []
    for file in files:
        for row in compare_file(folder, tokenizer, options, file, args):
            rows.append(row)
            note(str(row))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        with quiet_transformers():
            rows = run(args)
    except LongGenError as error:
        note(f"compare_ruler: {error}")
        return error.exit_code
    equal = all(row.equal for row in rows)
    print(json.dumps({"equal": equal, "rows": [asdict(row) | {"equal": row.equal} for row in rows]}))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
