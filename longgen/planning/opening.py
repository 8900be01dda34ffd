"""From a plan to an engine that keeps to it: host memory is made while the weights load, and once they are there a
chunk is measured, so that resident blocks are cut from what is really left of the device."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate, takewhile
from typing import Protocol

import torch

from longgen.engine import Engine, EngineOptions
from longgen.kv.budget import DeviceBudget
from longgen.kv.extents import ExtentCutter
from longgen.kv.memory_plan import MeasuredUse, MemoryPlan
from longgen.kv.plan import MEASURED_BLOCKS, Planner
from longgen.kv.supply import HostSupply
from longgen.kv.transfer import open_transfer
from longgen.model.provider import Provider
from longgen.planning.measure import timed
from longgen.shortage import shortage_reported

STEPS = 9  # whose time is taken; the shortest counts, since whatever else the host does only adds to it


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
        slot_tokens=plan.tokens,
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


class MemoryMeter(Protocol):
    """What a device tells of its memory. Bytes."""

    def settle(self) -> None:
        """Gives unused memory back to the device, and begins to look for the peak."""

    def allocated(self) -> int:
        """In tensors now."""

    def peak(self) -> int:
        """In tensors at most since `settle`."""

    def reserved(self) -> int:
        """Held by torch now."""

    def outside(self) -> int:
        """Held by this process beside torch: the context, kernels, libraries."""


class CudaMeter:
    """A MemoryMeter of a CUDA device, as cudaMemGetInfo and torch's allocator see it."""

    def __init__(self, device: torch.device, budget: DeviceBudget) -> None:
        self._device, self._others = device, budget.others

    def settle(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def outside(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return max(0, total - free - self._others - self.reserved())


def meter_of(device: torch.device, plan: MemoryPlan) -> MemoryMeter | None:
    """The meter of a plan's device; None where memory is not told apart from the host's."""
    budget = plan.machine.device
    return CudaMeter(device, budget) if device.type == "cuda" and budget is not None else None


def plan_again(
    planner: Planner,
    plan: MemoryPlan,
    provider: Provider,
    options: EngineOptions,
    meter: MemoryMeter | None,
    supply: HostSupply | None = None,
) -> MemoryPlan:
    """The plan with the device memory that a chunk is seen to take; without a meter, or where that could change
    nothing, the plan as it is.

    supply: which may be at work, and rests while something is timed.

    Raises CapacityError if not even a plan without resident blocks fits.
    """
    if meter is None or plan.roomy:
        return plan
    return planner.again(plan, measure_use(provider, options_of(plan, options), meter, supply))


def _step_seconds(engine: Engine, ids: torch.Tensor) -> float:
    """Seconds of a decode step that reads no run: of the first of ids [n], after the others, all in the open block."""
    engine.prefill(ids[1:], new_tokens=1 + STEPS)
    engine.decode_step(int(ids[0]))
    drain = engine.store.transfer.drain
    return min(timed(lambda: engine.decode_step(int(ids[0])), drain) for _ in range(STEPS))


def measure_use(
    provider: Provider, options: EngineOptions, meter: MemoryMeter, others: HostSupply | None = None
) -> MeasuredUse:
    """Runs a few blocks, a chunk after them and a token in an engine with the smallest ring and nothing resident, then
    some tokens in an open block for the time of one.

    others: of another engine; it rests while the time is taken, since a registration and the start of a kernel wait for
    the same locks of the driver.
    """
    meter.settle()
    supply = HostSupply(open_transfer(provider.device, warns=False))
    with shortage_reported("measuring a chunk", provider.device):
        smallest = replace(options, resident_blocks=0, ring_entries=2, ring_blocks=1, slot_tokens=None)
        engine = Engine.over(provider, smallest, None, supply)
        past = MEASURED_BLOCKS * options.block_size
        before, count = meter.allocated(), past + options.chunk_tokens()
        ids = torch.randint(provider.vocab_size, (count,), generator=torch.Generator().manual_seed(0))
        engine.prefill(ids[:past], new_tokens=options.chunk_tokens() + 1)
        engine.extend(ids[past:])
        engine.decode_step(int(ids[0]))
        peak, reserved = meter.peak(), meter.reserved()
        with others.quiet() if others else nullcontext():
            step = _step_seconds(engine, ids[: max(2, options.block_size - STEPS)])
    engine.close()
    use = MeasuredUse(meter.outside(), max(0, reserved - peak), peak - before, step)
    del engine, supply
    meter.settle()
    return use
