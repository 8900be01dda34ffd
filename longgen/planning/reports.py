"""What `longgen plan` prints: results to standard output, refusals to standard error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TextIO

from longgen.config import Settings
from longgen.errors import CapacityError, UsageError
from longgen.kv.memory_plan import MemoryPlan, PlanOptions
from longgen.planning.machine import Limits, parse_gbps, parse_tflops, this_machine
from longgen.planning.plans import as_json, find_shape, longest_request, plan_lengths, reach, reach_table, table

_USUAL_HEAD = 128  # which the machine's rates are shown for where no model is named


def limits_of(settings: Settings, h2d_gbps: str | None, tflops: str | None) -> Limits:
    """What the flags say about the machine. Raises UsageError."""
    attention, matmul = parse_tflops(tflops)
    return Limits(settings.gpu_memory, settings.cpu_memory, attention, matmul, parse_gbps(h2d_gbps))


def plan(
    model: str | None,
    lengths: Sequence[int],
    settings: Settings,
    slots: int,
    limits: Limits,
    machine_readable: bool,
    out: TextIO,
    err: TextIO,
) -> int:
    """Prints plans of a model for lengths in tokens (none: its trained window), or how far every known model reaches.

    slots: requests of that length that are alive at once.

    Returns the exit code: 1 if a length does not fit. Raises LongGenError for a model or a machine that cannot be read.
    """
    options = PlanOptions(settings.block_size, settings.chunk_size, settings.resident_blocks, slots, settings.compile)
    dtype = None if settings.dtype == "auto" else settings.dtype
    if model is None:
        if lengths:
            raise UsageError(
                "--max-len needs a --model; without both, the longest request of every known model is shown"
            )
        machine = this_machine(limits, _USUAL_HEAD)
        rows = reach(machine, limits, options, settings.max_new_tokens, dtype)
        print(json.dumps(rows, indent=1) if machine_readable else reach_table(rows, machine), file=out)
        return 0
    shape = find_shape(model, dtype)
    machine = this_machine(limits, shape.head_dim)
    lengths = lengths or [shape.trained_window]
    results = plan_lengths(shape, machine, options, lengths, settings.max_new_tokens)
    refusals = [result for result in results if isinstance(result, CapacityError)]
    longest = longest_request(shape, machine, options, settings.max_new_tokens)
    if machine_readable:
        entries = [
            as_json(result) if isinstance(result, MemoryPlan) else {"tokens": length, "refused": str(result)}
            for length, result in zip(lengths, results, strict=True)
        ]
        print(
            json.dumps([entry | {"slots": slots, "longest_of_each": longest} for entry in entries], indent=1), file=out
        )
    else:
        print(table(shape, machine, results), file=out)
        if slots > 1 and longest:
            print(f"{slots} slots: each can hold up to {longest:,} tokens", file=out)
    for refusal in refusals:
        print(f"longgen: error: {refusal}", file=err)
    return CapacityError.exit_code if refusals else 0
