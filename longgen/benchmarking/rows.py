"""From what was measured to a row of the table: rates, shares of the ceilings, and the roofline."""

from __future__ import annotations

import statistics
from typing import Any

from longgen.benchmarking.ceilings import Ceilings
from longgen.benchmarking.measuring import Measured
from longgen.costs import attention_flop, head_flop, layer_flop, step_read_bytes
from longgen.kv.counters import Counters
from longgen.kv.shape import KVShape
from longgen.kv.sizes import StoreSizes
from longgen.model_shape import ModelShape

COLUMNS = (
    ("tokens", "tokens"),
    ("resident", "resident_blocks"),
    ("chunk", "chunk_tokens"),
    ("pinning s", "pin_s"),
    ("prefill s", "prefill.seconds"),
    ("tok/s", "prefill.tokens_per_s"),
    ("TFLOP/s", "prefill.tflops"),
    ("x roofline", "prefill.times_roofline"),
    ("attention TFLOP/s", "prefill.attention_tflops"),
    ("of its rate", "prefill.of_attention"),
    ("GB/s", "prefill.copied_gbps"),
    ("of wire", "prefill.of_wire"),
    ("decode ms", "decode.ms_per_token"),
    ("x roofline", "decode.times_roofline"),
    ("GB/s", "decode.h2d_gbps"),
    ("of wire", "decode.of_wire"),
    ("read GB/s", "decode.read_gbps"),
    ("of memory", "decode.of_device"),
    ("device peak", "device_peak_bytes"),
    ("host peak", "host_peak_bytes"),
)


def make_row(
    shape: ModelShape, kv: KVShape, sizes: StoreSizes, measured: Measured, ceilings: Ceilings
) -> dict[str, Any]:
    """Everything about one length as plain values, through a store of these sizes. docs/benchmarks.md explains them."""
    return {
        "tokens": measured.tokens,
        "resident_blocks": max(sizes.resident_by_layer(kv).values(), default=0),
        "blocks": kv.blocks_for(measured.tokens),
        "block_size": kv.block_size,
        "chunk_tokens": sizes.chunk_tokens,
        "ring": [sizes.ring_entries, sizes.run_blocks * kv.block_size],
        "pin_s": measured.pin_seconds,
        "prefill": prefill_row(shape, sizes.chunk_tokens, measured, ceilings) if measured.prefills else None,
        "decode": decode_row(shape, measured, ceilings),
        "device_peak_bytes": measured.device_peak,
        "host_peak_bytes": measured.host_peak,
        "host_kv_bytes": measured.host_bytes,
    }


def prefill_row(shape: ModelShape, chunk: int, measured: Measured, ceilings: Ceilings) -> dict[str, Any]:
    """The median prefill. The roofline does all arithmetic at the measured rates and nothing else.

    of_wire: the time that loads and offloads take on the wire if they run beside each other as long as there are both.
    attention_tflops, of_attention: attention's FLOP alone over the whole time, and its share of the best backend's.
    """
    seconds, tokens = statistics.median(measured.prefills), measured.tokens
    attention = attention_flop(shape, tokens, 0)
    linear = layer_flop(shape, tokens) + head_flop(shape, -(-tokens // chunk))
    roofline = attention / (ceilings.attention_tflops * 1e12) + linear / (ceilings.matmul_tflops * 1e12)
    return {
        "seconds": seconds,
        "runs": list(measured.prefills),
        "tokens_per_s": tokens / seconds,
        "attention_flop": attention,
        "linear_flop": linear,
        "tflops": (attention + linear) / seconds / 1e12,
        "attention_tflops": attention / seconds / 1e12,
        "of_attention": attention / seconds / 1e12 / ceilings.attention_tflops,
        "h2d_bytes": measured.prefill.h2d_bytes,
        "d2h_bytes": measured.prefill.d2h_bytes,
        "copied_gbps": (measured.prefill.h2d_bytes + measured.prefill.d2h_bytes) / seconds / 1e9,
        "of_wire": _wire_seconds(measured.prefill, ceilings) / seconds,
        "roofline_s": roofline,
        "times_roofline": seconds / roofline,
    }


def _wire_seconds(moved: Counters, ceilings: Ceilings) -> float:
    """The least seconds that copies take: both ways at once, and what is left of one way alone."""
    both = min(moved.h2d_bytes, moved.d2h_bytes)
    loads, offloads = moved.h2d_bytes - both, moved.d2h_bytes - both
    return (both / ceilings.both_gbps + loads / ceilings.h2d_gbps + offloads / ceilings.d2h_gbps) / 1e9


def decode_row(shape: ModelShape, measured: Measured, ceilings: Ceilings) -> dict[str, Any]:
    """The median step. The roofline is the longer of loading at the rate of such copies alone and reading device
    memory."""
    seconds = statistics.median(measured.steps)
    read = step_read_bytes(shape, measured.tokens)
    loading = measured.step_loaded / measured.copy_rate if measured.copy_rate else 0.0
    roofline = max(loading, read / (ceilings.device_gbps * 1e9))
    return {
        "ms_per_token": seconds * 1e3,
        "runs_ms": [step * 1e3 for step in measured.steps],
        "tokens_per_s": 1 / seconds,
        "h2d_bytes": measured.step_loaded,
        "h2d_gbps": measured.step_loaded / seconds / 1e9,
        "copy_bytes": measured.copy_bytes,
        "copy_gbps": measured.copy_rate / 1e9 if measured.copy_rate else None,
        "of_wire": measured.step_loaded / seconds / measured.copy_rate if measured.copy_rate else None,
        "read_bytes": read,
        "read_gbps": read / seconds / 1e9,
        "of_device": read / seconds / 1e9 / ceilings.device_gbps,
        "roofline_ms": roofline * 1e3,
        "times_roofline": seconds / roofline,
    }


def cell(row: dict[str, Any], path: str) -> Any:
    """The value of `prefill.seconds` and the like; None where its part is not there."""
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if value is not None else None
    return value
