"""Slots on CUDA: interleaved requests get what each gets alone, and a batch what its members get."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from longgen.kv.transfer import CudaTransfer, Queue
from longgen.model.provider import Provider
from tests.checkpoints import Build, random_ids
from tests.engine.interleaving import OPERATIONS, SLOTS, Interleaving, Operation
from tests.engine.running import open_engine, small_options
from tests.engine.test_isolation import FIRST

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"head_dim": 64}),
    ("qwen2", {"sliding": True, "window": 24}),
    ("qwen3_moe", {}),
    ("qwen3_next", {}),
]
STEPS = 30


def random_operations(seed: int) -> list[Operation]:
    rng = random.Random(seed)
    return [(rng.choice(OPERATIONS), rng.randint(1, 2**SLOTS - 1), rng.randint(0, 10_000)) for _ in range(STEPS)]


@pytest.mark.parametrize("resident", [0, 2, 32])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_interleaved_requests_get_what_each_gets_alone(
    build: Build, device: torch.device, kind: str, options: dict[str, Any], seed: int, resident: int
) -> None:
    """In fp32: bit for bit where passes have the same shapes, 1e-5 after a batch."""
    if device.type == "cpu" and (seed or resident != 2):
        pytest.skip("tests/engine has the rest on the CPU")
    provider = Provider.load(build(kind, **options), dtype=torch.float32, device=device)
    interleaving = Interleaving(provider, small_options(resident=resident, device=str(device)))
    interleaving.run([*FIRST, ("decode", 15, 0), *random_operations(seed), ("decode", 15, 1)])
    assert interleaving.batches >= 2


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
def test_two_threads_on_two_slots_get_what_each_gets_alone(build: Build, kind: str) -> None:
    engine = open_engine(build(kind), slots=2, device="cuda", dtype="bfloat16")
    fresh = open_engine(build(kind), device="cuda", dtype="bfloat16")
    prompts = [random_ids(300, seed=seed)[0] for seed in range(2)]
    expected = [[fresh.prefill(ids), *(fresh.decode_step(token) for token in (5, 6, 7))] for ids in prompts]
    got: dict[int, list[torch.Tensor]] = {}

    def serve(slot: int) -> None:
        for _ in range(5):
            logits = [engine.prefill(prompts[slot], slot)]
            got[slot] = logits + [engine.decode_step(token, slot) for token in (5, 6, 7)]

    threads = [threading.Thread(target=serve, args=(slot,)) for slot in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for slot in range(2):
        assert all(torch.equal(a, b) for a, b in zip(got[slot], expected[slot], strict=True))


@pytest.mark.cuda
def test_loads_that_are_late_are_counted_as_waits(build: Build) -> None:
    """The load stream sleeps before the pass: its first loads cannot be done when their attention is queued."""
    engine = open_engine(build("qwen3", head_dim=64), device="cuda", dtype="bfloat16")
    engine.prefill(random_ids(200)[0])
    transfer = engine.store.transfer
    assert isinstance(transfer, CudaTransfer)
    transfer.drain()
    with torch.cuda.stream(transfer._streams[Queue.LOAD]):
        torch.cuda._sleep(2_000_000_000)  # clock cycles, about a second
    engine.decode_step(5)
    stats = engine.observer.request(0)
    assert stats is not None and stats.decode.ring_waits >= len(engine.store._parts.ring.entries)
