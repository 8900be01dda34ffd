"""Requests interleaved over four slots get what each gets alone, whatever was in their slot before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longgen.model.provider import Provider
from tests.checkpoints import Build
from tests.engine.interleaving import OPERATIONS, SLOTS, Interleaving, Operation
from tests.engine.running import small_options

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen2", {"sliding": True, "window": 24}),
    ("qwen3_moe", {}),
    ("qwen3_next", {}),
]
FIRST: list[Operation] = [("start", 0, amount) for amount in (40, 141, 7, 96)]
operations = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(1, 2**SLOTS - 1), st.integers(0, 10_000)),
    min_size=8,
    max_size=24,
)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_interleaved_requests_get_what_each_gets_alone(build: Build, kind: str, options: dict[str, Any]) -> None:
    provider = Provider.load(build(kind, **options), dtype=torch.float32, device=torch.device("cpu"))

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(operations, st.sampled_from([0, 2, 32]))
    def interleave(chosen: list[Operation], resident: int) -> None:
        Interleaving(provider, small_options(resident=resident)).run([*FIRST, *chosen])

    interleave()


def test_a_slot_that_reads_another_would_be_seen(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot's open block in place of another's reaches the logits: the test above can fail."""
    provider = Provider.load(build("qwen3"), dtype=torch.float32, device=torch.device("cpu"))
    interleaving = Interleaving(provider, small_options())
    interleaving.run(FIRST)
    decode = interleaving.engine.store._parts.decode
    get = type(decode).get
    monkeypatch.setattr(
        type(decode), "get", lambda self, slot, layer: get(self, 2 if (self is decode and slot == 1) else slot, layer)
    )
    with pytest.raises(AssertionError):
        interleaving.run([("decode", 15, 0)])


def test_poison_that_is_not_cleared_would_be_seen(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = Provider.load(build("qwen3_next"), dtype=torch.float32, device=torch.device("cpu"))
    interleaving = Interleaving(provider, small_options())
    interleaving.run([*FIRST, ("release", 0, 0)])
    states = interleaving.engine.provider._states
    monkeypatch.setattr(states, "reset", lambda slot: None)
    with pytest.raises(AssertionError):
        interleaving.run([("start", 0, 30)])
