"""From a plan to an engine that keeps to it: host memory is made while the weights load."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, takewhile

import torch

from longgen.engine import EngineOptions
from longgen.kv.extents import ExtentCutter
from longgen.kv.plan import MemoryPlan
from longgen.kv.supply import HostSupply
from longgen.kv.transfer import open_transfer


def options_of(plan: MemoryPlan, options: EngineOptions) -> EngineOptions:
    """`options` with the sizes that were planned."""
    sizes = plan.sizes
    return replace(
        options,
        chunk_size=sizes.chunk_tokens,
        resident_blocks=plan.resident_blocks,
        ring_entries=sizes.ring_entries,
        ring_blocks=sizes.run_blocks,
        prefill_depth=sizes.prefill_depth,
    )


def begin_host_memory(plan: MemoryPlan, tokens: int, device: torch.device) -> HostSupply:
    """Starts to make the host memory of the first request, of `tokens` tokens in all.

    As much of it as fits beside weights that are being loaded; the rest follows when the request is announced.
    """
    supply = HostSupply(open_transfer(device))
    pieces = list(ExtentCutter(plan.kv, plan.sizes).piece_bytes(tokens))
    fitting = takewhile(lambda total: total <= plan.early_host_bytes, accumulate(pieces))
    supply.prepare(pieces[: len(list(fitting))])
    return supply
