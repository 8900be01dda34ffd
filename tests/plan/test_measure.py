"""Measured rates: bytes and FLOP over the clock's seconds, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
import torch

from longgen.kv.predict import LAYER_SECONDS, LAYER_STARTS
from longgen.kv.transfer import CpuTransfer
from longgen.planning.measure import (
    REPEATS,
    measure_attention,
    measure_copies,
    measure_matmul,
    measure_memory,
    measure_pinning,
    measure_rates,
    measure_starts,
)
from tests.plan.shapes import SLIDING


def ticking() -> Iterator[float]:
    """A second for each pair of readings."""
    return (float(n) for n in count())


def test_rates_are_work_over_time() -> None:
    clock = ticking()
    copies = measure_copies(CpuTransfer(), 1000, clock.__next__)
    assert copies.load == copies.offload == copies.load_beside == copies.offload_beside == 1000 * REPEATS
    assert copies.pinned_refusal is None
    assert measure_matmul(CpuTransfer(), torch.float32, 8, clock.__next__) == 2 * 8**3 * REPEATS
    assert measure_memory(CpuTransfer(), 1000, clock.__next__) == 2000 * REPEATS
    assert measure_starts(CpuTransfer(), 5, clock.__next__) == 5 * REPEATS
    assert measure_pinning(CpuTransfer(), 3 << 10, clock.__next__) == 3 << 10
    flop = 4 * SLIDING.q_heads * SLIDING.head_dim * 3 * 256
    assert measure_attention(CpuTransfer(), SLIDING, 3, 256, clock.__next__) == flop * REPEATS


def test_every_rate_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("COPY_BYTES", 1 << 16), ("PIN_BYTES", 1 << 16), ("ROWS", 8), ("KEYS", 256), ("SIDE", 32)):
        monkeypatch.setattr(f"longgen.planning.measure.{name}", size)
    rates = measure_rates(torch.device("cpu"), SLIDING)
    assert min(rates.attention, rates.matmul, rates.load, rates.offload, rates.memory, rates.pin, rates.layer) > 0
    assert rates.layer != LAYER_SECONDS
    assert rates.source == "measured here"


@pytest.mark.parametrize(("planned", "pinned"), [(None, 1 << 12), (0, 1 << 10), (3 << 10, 3 << 10), (1 << 20, 1 << 12)])
def test_no_more_is_pinned_than_is_planned(monkeypatch: pytest.MonkeyPatch, planned: int | None, pinned: int) -> None:
    for name, size in (("COPY_BYTES", 1 << 10), ("PIN_BYTES", 1 << 12), ("ROWS", 8), ("KEYS", 256), ("SIDE", 32)):
        monkeypatch.setattr(f"longgen.planning.measure.{name}", size)
    monkeypatch.setattr("longgen.planning.measure.measure_pinning", lambda _, nbytes: nbytes)
    assert measure_rates(torch.device("cpu"), SLIDING, planned).pin == pinned


def test_of_rates_on_the_cores_the_best_counts_and_modules_reach_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = {
        "attention": (1.0, 3.0, 2.0),
        "matmul": (5.0, 6.0, 7.0),
        "memory": (9.0, 10.0, 8.0),
        "starts": (50.0, 85.0, 60.0),
    }
    for name, rising in rounds.items():
        measured = iter(rising)
        monkeypatch.setattr(f"longgen.planning.measure.measure_{name}", lambda *_, of=measured: next(of))
    for name in ("COPY_BYTES", "PIN_BYTES"):
        monkeypatch.setattr(f"longgen.planning.measure.{name}", 1 << 16)
    rates = measure_rates(torch.device("cpu"), SLIDING)
    assert (rates.attention, rates.matmul, rates.memory, rates.layer) == (3.0, 7.0, 6.5, LAYER_STARTS / 85)
