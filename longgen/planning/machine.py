"""The machine that a plan is for: the user's limits, what it has, and what it does in a second."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longgen.errors import CapacityError, UsageError
from longgen.kv.budget import (
    DeviceBudget,
    HostBudget,
    beyond_machine,
    cap_allocator,
    device_budget,
    host_budget,
)
from longgen.kv.memory_plan import Machine, MemoryPlan
from longgen.kv.plan import RUNTIME_BYTES, Planner
from longgen.kv.predict import Rates, given_rates, reference_rates
from longgen.model_shape import ModelShape
from longgen.units import show_bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """What the user said about the machine; None is what the machine says itself.

    gpu_memory: bytes, or a fraction of the card (a float).   cpu_memory: bytes.
    attention, matmul: FLOP/s.   copies: bytes/s between host and device.
    """

    gpu_memory: int | float | None = None
    cpu_memory: int | None = None
    attention: float | None = None
    matmul: float | None = None
    copies: float | None = None


def parse_tflops(text: str | None) -> tuple[float | None, float | None]:
    """(attention, matrix product) FLOP/s from "692" or "692,790". Raises UsageError."""
    if text is None:
        return None, None
    numbers = _parse_rates(text, 1e12)
    if len(numbers) not in (1, 2):
        raise UsageError(f"--tflops {text!r} must be one or two numbers above 0, such as 692 or 692,790")
    return numbers[0], numbers[1] if len(numbers) == 2 else None


def parse_gbps(text: str | None) -> float | None:
    """Bytes/s from "55.4" GB/s. Raises UsageError."""
    if text is None:
        return None
    numbers = _parse_rates(text, 1e9)
    if len(numbers) != 1:
        raise UsageError(f"--h2d-gbps {text!r} must be a number above 0, such as 55.4")
    return numbers[0]


def _parse_rates(text: str, unit: float) -> list[float]:
    """Numbers with commas between them, times `unit`; none if one of them is no number above 0."""
    try:
        numbers = [float(part) * unit for part in text.split(",")]
    except ValueError:
        return []
    return numbers if all(0 < number < 1e19 for number in numbers) else []


def this_machine(limits: Limits, head_dim: int, root: Path = Path("/"), *, cuda: bool | None = None) -> Machine:
    """The machine for `longgen plan`: its GPU if it has one, else the GPU that --gpu-memory describes.

    cuda: whether to ask CUDA; None finds out. Rates not given are the H200's.
    """
    asked = limits.gpu_memory
    device: DeviceBudget | None
    if _has_cuda() if cuda is None else cuda:
        device = device_budget(asked)
    elif isinstance(asked, int):
        device = DeviceBudget(asked, asked, f"--gpu-memory {show_bytes(asked)}")
    elif asked is not None:
        raise UsageError(f"--gpu-memory {asked} is a fraction of a GPU, and there is none here; give it in GiB")
    else:
        device = None
    return Machine(host_budget(limits.cpu_memory, root), device, rates_of(limits, reference_rates(head_dim)))


def rates_of(limits: Limits, base: Rates) -> Rates:
    """`base` with the rates that the user gave."""
    return given_rates(base, attention=limits.attention, matmul=limits.matmul, copies=limits.copies)


def _has_cuda() -> bool:
    """Whether torch sees a GPU. Without the driver's library it cannot, and is not imported to find that out."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


def run_machine(limits: Limits, device: Any) -> Machine:
    """The machine for `longgen run` on a torch device, without rates: see `rated_planner`.

    A cap on the GPU's memory holds from here on, also for what is measured before there is a plan.
    """
    if device.type != "cuda":
        if isinstance(limits.gpu_memory, int | float):
            raise UsageError("gpu_memory limits a GPU, and this run is on the CPU; leave it out, or give cpu_memory")
        return Machine(_own_memory(limits.cpu_memory), None, None, shared=True)
    budget = device_budget(limits.gpu_memory, device.index)
    if limits.gpu_memory is not None:
        cap_allocator(budget, RUNTIME_BYTES, device.index)
    return Machine(_own_memory(limits.cpu_memory), budget)


def _own_memory(cap: int | None) -> HostBudget:
    """This machine's host memory. Raises CapacityError for a cap above what it could ever be given."""
    if cap is not None and (excess := beyond_machine(cap)):
        raise CapacityError(f"--cpu-memory {show_bytes(cap)} is {excess}; lower it")
    return host_budget(cap)


def rated_planner(planner: Planner, prompt: int, new_tokens: int, device: Any) -> Planner:
    """The planner with the device's rates, measured where they can change a plan for this request: not on the CPU, and
    not for a prompt that is one chunk with room to spare, which would wait for the measuring longer than it runs.

    Raises CapacityError if the request does not fit.
    """
    if device.type != "cuda":
        return planner
    plan = planner.plan(prompt, new_tokens)
    return planner if plan.roomy else planner.rated(device_rates(device, planner.model, plan.host.kv))


def device_rates(device: Any, shape: ModelShape, host_bytes: int | None = None) -> Rates:
    """What the device is measured to do; the reference's rates where no memory is free to measure: the plan then says
    what fits. host_bytes: see `measure_rates`."""
    from longgen.planning.measure import measure_rates
    from longgen.shortage import shortage_reported

    try:
        with shortage_reported("measuring the device", device):
            return measure_rates(device, shape, host_bytes)
    except CapacityError:
        return reference_rates(shape.head_dim)


def hold_to(plan: MemoryPlan, gpu_memory: int | float | None, device: Any) -> None:
    """Makes torch keep to a cap that the user set, once it is measured what the process takes beside torch's memory:
    what goes over it fails instead of taking more of the card."""
    if gpu_memory is not None and plan.machine.device is not None:
        cap_allocator(plan.machine.device, max(RUNTIME_BYTES, plan.device.runtime), device.index)
