"""A table of speeds: prefill and decode beside what the machine allows. It has no bars."""

from __future__ import annotations

import gc
import statistics
from dataclasses import asdict
from typing import Any

from gpucheck.ceilings import Ceilings, measure
from gpucheck.report import Result, Settings, say, seconds, table
from gpucheck.shape import NEW_TOKENS, Work, decode_work, make_provider, open_engine, prefill_work, random_prompt
from longgen.model.provider import Provider

WARM_UP, STEPS = 2, 8
COLUMNS = ("tokens", "resident", "what", "seconds", "h2d_gbps", "of_wire", "tflops", "read_gbps", "bound_s", "of_bound")


def run(settings: Settings) -> Result:
    """16K, 128K (also with all KV on the device) and 512K tokens of the shape of Qwen3-0.6B."""
    ceilings = measure(settings)
    ceilings.show()
    cases = (
        [(256, 0), (1024, 0), (1024, None)]
        if settings.small
        else [(16384, 0), (131072, 0), (131072, None), (524288, 0)]
    )
    provider = make_provider(settings)
    rows: list[dict[str, Any]] = []
    for tokens, resident in cases:
        rows += _case(provider, settings, ceilings, tokens, resident)
        table(COLUMNS, [[row[column] for column in COLUMNS] for row in rows[-2:]])
    return Result(True, {"ceilings": asdict(ceilings), "rows": rows})


def _case(
    provider: Provider, settings: Settings, ceilings: Ceilings, tokens: int, resident: int | None
) -> list[dict[str, Any]]:
    """Prefill and decode at one length; `resident` None keeps all KV on the device."""
    gc.collect()  # the engine before it, and its host memory
    block = 16 if settings.small else 1024
    blocks = -(-(tokens + NEW_TOKENS) // block) if resident is None else resident
    engine = open_engine(provider, settings, resident_blocks=blocks)
    engine.prefill(random_prompt(3 * engine.chunk_tokens), new_tokens=NEW_TOKENS)
    engine.decode_step(3)
    engine.reset()
    # Host memory for the whole request first, so that its price and that of the prefill are told apart.
    engine.store.announce(0, tokens + NEW_TOKENS)
    host = seconds(lambda: engine.store._parts.host.grow(0, tokens + NEW_TOKENS), settings.device)
    host_bytes, prompt = engine.store.host_bytes, random_prompt(tokens)
    prefill = seconds(lambda: engine.prefill(prompt, new_tokens=NEW_TOKENS), settings.device)
    step = statistics.median(
        [seconds(lambda: engine.decode_step(3), settings.device) for _ in range(WARM_UP + STEPS)][WARM_UP:]
    )
    where = "all" if resident is None else "none"
    if host_bytes:
        say(f"  {tokens:,} tokens: {host_bytes / 1e9:.1f} GB of host memory pinned in {host:.1f} s, not counted below")
    return [
        _row(ceilings, prefill_work(engine, tokens), prefill, tokens, where, "prefill") | {"host_s": host},
        _row(ceilings, decode_work(engine, tokens + WARM_UP), step, tokens, where, "decode step"),
    ]


def _row(ceilings: Ceilings, work: Work, time: float, tokens: int, resident: str, what: str) -> dict[str, Any]:
    """`bound_s`: the largest of wire, arithmetic and device memory, each at its ceiling and all at once.

    In prefill, loads meet offloads on the wire: their ceiling is that of both directions at once.
    """
    wire = ceilings.h2d_gbps if not work.offloaded else (ceilings.both_gbps or ceilings.h2d_gbps)
    arithmetic = work.linear_flop / ceilings.matmul_tflops
    if not work.read:  # one query row reads its keys; it does not multiply them at the rate of many
        arithmetic += work.attention_flop / ceilings.attention_tflops
    bound = max(
        max(work.loaded, work.offloaded) / (wire * 1e9), arithmetic / 1e12, work.read / (ceilings.device_gbps * 1e9)
    )
    return {
        "tokens": tokens,
        "resident": resident,
        "what": what,
        "seconds": time,
        "tokens_per_s": (tokens if what == "prefill" else 1) / time,
        "h2d_gbps": work.loaded / time / 1e9,
        "d2h_gbps": work.offloaded / time / 1e9,
        "of_wire": work.loaded / time / 1e9 / wire,
        "tflops": (work.attention_flop + work.linear_flop) / time / 1e12,
        "of_attention": work.attention_flop / time / 1e12 / ceilings.attention_tflops,
        "read_gbps": work.read / time / 1e9 or None,
        "bound_s": bound,
        "of_bound": bound / time,
    }
