"""Plans for people: the model, the machine and the request brought together, and the result as text or JSON."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
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
from longgen.kv.memory_plan import Machine, MemoryPlan, PlanOptions
from longgen.kv.plan import RUNTIME_BYTES, Planner
from longgen.kv.predict import Prediction, Rates, given_rates, reference_rates
from longgen.model_shape import ModelShape
from longgen.names import KnownModel, find_known, known_models
from longgen.shape_file import read_shape
from longgen.units import show_bytes, show_length, show_seconds


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


def find_shape(model: str, dtype: str | None = None) -> ModelShape:
    """The shape of a model named by a YAML file, a short name, a checkpoint folder or a hub id, without its weights.

    dtype: of the weights as loaded; None: the checkpoint's own. Raises UsageError or CheckpointError.
    """
    path = Path(os.path.expanduser(model))
    if path.suffix in (".yaml", ".yml"):
        return read_shape(path, dtype)
    known = None if os.path.exists(path) else find_known(model)
    if known is not None:
        return _loaded_as(known.shape, dtype)
    from longgen.model.checkpoint import read_config, resolve_config
    from longgen.model.shape import model_shape

    return model_shape(read_config(resolve_config(model)), path.name or model, dtype)


def _loaded_as(shape: ModelShape, dtype: str | None) -> ModelShape:
    return replace(shape, dtype=dtype) if dtype else shape


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
    if device.type != "cuda" or planner.plan(prompt, new_tokens).roomy:
        return planner
    return planner.rated(device_rates(device, planner.model))


def device_rates(device: Any, shape: ModelShape) -> Rates:
    """What the device is measured to do; the reference's rates where no memory is free to measure: the plan then says
    what fits."""
    from longgen.planning.measure import measure_rates
    from longgen.shortage import shortage_reported

    try:
        with shortage_reported("measuring the device", device):
            return measure_rates(device, shape)
    except CapacityError:
        return reference_rates(shape.head_dim)


def hold_to(plan: MemoryPlan, gpu_memory: int | float | None, device: Any) -> None:
    """Makes torch keep to a cap that the user set, once it is measured what the process takes beside torch's memory:
    what goes over it fails instead of taking more of the card."""
    if gpu_memory is not None and plan.machine.device is not None:
        cap_allocator(plan.machine.device, max(RUNTIME_BYTES, plan.device.runtime), device.index)


def plan_lengths(
    shape: ModelShape, machine: Machine, options: PlanOptions, lengths: Sequence[int], new_tokens: int
) -> list[MemoryPlan | CapacityError]:
    """A plan for each length (prompt and `new_tokens` together), or why there is none.

    Raises UsageError for a length without room for a prompt.
    """
    planner = Planner(shape, machine, options)
    results: list[MemoryPlan | CapacityError] = []
    for length in lengths:
        if length <= new_tokens:
            raise UsageError(
                f"--max-len {length:,} has no room for a prompt beside --max-new-tokens {new_tokens:,}; raise the "
                "one or lower the other"
            )
        try:
            results.append(planner.plan(length - new_tokens, new_tokens))
        except CapacityError as error:
            results.append(error)
    return results


def longest_request(shape: ModelShape, machine: Machine, options: PlanOptions, new_tokens: int) -> int:
    """The most tokens, `new_tokens` of them generated, that every slot can hold at once; 0 if no prompt fits."""
    prompt = Planner(shape, machine, options).longest_prompt(new_tokens)
    return prompt + new_tokens if prompt else 0


def summary(plan: MemoryPlan) -> list[str]:
    """The plan in three lines."""
    device, host, sizes = plan.device, plan.host, plan.sizes
    buffers = device.store.total - device.store.resident + device.states
    budget, room = plan.machine.device, plan.machine.host
    where = "memory" if plan.machine.shared else "GPU"
    parts = [
        f"{show_bytes(device.weights)} weights",
        f"{show_bytes(device.activations)} activations",
        f"{show_bytes(buffers)} buffers",
        f"{show_bytes(device.store.resident)} resident KV",
    ]
    first = f"{where} {show_bytes(device.total)}" + (f" of {show_bytes(budget.usable)}" if budget else "")
    second = (
        f"host {show_bytes(host.kv)} of KV for {plan.prompt:,} + {plan.new_tokens:,} tokens "
        f"({show_bytes(plan.kv.cached_token_bytes)} each), {show_bytes(room.usable) if room else '?'} usable"
    )
    third = f"chunk {sizes.chunk_tokens:,}, ring {sizes.ring_entries} x {sizes.run_blocks * plan.kv.block_size:,}"
    return [f"{first}: {', '.join(parts)}", second, f"{third}; {_times(plan)}"]


def _times(plan: MemoryPlan) -> str:
    times = plan.prediction
    if times is None and not plan.machine.shared:
        return "all of it at once on the device, so no rates are measured and no times predicted"
    if times is None:
        return "no times are predicted for this device"
    return (
        f"prefill about {show_seconds(times.prefill_seconds)} ({times.prefill_bound}), decode about "
        f"{times.decode_rate:,.1f} tok/s ({times.decode_bound})"
    )


def correction(before: MemoryPlan, after: MemoryPlan) -> str | None:
    """What measuring changed about a plan, in one line; None if nothing."""
    device, parts = after.device, []
    if before.sizes != after.sizes:
        parts.append(
            f"measured {show_bytes(device.activations)} of activations and "
            f"{show_bytes(device.runtime + device.allocator)} for CUDA and its allocator: {after.resident_blocks:,} "
            f"resident blocks a layer instead of {before.resident_blocks:,}, GPU {show_bytes(device.total)}"
        )
    if _differ(before.prediction, after.prediction):
        parts.append(f"by the time that a token was measured to take, {_times(after)}")
    return "; ".join(parts) or None


def _differ(before: Prediction | None, after: Prediction | None) -> bool:
    """Whether a predicted time has changed by more than a tenth."""
    if before is None or after is None:
        return False
    ratios = (after.prefill_seconds / before.prefill_seconds, after.decode_rate / before.decode_rate)
    return any(abs(ratio - 1) > 0.1 for ratio in ratios)


def table(shape: ModelShape, machine: Machine, results: Sequence[MemoryPlan | CapacityError]) -> str:
    """What `longgen plan` prints: the model, the machine, and a column for each length that fits."""
    plans = [result for result in results if isinstance(result, MemoryPlan)]
    lines = [
        f"{shape.name}: {_parameters(shape.parameters)} weights in {shape.dtype}, {len(shape.kinds)} layers, "
        f"{show_bytes(shape.kv(1).cached_token_bytes)} of KV a token, trained for {show_length(shape.trained_window)}",
        *_machine_lines(machine),
    ]
    if machine.rates:
        rates = machine.rates
        lines.append(
            f"rates: attention {rates.attention / 1e12:,.0f} and matrix products {rates.matmul / 1e12:,.0f} TFLOP/s, "
            f"copies {rates.load / 1e9:,.1f} GB/s, pinning {rates.pin / 1e9:,.1f} GB/s ({rates.source})"
        )
    if plans:
        lines += ["", *_columns([_rows(plan) for plan in plans])]
        lines += ["", *_notes(plans)]
    return "\n".join(lines)


def _machine_lines(machine: Machine) -> list[str]:
    """What memory there is, and why no more."""
    device, host = machine.device, machine.host
    gpu = "not checked: no GPU here and no --gpu-memory (a run on the CPU holds weights and buffers in host memory too)"
    ram = "not checked"
    if device:
        gpu = f"{show_bytes(device.usable)} usable ({device.source})"
    if host:
        ram = f"{show_bytes(host.usable)} usable ({host.source}; {show_bytes(host.reserve)} in reserve)"
    return [f"GPU memory: {gpu}", f"host memory: {ram}"]


def _parameters(count: int) -> str:
    """As people say it: 1.88B, 0.60B, 0.98M."""
    return f"{count / 1e9:.2f}B" if count >= 1e8 else f"{count / 1e6:.2f}M"


def _rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    device, store, host, times = plan.device, plan.device.store, plan.host, plan.prediction
    rows = [
        ("tokens", show_length(plan.tokens)),
        *([("slots of so many tokens", f"{plan.sizes.slots}")] if plan.sizes.slots > 1 else []),
        ("GPU: CUDA and its allocator", show_bytes(device.runtime + device.allocator)),
        ("  weights", show_bytes(device.weights)),
        ("  activations", show_bytes(device.activations)),
        ("  recurrent states", show_bytes(device.states)),
        ("  decode buffers", show_bytes(store.decode)),
        ("  window buffers", show_bytes(store.window)),
        ("  ring", show_bytes(store.ring)),
        ("  prefill buffers", show_bytes(store.prefill)),
        ("  resident blocks", show_bytes(store.resident)),
        ("  in all", show_bytes(device.total)),
        ("host: KV blocks", show_bytes(host.kv)),
        ("  blocks a layer", f"{plan.host_blocks:,}"),
        ("  in all", show_bytes(host.total)),
        ("chunk, tokens", f"{plan.sizes.chunk_tokens:,}"),
        ("ring, entries x tokens", f"{plan.sizes.ring_entries} x {plan.sizes.run_blocks * plan.kv.block_size:,}"),
        ("prefill buffers, layers", f"{plan.sizes.prefill_depth}"),
    ]
    if times is not None:
        rows += [
            ("prefill", show_seconds(times.prefill_seconds)),
            ("  bound by", times.prefill_bound),
            ("decode", f"{times.decode_rate:,.1f} tok/s"),
            ("  bound by", times.decode_bound),
        ]
    return rows


def _columns(plans: list[list[tuple[str, str]]]) -> list[str]:
    """Rows of equal names side by side, numbers to the right; rows of nothing but 0 B are left out."""
    lines = []
    widths = [max(len(value) for _, value in rows) for rows in plans]
    first = max(len(name) for name, _ in plans[0])
    for index, (name, _) in enumerate(plans[0]):
        values = [rows[index][1] for rows in plans]
        if set(values) != {"0 B"}:
            cells = (value.rjust(width) for value, width in zip(values, widths, strict=True))
            lines.append(f"{name.ljust(first)}  {'  '.join(cells)}".rstrip())
    return lines


def _notes(plans: Sequence[MemoryPlan]) -> list[str]:
    return [f"{show_length(plan.tokens)}: {'; '.join(plan.reasons)}" for plan in plans]


def as_json(plan: MemoryPlan) -> dict[str, Any]:
    """The plan as plain values; bytes, tokens, seconds and tokens a second."""
    device = plan.machine.device
    return {
        "model": plan.model.name,
        "tokens": plan.tokens,
        "prompt_tokens": plan.prompt,
        "new_tokens": plan.new_tokens,
        "kv_bytes_per_token": plan.kv.cached_token_bytes,
        "block_size": plan.kv.block_size,
        "sizes": asdict(plan.sizes),
        "device_bytes": {**asdict(plan.device), "total": plan.device.total},
        "device_usable_bytes": device.usable if device else None,
        "host_bytes": {**asdict(plan.host), "total": plan.host.total},
        "host_usable_bytes": plan.machine.host.usable if plan.machine.host else None,
        "host_blocks_per_layer": plan.host_blocks,
        "reasons": list(plan.reasons),
        "prediction": asdict(plan.prediction) if plan.prediction else None,
    }


def reach(
    machine: Machine, limits: Limits, options: PlanOptions, new_tokens: int, dtype: str | None
) -> list[dict[str, Any]]:
    """For every known model, the longest request that fits this machine, in tokens (0: not even its weights).

    dtype: of the weights as loaded; None: the checkpoint's own.
    """
    rows = []
    for known in known_models():
        shape = _loaded_as(known.shape, dtype)
        fast = replace(machine, rates=rates_of(limits, reference_rates(shape.head_dim)))
        rows.append(_reached(known, shape, longest_request(shape, fast, options, new_tokens)))
    return rows


def _reached(known: KnownModel, shape: ModelShape, tokens: int) -> dict[str, Any]:
    return {
        "name": " ".join((known.name, *known.aliases)),
        "hub": known.hub,
        "weight_bytes": shape.weight_bytes,
        "kv_bytes_per_token": shape.kv(1).cached_token_bytes,
        "trained_window": shape.trained_window,
        "longest": tokens,
    }


def reach_table(rows: Sequence[dict[str, Any]], machine: Machine) -> str:
    """The rows of `reach` as text."""
    lines = [
        *_machine_lines(machine),
        "",
    ]
    cells = [("model", "weights", "KV a token", "trained for", "longest that fits")]
    for row in rows:
        longest = row["longest"]
        cells.append(
            (
                row["name"],
                show_bytes(row["weight_bytes"]),
                show_bytes(row["kv_bytes_per_token"]),
                show_length(row["trained_window"]),
                f"{longest:,}" if longest else "does not fit",
            )
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:
        numbers = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        lines.append(f"{line[0].ljust(widths[0])}  {'  '.join(numbers)}")
    return "\n".join(lines)
