"""Merging partial attention: the Triton kernel against plain torch, in time and in bytes against device memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gpucheck.report import Result, Settings, median_seconds, say, table
from longgen.attention.call import Partial
from longgen.attention.merge import MergedAttention, MergeKernel, Part, TorchMerge
from longgen.attention.merges import Merges, triton_merge
from longgen.kv.transfer import open_transfer
from longgen.planning.measure import measure_memory

HEADS, HEAD_DIM = 16, 128
PARTS = 9  # a chunk and eight runs
MOST_ERROR = 1e-6  # of either kernel against float64
COLUMNS = ("rows", "what", "kernel", "us", "bytes", "gbps", "of_memory", "error")


def run(settings: Settings) -> Result:
    """A row for each number of query rows, kernel and kind of merge: what it takes at once into the sum, and all."""
    memory = measure_memory(open_transfer(settings.device, warns=False), (1 << 20) if settings.small else (1 << 30))
    verdicts = Merges((triton_merge(),)).explain(torch.bfloat16, HEAD_DIM, settings.device)
    found: list[dict[str, Any]] = []
    for rows in (1, 16, 64) if settings.small else (1, 4096, 8192):
        for kernel in (TorchMerge(), triton_merge()):
            if dict(verdicts)[kernel.name] is None:
                found += _measured(kernel, rows, memory, settings)
    say(f"  {HEADS} heads of {HEAD_DIM}, bf16 parts, token-major; a copy on the device moves {memory / 1e9:,.0f} GB/s")
    table(COLUMNS, [[row[column] for column in COLUMNS] for row in found])
    for name, why in verdicts:
        if why is not None:
            say(f"  {name}: {why}")
    served = settings.device.type != "cuda" or dict(verdicts)["triton"] is None
    data = {"memory_gbps": memory / 1e9, "rows": found, "why_not": dict(verdicts)["triton"]}
    return Result(served and all(row["error"] <= MOST_ERROR for row in found), data)


def make_parts(rows: int, device: torch.device) -> list[Partial]:
    """As FlashAttention gives them."""
    generator = torch.Generator(device).manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    return [(normal(rows, HEADS, HEAD_DIM).bfloat16().transpose(0, 1), normal(HEADS, rows)) for _ in range(PARTS)]


def _measured(kernel: MergeKernel, rows: int, memory: float, settings: Settings) -> list[dict[str, Any]]:
    parts = make_parts(rows, settings.device)
    numbers = rows * HEADS * HEAD_DIM
    calls = 1 if settings.small else 50 if rows == 1 else 5
    out = torch.zeros(HEADS, rows, HEAD_DIM, device=settings.device)
    lse = torch.zeros(HEADS, rows, device=settings.device)
    step = [Part(out, lse), *(Part(*part) for part in parts[1 : kernel.most_parts])]
    one = median_seconds(partial(kernel, step, out, lse), settings.device, calls=calls)
    every = median_seconds(lambda: _merged(kernel, parts).finish(torch.bfloat16), settings.device, calls=calls)
    found, error = [], _error(kernel, parts)
    for what, time, moved in (
        (f"{len(step) - 1} into the sum", one, numbers * step_bytes(kernel)),
        (f"all {PARTS}", every, numbers * all_bytes(kernel)),
    ):
        row = {"rows": rows, "what": what, "kernel": kernel.name, "us": time * 1e6, "bytes": moved}
        found.append(row | {"gbps": moved / time / 1e9, "of_memory": moved / time / memory, "error": error})
    return found


def step_bytes(kernel: MergeKernel) -> int:
    """Bytes a query channel and row to add as many bf16 parts as the kernel takes at once to the fp32 sum."""
    if isinstance(kernel, TorchMerge):
        return 26  # sum *= weight: 8; part * weight: 6; sum += that: 12
    return 8 + 2 * (kernel.most_parts - 1)


def all_bytes(kernel: MergeKernel) -> int:
    """Bytes a query channel and row to merge PARTS bf16 parts to a bf16 output."""
    if isinstance(kernel, TorchMerge):
        return 6 + 26 * (PARTS - 1) + 6
    most, left = kernel.most_parts, PARTS - kernel.most_parts
    moved = 2 * most + 4
    while left > most - 1:
        moved, left = moved + step_bytes(kernel), left - (most - 1)
    return moved + 4 + 2 * left + 2


def _merged(kernel: MergeKernel, parts: list[Partial]) -> MergedAttention:
    merged = MergedAttention((parts[0][0], parts[0][1].clone()), kernel)  # in which the sum's LSE is kept
    for part in parts[1:]:
        merged.add(part)
    return merged


def _error(kernel: MergeKernel, parts: list[Partial]) -> float:
    """Relative error of a merge of the first 64 rows against float64."""
    parts = [(out[:, :64], lse[:, :64]) for out, lse in parts]
    lses = torch.stack([lse for _, lse in parts]).double()
    weights = (lses - lses.logsumexp(0)).exp()[..., None]
    expected = (torch.stack([out for out, _ in parts]).double() * weights).sum(0)
    got = _merged(kernel, parts).result().double()
    return float((got - expected).norm() / expected.norm())
