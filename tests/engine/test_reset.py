"""A request leaves nothing behind: A, B, A gives A's answer twice, and poisoned buffers change nothing."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoints import Build, random_ids
from tests.engine.running import answer, check_a_b_a, feed, open_engine, poison

KINDS = [
    ("qwen3", {}),
    ("qwen2", {"sliding": True, "window": 24}),
    ("qwen3_moe", {}),
    ("qwen3_next", {}),
    ("qwen3_5_moe", {}),
]
RESIDENT = [0, 3, 32]


@pytest.mark.parametrize("resident", RESIDENT)
@pytest.mark.parametrize("other", [37, 298])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_b_a(build: Build, kind: str, options: dict[str, object], other: int, resident: int) -> None:
    folder = build(kind, **options)
    a, b = random_ids(131, seed=1), random_ids(other, seed=2)
    fresh = answer(open_engine(folder, resident=resident), a)
    check_a_b_a(open_engine(folder, resident=resident), fresh, a, b)


@pytest.mark.parametrize("resident", RESIDENT)
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_logits_are_the_same_bit_for_bit_after_poison(
    build: Build, kind: str, options: dict[str, object], resident: int
) -> None:
    folder, ids = build(kind, **options), random_ids(150)
    sizes = [64, 64, 10, 1, 1, 10]
    engine = open_engine(folder, resident=resident)
    fresh = feed(engine, ids, sizes)
    feed(engine, ids[:, :40], [40])
    engine.reset()
    poison(engine)
    engine.provider.reset(0)
    assert torch.equal(feed(engine, ids, sizes), fresh)


def test_poison_would_be_seen(build: Build) -> None:
    """NaN in a buffer that holds a live request reaches its logits: the tests above can fail."""
    ids = random_ids(100)
    engine = open_engine(build("qwen3"))
    feed(engine, ids[:, :90], [64, 26])
    engine.store.slots[0].length = 0  # makes the store believe that the slot is empty
    engine.store.poison()
    engine.store.slots[0].length = 90
    assert feed(engine, ids[:, 90:], [10]).isnan().any()


def test_host_memory_goes_back(build: Build) -> None:
    engine = open_engine(build("qwen3"))
    sizes = []
    for seed in range(4):
        answer(engine, random_ids(290, seed=seed))
        engine.reset()
        sizes.append(engine.store.host_bytes)
    assert len(set(sizes)) == 1
