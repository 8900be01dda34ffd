"""A table of speeds: prefill and decode beside what the machine allows, with fixed sizes. It has no bars."""

from __future__ import annotations

import gc
from dataclasses import asdict
from typing import Any

import torch

from gpucheck.report import Result, Settings, say, table
from gpucheck.shape import make_provider, open_engine, usual_shape
from longgen.benchmarking.ceilings import Ceilings, CeilingSizes, measure_ceilings
from longgen.benchmarking.measuring import bench_tokens, measure_length
from longgen.benchmarking.rows import COLUMNS, cell, make_row
from longgen.model.provider import Provider

STEPS = 8


def run(settings: Settings) -> Result:
    """16K, 128K (also with all KV on the device) and 512K tokens of the shape of Qwen3-0.6B."""
    sizes = CeilingSizes.of(torch.device("cpu") if settings.small else settings.device)
    ceilings = measure_ceilings(settings.device, usual_shape(settings.small), sizes)
    say(f"  ceilings: {asdict(ceilings)}")
    cases = (
        [(256, 0), (1024, 0), (1024, None)]
        if settings.small
        else [(16384, 0), (131072, 0), (131072, None), (524288, 0)]
    )
    provider = make_provider(settings)
    rows: list[dict[str, Any]] = []
    for tokens, resident in cases:
        rows.append(_case(provider, settings, ceilings, tokens, resident))
        table([title for title, _ in COLUMNS], [[cell(rows[-1], path) for _, path in COLUMNS]])
    return Result(True, {"ceilings": asdict(ceilings), "rows": rows})


def _case(
    provider: Provider, settings: Settings, ceilings: Ceilings, tokens: int, resident: int | None
) -> dict[str, Any]:
    """Prefill and decode at one length; `resident` None keeps all KV on the device."""
    gc.collect()  # the engine before it, and its host memory
    block = 16 if settings.small else 1024
    blocks = -(-bench_tokens(tokens, STEPS) // block) if resident is None else resident
    engine = open_engine(provider, settings, resident_blocks=blocks)
    measured = measure_length(engine, tokens, repeats=1, steps=STEPS, random_kv=False)
    shape, store = usual_shape(settings.small), engine.store
    return make_row(shape, store.layout.shape, store.sizes, measured, ceilings)
