#!/usr/bin/env python3
"""Scores answers to RULER's tasks by its string match: a table of tasks and lengths.

Reads RESULTS/LENGTH/TASK.jsonl, whose lines have `outputs` and `pred`, as `longgen run --output` writes them for the
files of make_ruler.py. A score is the mean, in percent, of the share of `outputs` that `pred` contains, in any case;
for tasks named qa it is the percentage of answers that contain one of them. An answer that failed counts as wrong.

With --made, the last line that make_ruler.py printed, only the samples that it made count, and each of them must have
an answer: what else lies in the folder is of earlier runs.

The table goes to stderr; the last line on stdout is JSON. The exit code is 1 if an answer failed or is missing its
`pred`, and 2 if there is nothing to score or a sample has no answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

from ruler.tasks import NIAH, OTHERS, metric

from longgen.errors import UsageError

ORDER = (*NIAH, *OTHERS)


Made = dict[str, dict[str, int]]  # samples by length and task


def score_folder(folder: Path, made: Made | None = None) -> dict[str, dict[str, dict[str, Any]]]:
    """By task and length: score in percent, samples, and how many failed. Raises UsageError if there are none.

    made: what is scored; None: all there is.
    """
    results: dict[str, dict[str, dict[str, Any]]] = {}
    if made is None:
        files = [file for file in folder.glob("*/*.jsonl") if file.parent.name.isdecimal()]
    else:
        files = [folder / length / f"{task}.jsonl" for length, tasks in made.items() for task in tasks]
    if not files:
        raise UsageError(f"{folder} has no LENGTH/TASK.jsonl to score")
    rank = {name: place for place, name in enumerate(ORDER)}
    for file in sorted(files, key=lambda file: (rank.get(file.stem, len(rank)), file.stem, int(file.parent.name))):
        samples = made[file.parent.name][file.stem] if made is not None else None
        results.setdefault(file.stem, {})[file.parent.name] = score_file(file, samples)
    return results


def score_file(file: Path, samples: int | None = None) -> dict[str, Any]:
    """Score, samples and failures of one file. Raises UsageError for a line that is no result.

    samples: those whose index is less count, and there must be so many; None: all that there are.
    """
    score_of, scores, failed = metric(file.stem), list[float](), 0
    for number, line in enumerate(_text(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            outputs, pred, reason = record["outputs"], record.get("pred"), record.get("finish_reason")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"{file} line {number} is not a result: it must be JSON with outputs and pred") from None
        if samples is not None and record.get("index") not in range(samples):
            continue
        right = isinstance(pred, str) and reason != "error"
        failed += not right
        scores.append(score_of(pred, outputs) if right else 0.0)
    if not scores:
        raise UsageError(f"{file} holds no results")
    if samples is not None and len(scores) != samples:
        raise UsageError(f"{file} has answers to {len(scores)} of {samples} samples")
    return {"score": round(100 * sum(scores) / len(scores), 2), "samples": len(scores), "failed": failed}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None


def averages(results: dict[str, dict[str, dict[str, Any]]]) -> dict[str, float]:
    """The mean score of the tasks at each length."""
    by_length: dict[str, list[float]] = {}
    for lengths in results.values():
        for length, result in lengths.items():
            by_length.setdefault(length, []).append(result["score"])
    return {length: round(sum(found) / len(found), 2) for length, found in sorted(by_length.items(), key=_number)}


def _number(item: tuple[str, Any]) -> int:
    return int(item[0])


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Scores in percent, a row for each task and a column for each length."""
    means = averages(results)
    rows = [("task", [f"{int(length):,}" for length in means])]
    for task, lengths in results.items():
        cells = [f"{lengths[length]['score']:.1f}" if length in lengths else "-" for length in means]
        rows.append((task, cells))
    rows.append(("average", [f"{mean:.1f}" for mean in means.values()]))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}" + "".join(f"{cell:>10}" for cell in cells) for name, cells in rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="folder with LENGTH/TASK.jsonl")
    parser.add_argument("--made", type=json.loads, metavar="JSON", help="what make_ruler.py made; only that is scored")
    args = parser.parse_args(argv)
    try:
        results = score_folder(args.results, args.made)
    except UsageError as error:
        print(f"score_ruler: {error}", file=sys.stderr)
        return error.exit_code
    failed = sum(result["failed"] for lengths in results.values() for result in lengths.values())
    print(table(results), file=sys.stderr)
    if failed:
        print(f"score_ruler: {failed} answers failed and count as wrong", file=sys.stderr)
    print(json.dumps({"tasks": results, "average": averages(results), "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
