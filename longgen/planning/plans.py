"""Plans for people: the model and the requests brought together with a machine, and the result as text or JSON."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from longgen.errors import CapacityError, UsageError
from longgen.kv.memory_plan import Machine, MemoryPlan, PlanOptions
from longgen.kv.plan import Planner
from longgen.kv.predict import Prediction, reference_rates
from longgen.model_shape import ModelShape
from longgen.names import KnownModel, find_known, known_models
from longgen.planning.machine import Limits, rates_of
from longgen.shape_file import read_shape
from longgen.units import show_bytes, show_length, show_seconds


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
    return {
        "model": plan.model.name,
        "tokens": plan.tokens,
        "prompt_tokens": plan.prompt,
        "new_tokens": plan.new_tokens,
        "kv_bytes_per_token": plan.kv.cached_token_bytes,
        "block_size": plan.kv.block_size,
        "sizes": asdict(plan.sizes),
        "device_bytes": {**asdict(plan.device), "total": plan.device.total},
        "host_bytes": {**asdict(plan.host), "total": plan.host.total},
        **_usable(plan.machine),
        "host_blocks_per_layer": plan.host_blocks,
        "reasons": list(plan.reasons),
        "prediction": asdict(plan.prediction) if plan.prediction else None,
    }


def _usable(machine: Machine) -> dict[str, int | None]:
    return {
        "device_usable_bytes": machine.device.usable if machine.device else None,
        "host_usable_bytes": machine.host.usable if machine.host else None,
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
        rows.append(_reached(known, shape, longest_request(shape, fast, options, new_tokens)) | _usable(machine))
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
