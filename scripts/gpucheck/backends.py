"""Which attention backends there are, why the others cannot serve, and how fast each is."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from gpucheck.report import Result, Settings, median_seconds, say, table
from longgen.attention.backends import default_kernels
from longgen.attention.call import AttentionCall
from longgen.attention.kernels import Backend, Kernels
from longgen.attention.plain import PlainTorch
from longgen.planning.measure import call_flop

HEAD_SIZES = (64, 128, 256)
KV_HEADS, GROUPS = 8, 2


def kv_bytes(call: AttentionCall) -> float:
    """K and V, read once each."""
    return 2.0 * call.k.numel() * call.k.element_size()


def make_call(settings: Settings, *, head_dim: int, rows: int, keys: int) -> AttentionCall:
    """No mask: what a chunk or a decoded token does to a run of the past."""

    def normal(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn((heads, tokens, head_dim), device=settings.device, dtype=torch.bfloat16)

    q, k, v = normal(KV_HEADS * GROUPS, rows), normal(KV_HEADS, keys), normal(KV_HEADS, keys)
    return AttentionCall(q, k, v, head_dim**-0.5)


def run(settings: Settings) -> Result:
    """A row for each head size, number of query rows and backend, in the order they are tried."""
    kernels = default_kernels(settings.device)
    keys = 2048 if settings.small else 65_536
    row_counts = (1, 8, 256 if settings.small else 8192)
    found: list[dict[str, Any]] = []
    for head_dim in HEAD_SIZES:
        for rows in row_counts:
            call = make_call(settings, head_dim=head_dim, rows=rows, keys=keys)
            found += list(_measured(kernels, call, settings))
    say(f"  {keys:,} keys, {KV_HEADS} KV heads, {GROUPS * KV_HEADS} query heads, bfloat16, no mask; * serves")
    headers = ("head", "rows", "backend", "TFLOP/s", "GB/s", "why not")
    table(headers, [[row[key] for key in ("head_dim", "rows", "label", "tflops", "gbps", "why_not")] for row in found])
    served = {(row["head_dim"], row["rows"]) for row in found if row["serves"]}
    return Result(len(served) == len(HEAD_SIZES) * len(row_counts), {"keys": keys, "backends": found})


def _measured(kernels: Kernels, call: AttentionCall, settings: Settings) -> Iterator[dict[str, Any]]:
    rows, head_dim = call.q.shape[1:]
    by_name: dict[str, Backend] = {backend.name: backend for backend in kernels.taking(call)}
    serving = kernels.choose(call).name
    for name, objection in kernels.explain(call):
        row: dict[str, Any] = {"head_dim": head_dim, "rows": rows, "backend": name, "why_not": objection or ""}
        row |= {"serves": name == serving, "label": f"{'*' if name == serving else ' '} {name}"}
        row |= {"tflops": None, "gbps": None}
        if objection is None and (name != PlainTorch.name or settings.small):  # the last resort would take minutes
            calls = 20 if rows < 128 and not settings.small else 1
            time = median_seconds(partial(by_name[name], call), call.q.device, calls=calls)
            row |= {"tflops": call_flop(call) / time / 1e12, "gbps": kv_bytes(call) / time / 1e9}
        yield row
