"""Why a request does not fit, in one line: every number, and what to do about it."""

from __future__ import annotations

from longgen.kv.budget import DeviceBudget, HostBudget
from longgen.kv.memory_plan import DeviceNeeds, HostNeeds, PlanOptions
from longgen.units import show_bytes

USUAL_BLOCK = 1024  # tokens; a chunk and a ring entry hold one at least


def device_refusal(request: str, needs: DeviceNeeds, budget: DeviceBudget, advice: str) -> str:
    """Why not even the smallest sizes fit on the device. request: what was asked for; advice: see `what_to_do`."""
    fixed = needs.runtime + needs.weights
    if fixed > budget.usable:
        return (
            f"{request} needs {show_bytes(needs.weights)} of GPU memory for its weights and "
            f"{show_bytes(needs.runtime)} for CUDA, {_excess(fixed, budget.usable)} ({budget.source}); give more, or "
            "take a smaller model"
        )
    parts = {
        "weights": needs.weights,
        "CUDA and its allocator": needs.runtime + needs.allocator,
        "activations": needs.activations,
        "states and buffers": needs.states + needs.store.total - needs.store.resident,
        "resident blocks": needs.store.resident,
    }
    return (
        f"{request} needs {show_bytes(needs.total)} of GPU memory at least ({_listed(parts)}), "
        f"{_excess(needs.total, budget.usable)} ({budget.source}); {advice}"
    )


def host_refusal(request: str, needs: HostNeeds, device: int, budget: HostBudget, advice: str) -> str:
    """Why a request does not fit in host memory.

    device: bytes of weights, activations and buffers that are in it too.   request, advice: as for `device_refusal`.
    """
    in_turn = {
        "for the KV cache": needs.kv,
        "for the weights while they are loaded": needs.loading,
        "for the chunk that is measured then": needs.measuring,
    }
    largest = max(in_turn, key=lambda name: in_turn[name])
    parts = {
        largest: in_turn[largest],
        "for the process": needs.process,
        "for weights, activations and buffers": device,
    }
    total = needs.total + device
    return (
        f"{request} needs {show_bytes(total)} of host memory ({_listed(parts)}), {_excess(total, budget.usable)} "
        f"({budget.source}; {show_bytes(budget.reserve)} in reserve); {advice}"
    )


def what_to_do(
    longest: int, new_tokens: int, options: PlanOptions, *, fewer: bool, on_device: bool, shared: bool
) -> str:
    """The end of a refusal.

    longest: tokens of the longest prompt that does fit; 0 if none does.   fewer: none does, but with fewer new tokens
    some would.   on_device: it is the device's memory that is short.   shared: device and host have one memory.
    """
    # What leaves the device less leaves the host more only where resident blocks take its place.
    of_buffers = on_device or shared or options.resident_blocks is None
    given = {
        "--max-new-tokens": fewer,
        "--block-size": options.block_size > USUAL_BLOCK,
        "--chunk-size": options.chunk_size is not None and of_buffers,
        "--resident-blocks": bool(options.resident_blocks) and on_device,  # else they only move
        "--slots": options.slots > 1,
    }
    lower = " or ".join(name for name, is_given in given.items() if is_given)
    if longest:
        fits = f"the longest prompt that fits is {longest:,} tokens, with {new_tokens:,} generated"
        return f"{fits}; a lower {lower} leaves more room" if lower else fits
    return f"no prompt fits: give more, or {f'lower {lower}' if lower else 'take a smaller model'}"


def _listed(parts: dict[str, int]) -> str:
    return ", ".join(f"{show_bytes(count)} {name}" for name, count in parts.items() if count)


def _excess(needed: int, usable: int) -> str:
    """By how much, too: two amounts that are rounded to the same may still differ."""
    return f"{show_bytes(needed - usable)} more than the {show_bytes(usable)} that are usable"
