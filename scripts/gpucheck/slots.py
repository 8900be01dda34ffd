"""Tokens a second of several requests decoded as one batch, everything on the device. It has no bars."""

from __future__ import annotations

import gc
from typing import Any

from gpucheck.report import Result, Settings, median_seconds, say, seconds, table
from gpucheck.shape import NEW_TOKENS, make_provider, open_engine, random_prompt, usual_shape
from longgen.costs import step_read_bytes
from longgen.model.provider import Provider

COUNTS = (1, 2, 4, 8)
STEPS_AT_ONCE = 4  # timed together, without reading a result in between
COLUMNS = ("slots", "prefill_s", "step_s", "tokens_per_s", "of_each", "times_one", "read_gbps")


def run(settings: Settings) -> Result:
    """1, 2, 4 and 8 slots of 8K tokens of the shape of Qwen3-0.6B."""
    tokens = 256 if settings.small else 8192
    provider = make_provider(settings)
    rows: list[dict[str, Any]] = []
    for count in COUNTS:
        rows.append(_case(provider, settings, tokens, count))
        rows[-1]["times_one"] = rows[-1]["tokens_per_s"] / rows[0]["tokens_per_s"]
    say(f"  {tokens:,} tokens in each slot, all resident; a step is one token of every slot")
    table(COLUMNS, [[row[column] for column in COLUMNS] for row in rows])
    return Result(True, {"tokens": tokens, "rows": rows})


def _case(provider: Provider, settings: Settings, tokens: int, count: int) -> dict[str, Any]:
    """Prefills `count` slots one after another and decodes them together."""
    gc.collect()  # the engine before it
    block = 16 if settings.small else 1024
    room = tokens + NEW_TOKENS * STEPS_AT_ONCE
    engine = open_engine(provider, settings, resident_blocks=-(-room // block), slots=count)
    prompt, slots = random_prompt(tokens), tuple(range(count))

    def prefill() -> None:
        for slot in slots:
            engine.prefill(prompt, slot, new_tokens=room - tokens)

    def decode() -> None:
        for _ in range(STEPS_AT_ONCE):
            engine.decode_slots(slots, [3] * count)

    prefill()  # what is made on first use
    prefilled = seconds(prefill, settings.device)
    step = median_seconds(decode, settings.device) / STEPS_AT_ONCE
    moved = [engine.observer.request(slot) for slot in slots]
    assert all(stats is not None and stats.decode.h2d_bytes == stats.prefill.d2h_bytes == 0 for stats in moved)
    read = step_read_bytes(usual_shape(settings.small), tokens)
    weights = read - tokens * engine.store.layout.shape.cached_token_bytes
    return {
        "slots": count,
        "prefill_s": prefilled,
        "step_s": step,
        "tokens_per_s": count / step,
        "of_each": 1 / step,
        "read_gbps": (weights + count * (read - weights)) / step / 1e9,  # weights once, KV of every slot
    }
