"""What a row says: FLOP and bytes against the model's own weights and copies, and shares against the ceilings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longgen.benchmarking import ceilings, measuring
from longgen.benchmarking.ceilings import Ceilings
from longgen.benchmarking.measuring import Measured, bench_tokens, measure_length
from longgen.benchmarking.rows import COLUMNS, cell, make_row
from longgen.benchmarking.tables import table_lines
from longgen.costs import attention_flop, head_flop, layer_flop, step_read_bytes
from longgen.engine import Engine, EngineOptions
from longgen.kv.counters import Counters
from longgen.kv.passes import Pass
from longgen.kv.sizes import StoreSizes
from longgen.model.from_shape import random_provider
from longgen.model_shape import FULL, WINDOW, ModelShape
from longgen.sparse.base import Phase

SHAPE = ModelShape("tiny", (FULL,) * 2, 64, 320, 96, 4, 2, 16, 32768, tied=True, dtype="float32")
CEILINGS = Ceilings(
    h2d_gbps=50.0,
    d2h_gbps=40.0,
    both_gbps=25.0,
    attention_tflops=2.0,
    attention_backend="fast",
    backends={"fast": 2.0},
    matmul_tflops=4.0,
    device_gbps=1000.0,
    pinned_refusal=None,
)
MEASURED = Measured(
    tokens=1000,
    pin_seconds=0.5,
    host_bytes=4096,
    prefills=(4.0, 2.0, 3.0),
    prefill=Counters(h2d_bytes=30_000_000_000, d2h_bytes=1),
    steps=(0.1, 0.3, 0.2),
    step_loaded=2e9,
    copy_bytes=1 << 20,
    copy_rate=20e9,
    device_peak=123,
    host_peak=456,
)


def row_of(measured: Measured) -> dict[str, object]:
    return make_row(SHAPE, SHAPE.kv(16), StoreSizes(chunk_tokens=64, resident_blocks=3), measured, CEILINGS)


def test_medians_and_shares_of_the_ceilings() -> None:
    row = row_of(MEASURED)
    prefill, decode = row["prefill"], row["decode"]
    assert isinstance(prefill, dict) and isinstance(decode, dict)
    assert prefill["seconds"] == 3.0 and prefill["runs"] == [4.0, 2.0, 3.0]
    assert prefill["tokens_per_s"] == pytest.approx(1000 / 3)
    assert prefill["copied_gbps"] == pytest.approx(10)
    attention, linear = attention_flop(SHAPE, 1000, 0), layer_flop(SHAPE, 1000) + head_flop(SHAPE, 16)
    assert prefill["roofline_s"] == pytest.approx(attention / 2e12 + linear / 4e12)
    assert prefill["times_roofline"] == pytest.approx(3.0 / prefill["roofline_s"])
    assert prefill["tflops"] == pytest.approx((attention + linear) / 3e12)
    assert prefill["of_attention"] == pytest.approx(attention / 3e12 / 2)
    assert decode["ms_per_token"] == pytest.approx(200) and decode["tokens_per_s"] == pytest.approx(5)
    assert decode["h2d_gbps"] == pytest.approx(10) and decode["of_wire"] == pytest.approx(0.5)
    assert decode["roofline_ms"] == pytest.approx(100) and decode["times_roofline"] == pytest.approx(2)
    assert decode["of_device"] == pytest.approx(decode["read_gbps"] / 1000)
    assert (row["resident_blocks"], row["device_peak_bytes"], row["host_peak_bytes"], row["pin_s"]) == (
        3,
        123,
        456,
        0.5,
    )


@pytest.mark.parametrize(
    ("loaded", "offloaded", "wire"),
    [
        (30e9, 0, 30 / 50),  # loads alone
        (0, 20e9, 20 / 40),
        (10e9, 10e9, 10 / 25),  # both ways at once
        (30e9, 10e9, 10 / 25 + 20 / 50),  # as in a long prefill: most loads have no offload beside them
        (5e9, 25e9, 5 / 25 + 20 / 40),
    ],
)
def test_the_share_of_the_wire_is_of_the_least_time_that_the_copies_take(
    loaded: float, offloaded: float, wire: float
) -> None:
    moved = Counters(h2d_bytes=int(loaded), d2h_bytes=int(offloaded))
    assert cell(row_of(replace(MEASURED, prefill=moved)), "prefill.of_wire") == pytest.approx(wire / 3)


def test_a_ceiling_is_the_best_of_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = iter([{"a": 3e12, "b": 1e12}, {"a": 2e12, "b": 5e12}, {"a": 4e12, "b": 1e12}])
    matmul, memory = iter([1e12, 7e12, 6e12]), iter([4e9, 3e9, 2e9])
    monkeypatch.setattr(ceilings, "measure_backends", lambda *_: next(backends))
    monkeypatch.setattr(ceilings, "measure_matmul", lambda *_: next(matmul))
    monkeypatch.setattr(ceilings, "measure_memory", lambda *_: next(memory))
    found = ceilings.measure_ceilings(torch.device("cpu"), SHAPE)
    assert found.backends == {"a": 4.0, "b": 5.0}
    assert (found.attention_backend, found.attention_tflops) == ("b", 5.0)
    assert (found.matmul_tflops, found.device_gbps) == (7.0, 4.0)


def test_what_was_not_measured_is_none() -> None:
    row = row_of(replace(MEASURED, prefills=(), step_loaded=0.0, copy_bytes=None, copy_rate=None))
    assert row["prefill"] is None and cell(row, "prefill.seconds") is None
    assert cell(row, "decode.of_wire") is None and cell(row, "decode.copy_gbps") is None
    assert cell(row, "decode.roofline_ms") == pytest.approx(step_read_bytes(SHAPE, 1000) / 1e12 * 1e3)
    lines = list(table_lines([title for title, _ in COLUMNS], [[cell(row, path) for _, path in COLUMNS]]))
    assert len(lines) == 2 and len(lines[0]) == len(lines[1]) and " - " in lines[1]


@pytest.mark.parametrize("resident", [0, 2, 20])
def test_a_measured_length_moves_what_its_sizes_say(resident: int) -> None:
    tokens, steps, block, chunk = 150, 3, 16, 64
    engine = Engine.over(
        random_provider(SHAPE, torch.device("cpu")),
        EngineOptions(block_size=block, chunk_size=chunk, resident_blocks=resident, ring_entries=2, ring_blocks=2),
    )
    measured = measure_length(engine, tokens, repeats=2, steps=steps, random_kv=False)
    token_bytes = 2 * 2 * 2 * 16 * 4
    outside = [max(start // block - resident, 0) * block for start in (0, 64, 128)]
    opened = (150 - 144) if resident < 10 else 0  # the open block comes back from the host
    assert measured.prefill.h2d_bytes == token_bytes * (sum(outside) + opened)
    assert measured.prefill.d2h_bytes == token_bytes * max(tokens - resident * block, 0)
    assert measured.step_loaded == token_bytes * max(9 - resident, 0) * block
    assert len(measured.prefills) == 2 and len(measured.steps) == steps
    assert engine.store.length(0) == bench_tokens(tokens, steps)
    assert (measured.copy_rate is None) == (resident == 20)
    if resident < 20:
        assert measured.copy_bytes == 2 * block * 2 * 16 * 4
    assert measured.device_peak is None and measured.host_peak > 0


def test_random_kv_takes_the_place_of_the_prefill() -> None:
    engine = Engine.over(
        random_provider(SHAPE, torch.device("cpu")), EngineOptions(block_size=16, chunk_size=64, ring_blocks=2)
    )
    measured = measure_length(engine, 150, repeats=2, steps=2, random_kv=True)
    assert measured.prefills == () and len(measured.steps) == 2
    assert measured.step_loaded == 2 * 2 * 2 * 16 * 4 * 144
    assert engine.store.length(0) == bench_tokens(150, 2)


@pytest.mark.parametrize("tokens", [100, 150, 600])
def test_host_memory_is_made_before_any_pass_and_the_warm_up_reaches_the_depth_of_the_prompt(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.over(
        random_provider(SHAPE, torch.device("cpu")),
        EngineOptions(block_size=16, chunk_size=64, resident_blocks=2, ring_entries=2, ring_blocks=2),
    )
    done: list[tuple[str, int]] = []
    transfer, begin, make = engine.store.transfer, engine.store.begin, engine.store.transfer.allocate_host

    def allocate(nbytes: int) -> torch.Tensor:
        done.append(("made", nbytes))
        return make(nbytes)

    def open_pass(requests: list[tuple[int, int]], phase: Phase) -> Pass:
        done.append(("pass", engine.store.length(0) + requests[0][1]))
        return begin(requests, phase)

    monkeypatch.setattr(measuring, "_measure_copies", lambda *_: (None, None))
    monkeypatch.setattr(transfer, "allocate_host", allocate)
    monkeypatch.setattr(engine.store, "begin", open_pass)
    measured = measure_length(engine, tokens, repeats=2, steps=1, random_kv=False)
    what = [name for name, _ in done]
    first = what.index("pass")
    assert "made" not in what[first:]
    assert measured.host_bytes == sum(nbytes for _, nbytes in done[:first]) == engine.store.host_bytes
    ends = [end for name, end in done if name == "pass"]
    assert ends.index(tokens) < ends.index(64, 1)  # before the first chunk of the first prefill that counts


@pytest.mark.parametrize("past", [0, 5, 300])
@pytest.mark.parametrize("tokens", [1, 7, 130])
def test_attention_counts_every_pair(tokens: int, past: int) -> None:
    shape = replace(SHAPE, kinds=(FULL, WINDOW, WINDOW), window=48)
    positions = range(past, past + tokens)
    pairs = sum(p + 1 for p in positions) + 2 * sum(min(48, p + 1) for p in positions)
    assert attention_flop(shape, tokens, past) == 4 * 4 * 16 * pairs


def test_linear_work_and_reads_count_every_weight() -> None:
    provider = random_provider(SHAPE, torch.device("cpu"))
    named = list(provider.model.get_submodule("model.layers").named_parameters())
    weights = sum(weight.numel() for name, weight in named if "layernorm" not in name)
    assert layer_flop(SHAPE, 130) == 2 * weights * 130
    assert head_flop(SHAPE, 3) == 3 * 2 * 64 * 320
    assert step_read_bytes(SHAPE, 130) == 4 * (weights + 64 * 320) + 2 * 130 * 2 * 2 * 16 * 4
    windowed = replace(SHAPE, kinds=(FULL, WINDOW), window=48)
    assert step_read_bytes(windowed, 130) == 4 * (weights + 64 * 320) + (130 + 48) * 2 * 2 * 16 * 4
