#!/usr/bin/env python3
"""Measures how long a checkpoint's prompts take to encode, and how much memory that takes.

For texts of several kinds and sizes: seconds, tokens, and the growth of the process's peak memory per byte of the file,
everything counted from reading the file on (its bytes, its text, the ids, buffers, threads). Each measurement is made
in a process of its own, a few times: the fewest seconds count, and the most memory. Texts of up to `--check` MB are
encoded by transformers in one piece too, and the ids compared.

A table goes to standard error as it is measured; the last line on standard output is JSON. Exit code 1: ids differed, a
doubling of the text cost 3 times the seconds or more, or memory went beyond 40 bytes per byte of prose or 300 of text
without a space. Peak memory is read from /proc, so this needs Linux.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import gc
import json
import math
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

from prose_prompts import reference_prose

MB = 1_000_000
MOST_BYTES = MappingProxyType({"prose": 40, "CJK": 300, "one letter": 300, "base64": 300})
MOST_PER_DOUBLING = 3.0


def prose(size: int) -> bytes:
    """English prose of about 165,000 characters, again and again."""
    text = (reference_prose() + "\n\n").encode("utf-8")
    return (text * (size // len(text) + 1))[:size]


def cjk(size: int) -> bytes:
    """Chinese characters at random, without space, newline or punctuation."""
    characters = [chr(code) for code in range(0x4E00, 0x9FA6)]
    return "".join(random.Random(0).choices(characters, k=size // 3)).encode("utf-8")


def letter(size: int) -> bytes:
    """One letter again and again."""
    return b"a" * size


def base64_text(size: int) -> bytes:
    """Random bytes in base64, in one line."""
    return base64.b64encode(random.Random(0).randbytes(size * 3 // 4))


KINDS: MappingProxyType[str, Callable[[int], bytes]] = MappingProxyType(
    {"prose": prose, "CJK": cjk, "one letter": letter, "base64": base64_text}
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the measurements; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("checkpoint", type=Path, help="checkpoint folder, of which only the tokenizer is read")
    parser.add_argument("--sizes", default="1,4,16,64", help="MB (1,000,000 bytes) of text; default 1,4,16,64")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}; default all")
    parser.add_argument("--check", type=float, default=1, metavar="MB", help="compare ids up to this size; default 1")
    parser.add_argument("--repeat", type=int, default=3, help="times that each is measured; default 3")
    parser.add_argument("--one", type=Path, metavar="FILE", help="measure this file only, and print JSON")
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(measure(options.checkpoint, options.one, options.check * MB)))
        return 0
    rows = []
    print(
        "| text | MB | seconds | CPU seconds | per doubling | tokens | bytes of memory per byte | same ids |",
        file=sys.stderr,
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", file=sys.stderr)
    for kind in options.kinds.split(","):
        for row in measured_kind(options, kind):
            rows.append(row)
            print(table_row(row), file=sys.stderr, flush=True)
    faults = [fault for row in rows for fault in faults_of(row)]
    print(json.dumps({**versions(), "rows": rows, "faults": faults}))
    return 1 if faults else 0


def measured_kind(options: argparse.Namespace, kind: str) -> list[dict[str, Any]]:
    """The rows of one kind of text. Sizes take turns, so that what else the machine does falls on all of them alike."""
    sizes = [float(size) for size in options.sizes.split(",")]
    rounds = [
        [
            measured_apart(options.checkpoint, KINDS[kind](int(size * MB)), 0 if number else options.check)
            for size in sizes
        ]
        for number in range(options.repeat)
    ]
    rows: list[dict[str, Any]] = []
    for size, runs in zip(sizes, zip(*rounds, strict=True), strict=True):
        row = {"text": kind, "mb": size, **runs[0]}
        row |= {name: min(run[name] for run in runs) for name in ("seconds", "cpu_seconds")}
        row["bytes_per_byte"] = max(run["bytes_per_byte"] for run in runs)
        row["per_doubling"] = per_doubling(rows[-1] if rows else None, row)
        rows.append(row)
    return rows


def measured_apart(checkpoint: Path, text: bytes, check: float) -> dict[str, Any]:
    """`measure` of a text in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        file.write(text)
        file.flush()
        command = [sys.executable, __file__, str(checkpoint), "--one", file.name, "--check", str(check)]
        return json.loads(subprocess.check_output(command))


def measure(checkpoint: Path, path: Path, check: float) -> dict[str, Any]:
    """Seconds, tokens and memory of encoding a file as `longgen run --raw` does, and whether the ids are right."""
    from longgen.benchmarking.measuring import peak_resident_bytes, resident_bytes
    from longgen.model.tokenizer import TextTokenizer
    from longgen.run.requests import text_request

    tokenizer = TextTokenizer.load(checkpoint)
    # Memory that loading has left over would hide what encoding takes.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, started, computed = resident_bytes(), time.perf_counter(), time.process_time()
    request = text_request(str(path), path.read_bytes(), "strict")
    ids = tokenizer.encode(request.text, chat=False)
    seconds, grown = time.perf_counter() - started, peak_resident_bytes() - before
    computed = time.process_time() - computed
    size = path.stat().st_size
    result: dict[str, Any] = {
        "seconds": seconds,
        "cpu_seconds": computed,
        "tokens": len(ids),
        "bytes_per_byte": grown / size,
        "same_ids": None,
    }
    if size <= check:
        from transformers import AutoTokenizer

        library = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
        result["same_ids"] = library(request.text)["input_ids"] == ids.tolist()
    return result


def per_doubling(before: dict[str, Any] | None, row: dict[str, Any]) -> float | None:
    """How many times the seconds each doubling of the text has cost since the row before."""
    if before is None:
        return None
    return (row["seconds"] / before["seconds"]) ** (1 / math.log2(row["mb"] / before["mb"]))


def faults_of(row: dict[str, Any]) -> list[str]:
    """What of a row is not as it should be."""
    where, most = f"{row['text']}, {row['mb']:g} MB", MOST_BYTES[row["text"]]
    faults = []
    if row["same_ids"] is False:
        faults.append(f"{where}: the ids differ from transformers'")
    if row["per_doubling"] is not None and row["per_doubling"] >= MOST_PER_DOUBLING:
        faults.append(f"{where}: each doubling costs {row['per_doubling']:.2f} times the seconds")
    if row["bytes_per_byte"] > most:
        faults.append(f"{where}: {row['bytes_per_byte']:.1f} bytes of memory per byte, more than {most}")
    return faults


def table_row(row: dict[str, Any]) -> str:
    """A row as the table has it."""
    factor = "" if row["per_doubling"] is None else f"{row['per_doubling']:.2f} x"
    same = {True: "yes", False: "NO", None: ""}[row["same_ids"]]
    return (
        f"| {row['text']} | {row['mb']:g} | {row['seconds']:.2f} | {row['cpu_seconds']:.2f} | {factor} "
        f"| {row['tokens']:,} | {row['bytes_per_byte']:.1f} | {same} |"
    )


def versions() -> dict[str, str]:
    """What the figures depend on."""
    import tokenizers
    import torch
    import transformers

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": f"{len(models)} x {models[0]}" if models else platform.processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
