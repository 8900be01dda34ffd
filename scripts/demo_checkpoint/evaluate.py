"""How often a checkpoint finds what is hidden, by task and length, through longgen's own engine."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from longgen.engine import Engine, EngineOptions
from longgen.evaluation.ask import Reader
from longgen.evaluation.filler import noise, tales
from longgen.evaluation.needle import MAGIC_NUMBER, PASS_KEY, Document, Needle, hide, is_right
from longgen.model.tokenizer import TextTokenizer

# Real words, none of which training made but by chance.
KEYS = (
    "garden",
    "window",
    "copper",
    "violin",
    "basket",
    "meadow",
    "lantern",
    "pepper",
    "harbor",
    "saddle",
    "thunder",
    "orchard",
)
DISTRACTORS = 3
_QUESTION_BYTES = 160


@dataclass(frozen=True, slots=True)
class Row:
    """One task at one length: how many of the questions were answered right.

    seconds: of reading the documents and answering, for all questions of its documents.
    peak_bytes: most memory that tensors took on a CUDA device meanwhile, 0 on the CPU.
    """

    length: int
    task: str
    right: int
    asked: int
    seconds: float
    peak_bytes: int


def evaluate(
    folder: Path,
    options: EngineOptions,
    lengths: Sequence[int],
    depths: int,
    *,
    distractors: bool = True,
    seed: int = 0,
) -> Iterator[Row]:
    """Rows for every length: the pass key and a magic number in one document, then magic numbers among others.

    Args:
        options: of the engine. With no resident blocks, as by default, all KV goes through host memory.
        lengths: bytes of a prompt, about.
        depths: documents of each sort at each length, the needles at so many depths from 0.05 to 0.95.
        distractors: whether to ask for magic numbers among others too.
    """
    engine = Engine.load(folder, options)
    tokenizer = TextTokenizer.load(folder)
    reader = Reader(engine, tokenizer, tokenizer.eos_ids(folder))
    for length in lengths:
        rng = random.Random(f"{seed} {length}")
        places = _depths(depths)
        yield from _rows(reader, length, _alone(rng, length, places))
        if distractors:
            yield from _rows(reader, length, _among(rng, length, places), name=f"{DISTRACTORS} distractors")


def _rows(
    reader: Reader, length: int, documents: Iterable[tuple[Document, list[Needle]]], name: str = ""
) -> Iterator[Row]:
    """A row under `name`, or one for each template."""
    device = reader.engine.provider.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = 0.0
    results: dict[str, list[bool]] = {}
    for document, needles in documents:
        start = time.monotonic()
        answers = reader.answers(document, needles)
        seconds += time.monotonic() - start
        for needle, answer in zip(needles, answers, strict=True):
            results.setdefault(name or needle.template.title, []).append(is_right(needle, answer))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    for title, right in results.items():
        yield Row(length, title, sum(right), len(right), round(seconds, 1), peak)


def _depths(count: int) -> list[float]:
    """Evenly from 0.05 to 0.95; the middle if it is only one."""
    return [0.05 + 0.9 * index / (count - 1) for index in range(count)] if count > 1 else [0.5]


def _filler(rng: random.Random) -> Iterator[str]:
    """One of two sorts, neither of which training has seen."""
    return noise() if rng.random() < 0.5 else tales(rng.randrange(1000))


def _number(rng: random.Random, digits: int) -> str:
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def _magic(rng: random.Random, key: str) -> Needle:
    return Needle(MAGIC_NUMBER, _number(rng, MAGIC_NUMBER.digits), key)


def _alone(rng: random.Random, length: int, depths: Sequence[float]) -> Iterator[tuple[Document, list[Needle]]]:
    """Each of the two needles at each of the depths once."""
    for index, depth in enumerate(depths):
        needles = [Needle(PASS_KEY, _number(rng, PASS_KEY.digits)), _magic(rng, rng.choice(KEYS))]
        placed = [(depth, needles[0]), (depths[index - 1], needles[1])]
        yield hide(placed, _filler(rng), length - _QUESTION_BYTES), needles


def _among(rng: random.Random, length: int, depths: Iterable[float]) -> Iterator[tuple[Document, list[Needle]]]:
    for depth in depths:
        needles = [_magic(rng, key) for key in rng.sample(KEYS, DISTRACTORS + 1)]
        places = [depth, *(rng.random() for _ in range(DISTRACTORS))]
        yield hide(list(zip(places, needles, strict=True)), _filler(rng), length - _QUESTION_BYTES), needles


def table(rows: Sequence[Row]) -> str:
    """A Markdown table: a line for each length, a column for each task."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    lines = [
        "| bytes | " + " | ".join(tasks) + " | seconds | device peak, bytes |",
        "| --- |" + " --- |" * (len(tasks) + 2),
    ]
    for length in dict.fromkeys(row.length for row in rows):
        here = {row.task: row for row in rows if row.length == length}
        cells = [f"{here[task].right} of {here[task].asked}" if task in here else "" for task in tasks]
        # The tasks of one document share its time.
        seconds = sum({row.task.endswith("distractors"): row.seconds for row in here.values()}.values())
        peak = max(row.peak_bytes for row in here.values())
        lines.append(f"| {length:,} | " + " | ".join(cells) + f" | {seconds:.1f} | {peak:,} |")
    return "\n".join(lines)


def report(rows: Iterable[Row]) -> list[Row]:
    """Prints each row to stderr as it comes, then the table; returns the rows."""
    done = []
    for row in rows:
        print(
            f"{row.length:>10,} bytes  {row.task:14} {row.right} of {row.asked}  {row.seconds} s  "
            f"device peak {row.peak_bytes:,}",
            file=sys.stderr,
        )
        done.append(row)
    print("\n" + table(done), file=sys.stderr)
    return done
