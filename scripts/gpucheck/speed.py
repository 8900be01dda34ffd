"""Prefill and decoding against their bars: `longgen bench` for each work, in a process of its own.

Eager and compiled runs of a work follow one another: cards and hours differ by some per cent.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpucheck.report import Result, Settings, say, table
from longgen.benchmarking.rows import cell

ROOT = Path(__file__).parents[2]
COLUMNS = (
    ("work", "work"),
    ("resident", "resident_blocks"),
    ("chunk", "chunk_tokens"),
    ("code", "code"),
    ("prefill s", "prefill.seconds"),
    ("x roofline", "prefill.times_roofline"),
    ("bar", "prefill_bar"),
    ("decode ms", "decode.ms_per_token"),
    ("of copies", "decode.of_wire"),
    ("bar", "decode_bar"),
    ("attention TFLOP/s", "ceilings.attention_tflops"),
    ("products", "ceilings.matmul_tflops"),
    ("GB/s in", "ceilings.h2d_gbps"),
    ("out", "ceilings.d2h_gbps"),
    ("both", "ceilings.both_gbps"),
)


@dataclass(frozen=True, slots=True)
class Work:
    """One length of one model.

    Attributes:
        arguments: of `longgen bench`.
        compiled: whether it is run with `--compile` as well.
        prefill: times its roofline, at most; one of its runs must keep to it.
        decode: of the rate of copies, at least; the eager run must keep to it, whose code single tokens run anyway.
    """

    arguments: tuple[str, ...]
    compiled: bool = False
    prefill: float | None = None
    decode: float | None = None

    @property
    def name(self) -> str:
        return " ".join(self.arguments)


def _work(arguments: str, **bars: Any) -> Work:
    return Work(tuple(arguments.split()), **bars)


DENSE = "--shape qwen3-0.6b --resident-blocks"
WORKS = (
    _work(f"{DENSE} 0 --lengths 128K", compiled=True, prefill=1.30, decode=0.97),
    _work(f"{DENSE} all --lengths 128K", compiled=True, prefill=1.20),
    _work(f"{DENSE} 0 --lengths 512K", compiled=True, prefill=1.15, decode=0.97),
    _work("--shape qwen2.5-7b-1m --gpu-memory 24GiB --lengths 512K", compiled=True, prefill=1.15),
    _work("--shape qwen3.5-0.8b --lengths 512K", prefill=1.40),
    _work("--model demo --resident-blocks 0 --lengths 4M"),
)
SMALL_WORKS = tuple(
    _work(f"--model demo --resident-blocks {resident} --lengths 300 --block-size 16 --repeats 1 --steps 2")
    for resident in ("0", "all")
)


def run(settings: Settings) -> Result:
    """Every work, shown as it comes."""
    rows: list[dict[str, Any]] = []
    for work in SMALL_WORKS if settings.small else WORKS:
        for compiled in (False, True) if work.compiled else (False,):
            rows.append(_row(work, compiled, settings))
            table([title for title, _ in COLUMNS], [[cell(rows[-1], path) for _, path in COLUMNS]])
    missed = list(_missed(rows))
    for bar in missed:
        say(f"  MISSED {bar}")
    return Result(not missed, {"rows": rows, "missed": missed})


def _row(work: Work, compiled: bool, settings: Settings) -> dict[str, Any]:
    """What `longgen bench` says of one length, and its ceilings; without `prefill` if it failed."""
    command = [sys.executable, "-m", "longgen", "bench", *work.arguments, "--device", str(settings.device)]
    command += ["--compile"] if compiled else []
    row: dict[str, Any] = {"work": work.name, "code": "compiled" if compiled else "eager"}
    row |= {"prefill_bar": work.prefill, "decode_bar": work.decode, "prefill": None, "decode": None, "ceilings": None}
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)  # its log is this one's
    if done.returncode:
        return row | {"failed": done.returncode}
    said = json.loads(done.stdout.splitlines()[-1])
    return row | {"ceilings": said["ceilings"]} | said["rows"][0]


def _missed(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Works whose bar none of their runs keeps to, and runs that failed."""
    for row in rows:
        if row["prefill"] is None:
            yield f"{row['work']}, {row['code']}: exit code {row['failed']}"
            continue
        if row["code"] != "eager":
            continue
        ways = [each["prefill"] for each in rows if each["work"] == row["work"] and each["prefill"]]
        least = min(prefill["times_roofline"] for prefill in ways)
        if row["prefill_bar"] is not None and least > row["prefill_bar"]:
            yield f"{row['work']}: prefill at {least:.3f} times its roofline, over {row['prefill_bar']}"
        if row["decode_bar"] is not None and row["decode"]["of_wire"] < row["decode_bar"]:
            yield f"{row['work']}: decoding at {row['decode']['of_wire']:.1%} of copies, under {row['decode_bar']:.0%}"
