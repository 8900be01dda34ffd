"""Predicted times: what bounds them, how they grow, and how they agree with measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from longgen.costs import traffic_bytes
from longgen.kv.predict import LAYER_STARTS, balanced_chunk, chunk_parts, given_rates, predict, reference_rates
from longgen.kv.sizes import StoreSizes
from longgen.model_shape import ModelShape
from longgen.planning.plans import find_shape
from tests.plan.shapes import SEVEN, SMALL

RATES = reference_rates(128)


def test_the_balance_is_that_of_the_design() -> None:
    # chunk * query heads / KV heads FLOP per byte, in bfloat16
    assert balanced_chunk(SMALL, RATES) == pytest.approx(692e12 / 55.4e9 * 8 / 16)
    assert balanced_chunk(SEVEN, RATES) == pytest.approx(692e12 / 55.4e9 * 4 / 28)


def test_modules_without_attention_take_the_time_that_was_measured() -> None:
    parts = chunk_parts(SMALL, SMALL.kv(1024), StoreSizes(chunk_tokens=8192), replace(RATES, attention=1e30), 8192, 0)
    assert 16 * parts["compute"] == pytest.approx(0.4, rel=0.1)  # 131,072 tokens on an H200
    assert traffic_bytes(SMALL) == pytest.approx(4.3e6, rel=0.02)


def test_compiled_modules_move_less_and_prefill_alone_is_faster_for_it() -> None:
    kv, sizes, rates = SMALL.kv(1024), StoreSizes(chunk_tokens=8192), replace(RATES, pin=1e12, layer=0.0)
    eager, compiled = (predict(SMALL, kv, sizes, rates, 131_072, 1, compiled=compiled) for compiled in (False, True))
    # Of 28 layers: the rotation at 4 bytes a number instead of 10, the gated product at 6 instead of 10.
    saved = 28 * (6 * 3072 + 4 * 3072)
    assert traffic_bytes(SMALL) - traffic_bytes(SMALL, compiled=True) == saved
    assert eager.prefill_seconds - compiled.prefill_seconds == pytest.approx(131_072 * saved / rates.memory, rel=0.01)
    assert eager.decode_rate == compiled.decode_rate
    short = [predict(SMALL, kv, sizes, rates, 8191, 1, compiled=flag).prefill_seconds for flag in (False, True)]
    assert short[0] == short[1]  # no full chunk, nothing runs compiled


def test_merging_moves_what_the_kernel_reads_and_writes() -> None:
    """Two parts in bf16 and the fp32 sum, read and written: 12 bytes a query channel for two runs."""
    sizes, past = StoreSizes(chunk_tokens=8192), 16 * 16_384  # 16 runs, and the chunk itself
    rates = replace(RATES, attention=1e30, matmul=1e30)
    merged = [chunk_parts(SMALL, SMALL.kv(1024), sizes, rates, 8192, tokens)["compute"] for tokens in (past, 0)]
    per_run = (merged[0] - merged[1]) * rates.memory / (28 * 16 * 128 * 8192 * 17)
    assert 4 <= per_run <= 6


def test_norms_that_scale_by_one_plus_their_weight_move_more() -> None:
    hybrid = find_shape("qwen3.5-0.8b")
    assert hybrid.delta is not None
    attending = hybrid.count("full") * (8 + 2) * 256  # numbers of q and k
    numbers = 24 * 2 * 1024 + attending
    saved = (
        16 * numbers + 6 * attending + 4 * 24 * 3584
    )  # norms at 4 bytes, rotations at 4 for 10, products at 6 for 10
    assert traffic_bytes(hybrid) - traffic_bytes(hybrid, compiled=True) == saved


def test_long_prefills_take_the_time_that_was_measured() -> None:
    """Seconds of eager runs on an H200 with flash-attn-3, beside its TFLOP/s of a moment at the shape's head size."""
    hybrid = find_shape("qwen3.5-0.8b")
    for shape, attention, prompt, chunk, resident, measured in (
        (SMALL, 740, 131_072, 16_384, 0, 3.33),
        (SMALL, 740, 131_072, 16_384, 129, 3.33),
        (SMALL, 740, 131_072, 8192, 0, 3.52),
        (hybrid, 818, 131_072, 16_384, 129, 1.15),
        (hybrid, 818, 524_288, 16_384, 513, 11.9),
    ):
        rates = replace(RATES, attention=attention * 1e12, matmul=780e12, pin=1e12)
        sizes = StoreSizes(chunk_tokens=chunk, resident_blocks=resident)
        predicted = predict(shape, shape.kv(1024), sizes, rates, prompt, 1)
        assert predicted.prefill_seconds == pytest.approx(measured, rel=0.07)


def test_small_chunks_wait_for_loads_and_large_ones_do_not() -> None:
    kv = SMALL.kv(1024)
    slow = predict(SMALL, kv, StoreSizes(chunk_tokens=1024), RATES, 524_288, 1)
    fast = predict(SMALL, kv, StoreSizes(chunk_tokens=8192), RATES, 524_288, 1)
    assert slow.prefill_bound == "loading KV from host memory"
    assert fast.prefill_bound == "compute"
    assert slow.prefill_seconds > 4 * fast.prefill_seconds


def test_prefill_grows_with_the_square_of_a_long_prompt() -> None:
    kv, sizes = SMALL.kv(1024), StoreSizes(chunk_tokens=8192)
    seconds = [predict(SMALL, kv, sizes, RATES, length, 1).prefill_seconds for length in (1 << 20, 1 << 21)]
    assert seconds[1] / seconds[0] == pytest.approx(4, rel=0.05)


def test_a_sum_over_some_chunks_is_the_sum_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    kv, sizes = SMALL.kv(1024), StoreSizes(chunk_tokens=1024)
    some = predict(SMALL, kv, sizes, RATES, 1_000_000, 1).prefill_seconds
    monkeypatch.setattr("longgen.kv.predict.CHUNKS_SUMMED", 1 << 20)
    assert some == pytest.approx(predict(SMALL, kv, sizes, RATES, 1_000_000, 1).prefill_seconds, rel=0.01)


def test_decoding_reads_what_is_not_resident_over_the_wire() -> None:
    kv = SMALL.kv(1024)
    length = 524_288
    result = predict(SMALL, kv, StoreSizes(), RATES, length, 0)
    assert result.decode_bound == "loading KV from host memory"
    assert result.decode_rate == pytest.approx(55.4e9 / (length * 114_688))
    half = predict(SMALL, kv, StoreSizes(resident_blocks=256), RATES, length, 0)
    assert half.decode_rate == pytest.approx(2 * result.decode_rate)


def test_short_decoding_is_bound_by_starting_kernels() -> None:
    result = predict(SMALL, SMALL.kv(1024), StoreSizes(resident_blocks=8), RATES, 1000, 0)
    assert result.decode_bound == "starting kernels"
    assert 1 / result.decode_rate == pytest.approx(28 * 0.7e-3, rel=0.01)
    slower = predict(SMALL, SMALL.kv(1024), StoreSizes(resident_blocks=8), replace(RATES, layer=2e-3), 1000, 0)
    assert 1 / slower.decode_rate == pytest.approx(56e-3)


@pytest.mark.parametrize(
    ("name", "start", "token"),
    [
        ("qwen3-0.6b", 9.5e-6, 19.0e-3),
        ("qwen2.5-7b-1m", 9.1e-6, 19.0e-3),
        ("qwen3-0.6b", 6.27e-6, 17.5e-3),
        ("qwen2.5-7b-1m", 8.86e-6, 29.6e-3),
        ("qwen3.5-0.8b", 6.98e-6, 24.6e-3),
        ("qwen3-30b-a3b", 6.28e-6, 46.9e-3),
    ],
)
def test_a_host_starts_a_token_as_fast_as_so_many_small_operations(name: str, start: float, token: float) -> None:
    """Seconds of one operation and of one token, both measured on an H200's host, whose speed moved meanwhile."""
    shape, rates = find_shape(name), replace(RATES, layer=LAYER_STARTS * start)
    predicted = predict(shape, shape.kv(1024), StoreSizes(resident_blocks=8), rates, 900, 0)
    assert predicted.decode_bound == "starting kernels"
    assert 1 / predicted.decode_rate == pytest.approx(token, rel=0.3)


def test_rates_that_are_given_take_the_place_of_the_reference() -> None:
    assert given_rates(RATES, attention=None, matmul=None, copies=None) is RATES
    given = given_rates(RATES, attention=173e12, matmul=None, copies=25e9)
    assert (given.attention, given.load, given.offload) == (173e12, 25e9, 25e9)
    assert given.matmul == pytest.approx(790e12 / 4)
    assert given.memory == pytest.approx(RATES.memory / 4)
    assert given.source == "--tflops and --h2d-gbps given, the rest measured on an H200"


def test_a_prefill_that_is_faster_than_pinning_waits_for_it() -> None:
    kv, sizes, length = SMALL.kv(1024), StoreSizes(chunk_tokens=8192, resident_blocks=4), 100_000
    slow = predict(SMALL, kv, sizes, replace(RATES, pin=1e9), length, 1)
    assert slow.prefill_bound == "pinning host memory"
    assert slow.prefill_seconds == (98 - 4) * 1024 * 114_688 / 1e9  # 97.7 blocks, of which four are on the device
    fast = predict(SMALL, kv, sizes, replace(RATES, pin=1e12), length, 1)
    assert fast.prefill_bound == "compute" and fast.prefill_seconds < slow.prefill_seconds
    assert slow.decode_rate == fast.decode_rate


@pytest.mark.parametrize("shape", [SMALL, SEVEN])
def test_pinning_hides_behind_a_long_prefill(shape: ModelShape) -> None:
    """At the H200's rates: 7.2 s of 512K tokens of the smaller model, whose prefill takes six times as long."""
    kv, sizes = shape.kv(1024), StoreSizes(chunk_tokens=8192)
    assert predict(shape, kv, sizes, RATES, 524_288, 1).prefill_bound == "compute"
    assert RATES.pin == 8.3e9
