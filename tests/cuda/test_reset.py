"""A request leaves nothing behind on CUDA either, host blocks and streams included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longgen.engine import Engine
from tests.checkpoints import Build, random_ids
from tests.engine.running import answer, check_a_b_a, feed, open_engine, poison

KINDS = [
    ("qwen3", {"head_dim": 64}),
    ("qwen2", {"sliding": True, "window": 24}),
    ("qwen3_moe", {}),
    ("qwen3_next", {}),
    ("qwen3_5", {}),
]
RESIDENT = [0, 3, 64]
SIZES = [256, 256, 70, *[1] * 30, 100]
TOTAL = sum(SIZES)


def open_on(
    build: Build, device: torch.device, kind: str, options: dict[str, Any], resident: int, *, compiled: bool = False
) -> Engine:
    if device.type == "cpu" and (kind not in ("qwen3", "qwen3_next") or resident == 64):
        pytest.skip("tests/engine has the rest on the CPU")
    folder = build(kind, **options)
    return open_engine(folder, chunk=256, resident=resident, device=str(device), dtype="bfloat16", compile=compiled)


@pytest.mark.parametrize("resident", RESIDENT)
@pytest.mark.parametrize("other", [37, 700])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_b_a(
    build: Build, device: torch.device, kind: str, options: dict[str, Any], other: int, resident: int
) -> None:
    a, b = random_ids(531, seed=1), random_ids(other, seed=2)
    fresh = answer(open_on(build, device, kind, options, resident), a)
    check_a_b_a(open_on(build, device, kind, options, resident), fresh, a, b)


@pytest.mark.parametrize("resident", RESIDENT)
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_logits_are_the_same_bit_for_bit_after_poison(
    build: Build, device: torch.device, kind: str, options: dict[str, Any], resident: int
) -> None:
    check_after_poison(open_on(build, device, kind, options, resident))


@pytest.mark.cuda
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_compiled_code_leaves_nothing_either(build: Build, kind: str, options: dict[str, Any]) -> None:
    def opened() -> Engine:
        return open_on(build, torch.device("cuda"), kind, options, 3, compiled=True)

    a, b = random_ids(531, seed=1), random_ids(700, seed=2)
    check_a_b_a(opened(), answer(opened(), a), a, b)
    check_after_poison(opened())


def check_after_poison(engine: Engine) -> None:
    """Right after the poison, with nothing in between that waits: what was poisoned is not read, in whatever order."""
    ids = random_ids(TOTAL)
    fresh = feed(engine, ids, SIZES)
    for seed in range(3):
        engine.reset()
        feed(engine, random_ids(300, seed=seed + 5), [256, 44])
        engine.reset()
        poison(engine)
        engine.provider.reset(0)
        assert torch.equal(feed(engine, ids, SIZES), fresh)


@pytest.mark.parametrize("resident", [0, 3])
def test_poison_in_host_blocks_would_be_seen(build: Build, device: torch.device, resident: int) -> None:
    """NaN in the host blocks of a live request reaches its logits: they are poisoned and read."""
    ids = random_ids(400)
    engine = open_on(build, device, "qwen3", {"head_dim": 64}, resident)
    feed(engine, ids[:, :380], [256, 124])
    engine.store.transfer.drain()
    host = engine.store._parts.host
    memories = [memory for extent in host._extents[0] for memory in extent.memories]
    assert memories
    for memory in memories:
        memory.view(torch.bfloat16).fill_(torch.nan)
    assert feed(engine, ids[:, 380:], [20]).isnan().any()


@pytest.mark.parametrize("resident", [0, 3])
def test_returned_host_blocks_are_poisoned_and_used_again(build: Build, device: torch.device, resident: int) -> None:
    engine = open_on(build, device, "qwen3", {"head_dim": 64}, resident)
    ids = random_ids(400)
    feed(engine, ids, [256, 144])
    engine.reset()
    poison(engine)
    returned = engine.store._parts.host.pool()
    pool = {memory.data_ptr() for memory in returned}
    assert pool and all(memory.view(torch.bfloat16).isnan().all() for memory in returned)
    feed(engine, ids, [256, 144])
    used = {memory.data_ptr() for extent in engine.store._parts.host._extents[0] for memory in extent.memories}
    assert pool & used
    assert not feed(engine, random_ids(20), [20]).isnan().any()
