"""Threads that drive different slots, engines in one process, and requests that end in the middle of a call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from longgen.engine import Engine
from longgen.errors import SlotError
from longgen.model.provider import Provider
from longgen.sampling import Sampler, SamplingSettings
from longgen.sparse.base import AvailableBlocks, BlockSelection, Phase
from longgen.sparse.full import FullAttentionPolicy
from tests.checkpoints import Build, random_ids
from tests.engine.running import open_engine, poison, small_options

KINDS = ["qwen3", "qwen3_next"]


def requests(engine: Engine, slot: int, seed: int) -> list[torch.Tensor]:
    """The logits of three requests of several chunks each, one after another."""
    logits = []
    for turn in range(3):
        ids = random_ids(100 + 50 * turn + seed, seed=10 * seed + turn)[0].tolist()
        logits.append(engine.prefill(ids, slot))
        logits += [engine.decode_step(token, slot) for token in ids[:5]]
        mark = engine.snapshot(slot)
        logits.append(engine.extend(ids[:20], slot))
        engine.restore(mark, slot)
        logits.append(engine.decode_step(7, slot))
        if turn % 2:
            engine.reset(slot)
    return logits


def in_threads(*works: Callable[[], object]) -> None:
    """Runs all at once; raises what one of them raised."""
    errors: list[BaseException] = []
    ready = threading.Barrier(len(works))

    def guarded(work: Callable[[], object]) -> None:
        ready.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_on_two_slots_get_what_each_gets_alone(build: Build, kind: str) -> None:
    expected = [requests(open_engine(build(kind)), 0, seed) for seed in (1, 2)]
    engine = open_engine(build(kind), slots=2)
    got: dict[int, list[torch.Tensor]] = {}
    in_threads(*(lambda slot=slot: got.update({slot: requests(engine, slot, slot + 1)}) for slot in (0, 1)))
    for slot in (0, 1):
        assert all(torch.equal(a, b) for a, b in zip(got[slot], expected[slot], strict=True))


def test_threads_allocate_and_release_slots(build: Build) -> None:
    engine = open_engine(build("qwen3"), slots=3)
    expected = open_engine(build("qwen3")).prefill(random_ids(70)[0])

    def serve(name: str) -> None:
        for turn in range(8):
            slot = engine.allocate_slot(f"{name}{turn}")
            assert torch.equal(engine.prefill(random_ids(70)[0], slot, request_id=f"{name}{turn}"), expected)
            engine.release_slot(slot)

    in_threads(*(lambda name=name: serve(name) for name in "abc"))
    assert [place.owner for place in engine.slots.allocator] == [None] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_two_engines_share_nothing(build: Build, kind: str) -> None:
    """Not a tensor: with NaN in every buffer, state and weight of one, the other goes on."""
    first, second = (open_engine(build(kind), slots=2) for _ in range(2))
    expected = requests(open_engine(build(kind)), 0, 1)
    first.prefill(random_ids(90)[0], 0)
    second.prefill(random_ids(90)[0], 0)
    first.reset_all()
    poison(first)
    for parameter in first.provider.model.parameters():
        parameter.data.fill_(torch.nan)
    assert all(torch.equal(a, b) for a, b in zip(requests(second, 1, 1), expected, strict=True))
    assert second.store.length(0) == 90
    assert second.observer.run().requests == 2 and first.observer.run().requests == 0


@pytest.mark.parametrize("kind", KINDS)
def test_engines_over_the_same_weights_share_only_these(build: Build, kind: str) -> None:
    provider = Provider.load(build(kind), dtype=torch.float32, device=torch.device("cpu"))
    first, second = (Engine.over(provider, small_options()) for _ in range(2))
    ids = random_ids(120)[0]
    expected = open_engine(build(kind)).prefill(ids)
    second.prefill(ids[:70])
    first.prefill(ids[:30] + 1)
    first.reset()
    poison(first)
    torch.testing.assert_close(second.extend(ids[70:]), expected, atol=1e-4, rtol=0)


class Interrupting(FullAttentionPolicy):
    """Does something in the middle of a pass, as garbage collection may."""

    def __init__(self) -> None:
        self.work: Callable[[], object] | None = None

    def select_blocks(
        self, layer: int, phase: Phase, query: torch.Tensor | None, available: AvailableBlocks
    ) -> BlockSelection:
        if self.work is not None:
            work, self.work = self.work, None
            work()
        return super().select_blocks(layer, phase, query, available)


def started(engine: Engine, slot: int) -> Iterator[int]:
    sampler = Sampler(SamplingSettings(), 0)
    tokens = iter(engine.generate(random_ids(90)[0], max_new_tokens=9, stop_ids=(), sampler=sampler, slot_id=slot))
    next(tokens)
    return tokens


def test_a_generation_that_is_dropped_inside_a_pass_ends_right_after_it(build: Build) -> None:
    policy, ids = Interrupting(), random_ids(100)[0]
    engine = open_engine(build("qwen3"), slots=2, policy=policy)
    expected = open_engine(build("qwen3")).prefill(ids)
    dropped = [started(engine, 1)]
    lengths = []

    def drop() -> None:
        dropped.clear()
        lengths.append(engine.store.length(1))

    engine.prefill(ids[:20], 0)
    policy.work = drop
    assert torch.equal(engine.prefill(ids, 0), expected)
    assert lengths == [90]
    assert engine.store.length(1) == 0 and engine.observer.request(1) is None


def test_a_generation_that_another_thread_drops_does_not_wait_for_the_pass(build: Build) -> None:
    policy, ids = Interrupting(), random_ids(100)[0]
    engine = open_engine(build("qwen3"), slots=2, policy=policy)
    expected = open_engine(build("qwen3")).prefill(ids)
    dropped = [started(engine, 1)]

    def drop() -> None:
        thread = threading.Thread(target=dropped.clear)
        thread.start()
        thread.join(timeout=600)
        assert not thread.is_alive(), "the thread waits for the pass, which waits for the thread"

    policy.work = drop
    assert torch.equal(engine.prefill(ids, 0), expected)
    assert engine.store.length(1) == 0


def test_a_call_from_within_a_call_is_refused_and_does_not_hang(build: Build) -> None:
    policy = Interrupting()
    engine = open_engine(build("qwen3"), slots=2, policy=policy)
    policy.work = lambda: engine.reset(1)
    with pytest.raises(SlotError, match="from within one of its own calls"):
        engine.prefill(random_ids(100)[0], 0)
    assert engine.store.length(0) == 0
    engine.prefill(random_ids(100)[0], 0)
