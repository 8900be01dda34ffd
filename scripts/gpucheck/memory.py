"""Device memory that does not depend on the prompt, and host memory that is the KV's bytes."""

from __future__ import annotations

import gc
from typing import Any

import torch

from gpucheck.report import Result, Settings, say, synchronize, table
from gpucheck.shape import NEW_TOKENS, make_provider, open_engine, random_prompt
from longgen.benchmarking.measuring import resident_bytes
from longgen.engine import Engine

DEVICE_SPREAD, HOST_SPREAD = 0.01, 0.02
BAR_BYTES = 4 << 30  # host memory has a bar from here on
# In each ring entry: the shortest prompt's last chunk reads four runs too, so that merging takes all the memory it may.
RING_BLOCKS = 2
COLUMNS = ("tokens", "peak_allocated", "peak_reserved", "device_used", "kv_bytes", "host_bytes", "host_rss")


def run(settings: Settings) -> Result:
    """Prompts of 16K, 64K and 256K tokens with no resident blocks, after one that warms up."""
    prompts = (256, 1024, 4096) if settings.small else (16_384, 65_536, 262_144)
    engine = open_engine(make_provider(settings), settings, ring_blocks=RING_BLOCKS)
    _request(engine, prompts[0])
    rows = [_measure(engine, tokens, settings) for tokens in prompts]
    table(COLUMNS, [[row[column] for column in COLUMNS] for row in rows])
    peaks = [row["peak_allocated"] for row in rows]
    device_spread = (max(peaks) - min(peaks)) / min(peaks) if min(peaks) else 0.0
    host_spread = max(
        (
            abs(row[which] / row["kv_bytes"] - 1)
            for row in rows
            for which in ("host_bytes", "host_rss")
            if row["kv_bytes"] >= BAR_BYTES
        ),
        default=0.0,
    )
    say(f"  device peaks differ by {device_spread:.3%} (bar {DEVICE_SPREAD:.0%})")
    say(f"  host memory differs from the KV's bytes by {host_spread:.3%} (bar {HOST_SPREAD:.0%}, from 4 GiB)")
    data = {"prompts": rows, "device_spread": device_spread, "host_spread": host_spread}
    return Result(device_spread <= DEVICE_SPREAD and host_spread <= HOST_SPREAD, data)


def _request(engine: Engine, tokens: int) -> None:
    engine.prefill(random_prompt(tokens), new_tokens=NEW_TOKENS)
    for token in range(3, 3 + NEW_TOKENS):
        engine.decode_step(token)


def _measure(engine: Engine, tokens: int, settings: Settings) -> dict[str, Any]:
    """One request. `host_rss`: resident memory of the process beyond what it had without any host blocks."""
    device, layout = settings.device, engine.store.layout
    engine.reset()
    gc.collect()
    bare = resident_bytes() - engine.store.host_bytes  # returned blocks are kept for the next request
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    _request(engine, tokens)
    synchronize(device)
    on_cuda = device.type == "cuda"
    free, total = torch.cuda.mem_get_info(device) if on_cuda else (0, 0)
    return {
        "tokens": tokens,
        "peak_allocated": torch.cuda.max_memory_allocated(device) if on_cuda else 0,
        "peak_reserved": torch.cuda.max_memory_reserved(device) if on_cuda else 0,
        "device_used": total - free,
        "kv_bytes": (tokens + NEW_TOKENS) * layout.token_bytes * len(layout.full_layers),
        "host_bytes": engine.store.host_bytes,
        "host_rss": resident_bytes() - bare,
    }
