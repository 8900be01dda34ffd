"""Slots by number and by request id: what is the same, what is refused, and that a request ends whatever happens."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from longgen.batching import BatchedRequest
from longgen.engine import Engine
from longgen.errors import CapacityError, SlotError, UsageError
from longgen.generation import Generation
from longgen.kv.sizes import StoreSizes
from longgen.kv.store import KVStore
from longgen.sampling import Sampler, SamplingSettings
from tests.checkpoints import Build, random_ids
from tests.engine.running import open_engine

PROMPT = random_ids(70)[0].tolist()


def generate(engine: Engine, slot_id: int = 0, on_prefill: Callable[[int], None] | None = None) -> Generation:
    """8 tokens."""
    sampler = Sampler(SamplingSettings(), seed=0)
    return engine.generate(
        PROMPT, max_new_tokens=8, stop_ids=(), sampler=sampler, slot_id=slot_id, on_prefill=on_prefill
    )


def open_clean(folder: Path, **options: Any) -> Engine:
    """Memory that was never used may hold anything; a reset leaves zeros."""
    engine = open_engine(folder, **options)
    engine.reset_all()
    return engine


def is_empty(engine: Engine, slot_id: int = 0) -> bool:
    """Nothing of a request is left in a slot but zeros."""
    parts = engine.store._parts
    buffers = [b for part in (parts.decode, parts.resident, parts.windows) for b in part.of_slot(slot_id).values()]
    states = engine.provider._states
    return (
        engine.store.length(slot_id) == 0
        and parts.host._extents[slot_id] == []
        and not [key for key in parts.offloaded if key[0] == slot_id]
        and all(b.filled is None and b.free is None and not b.k.any() and not b.v.any() for b in buffers)
        and (states is None or not (states.conv[:, slot_id].any() or states.recurrent[:, slot_id].any()))
        and engine.observer.request(slot_id) is None
    )


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
def test_a_slot_is_slot_0_where_none_is_named(build: Build, kind: str) -> None:
    plain, named = open_engine(build(kind)), open_engine(build(kind), slots=2)
    for slot in (0, 1):
        assert torch.equal(plain.prefill(PROMPT), named.prefill(PROMPT, slot))
        assert torch.equal(plain.prefill(PROMPT), named.prefill(PROMPT, slot_id=slot))
        for token in (5, 6, 7):
            assert torch.equal(plain.decode_step(token), named.decode_step(token, slot))
        named.reset(slot)
    named.reset_all()


def test_slots_go_to_requests_by_name(build: Build) -> None:
    engine = open_engine(build("qwen3"), slots=3)
    assert [engine.allocate_slot(name) for name in ("a", 7, "b")] == [0, 1, 2]
    engine.release_slot(1)
    assert engine.allocate_slot("1") == 1
    engine.reset_all()
    assert engine.allocate_slot("c") == 0


def test_a_slot_in_use_without_a_name_is_not_given_away(build: Build) -> None:
    engine = open_engine(build("qwen3"), slots=2)
    engine.prefill(PROMPT, 0)
    assert engine.allocate_slot("a") == 1
    with pytest.raises(SlotError, match="no slot is free for request 'b': slot 0 holds tokens of no request id, "):
        engine.allocate_slot("b")
    engine.reset(0)
    assert engine.allocate_slot("b") == 0


Misuse = Callable[[Engine], object]
MISUSE: list[tuple[str, Misuse]] = [
    ("slot 9 is unknown: this engine has slots 0 to 1", lambda engine: engine.prefill(PROMPT, 9)),
    ("slot -1 is unknown", lambda engine: engine.release_slot(-1)),
    ("slot 9 is unknown", lambda engine: engine.reset(9)),
    ("slot 9 is unknown", lambda engine: engine.decode_step(5, 9)),
    ("slot 1 is not allocated: it never was", lambda engine: engine.release_slot(1)),
    ("request 'a' has slot 0 already", lambda engine: engine.allocate_slot("a")),
    ("request id None is neither", lambda engine: engine.allocate_slot(None)),  # type: ignore[arg-type]
    ("request id True is neither", lambda engine: engine.allocate_slot(True)),
    (
        "request 'c' finds|no slot is free for request 'c'.*slot 0 belongs to request 'a'",
        lambda engine: engine.allocate_slot("b") + engine.allocate_slot("c"),
    ),
    ("prefill into slot 0 of request 'a', which holds 70 tokens", lambda engine: engine.prefill(PROMPT, 0)),
    ("request 'b' uses slot 0, which belongs to request 'a'", lambda engine: engine.prefill(PROMPT, 0, request_id="b")),
    ("request 'b' uses slot 1, which is not allocated", lambda engine: engine.prefill(PROMPT, 1, request_id="b")),
    ("prefill into slot 0 of request 'a'", lambda engine: list(generate(engine))),
    ("a slot is named twice", lambda engine: engine.decode_slots([0, 0], [5, 6])),
    ("decode in slot 1 before prefill", lambda engine: engine.decode_slots([0, 1], [5, 6])),
    ("slot 1 was planned for 100 tokens, and 101 are", lambda engine: engine.prefill(PROMPT, 1, new_tokens=31)),
    ("slot 0 of request 'a' was planned for 100 tokens, and 140 are", lambda engine: engine.extend(PROMPT, 0)),
    ("slot 0 .* planned for 100 tokens, and 101", lambda engine: [engine.decode_step(5) for _ in range(31)]),
    ("request 'a': cannot truncate slot 0 to 90 tokens: it has 70", lambda engine: engine.truncate(90)),
    ("slot 9 is unknown", lambda engine: engine.truncate(3, 9)),
    ("slot 9 is unknown", lambda engine: engine.snapshot(9)),
    ("slot 1.0 is unknown", lambda engine: engine.snapshot(1.0)),  # type: ignore[arg-type]
    ("slot None is unknown", lambda engine: engine.prefill(PROMPT, None)),  # type: ignore[arg-type]
    ("slot None is unknown", lambda engine: list(generate(engine, None))),  # type: ignore[arg-type]
    ("slot -1 is unknown", lambda engine: list(generate(engine, -1))),
    ("the number of slots cannot change to 3: slot 0 belongs to request 'a'", lambda e: e.allocate_batch_slots(3)),
]


@pytest.mark.parametrize(("message", "misuse"), MISUSE, ids=[message[:40] for message, _ in MISUSE])
def test_misuse_names_slot_and_request_and_changes_nothing(build: Build, message: str, misuse: Misuse) -> None:
    engine = open_clean(build("qwen3"), slots=2, slot_tokens=100)
    engine.prefill(PROMPT, engine.allocate_slot("a"))
    with pytest.raises(SlotError, match=message):
        misuse(engine)
    assert engine.store.length(0) >= 70
    assert is_empty(engine, 1)


def batch_misuse(engine: Engine, name: str) -> list[BatchedRequest]:
    requests = [BatchedRequest(n, PROMPT, s, max_new_tokens=20) for n, s in (("a", 0), ("b", 1))]
    match name:
        case "other's slot":
            requests = [BatchedRequest("b", PROMPT, 0, max_new_tokens=20)]
        case "same slot twice":
            requests.append(BatchedRequest("c", PROMPT, 1, max_new_tokens=20))
        case "unknown":
            requests[1].slot_id = 9
        case "too long":
            requests[1].max_new_tokens = 31
        case "released":
            engine.release_slot(1)
    return requests


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other's slot", "request 'b' uses slot 0, which belongs to request 'a'"),
        ("same slot twice", "slot 1 is twice in one batch, in requests 'b' and 'c'"),
        ("unknown", "request 'b' uses a slot that is not there: slot 9 is unknown"),
        ("too long", "slot 1 of request 'b' was planned for 100 tokens, and 101 are"),
        ("released", "request 'b' uses slot 1, which is not allocated: request 'b' released it"),
    ],
)
def test_misuse_of_a_batch_is_found_before_anything_runs(build: Build, name: str, message: str) -> None:
    engine = open_clean(build("qwen3"), slots=2, slot_tokens=100)
    engine.allocate_slot("a"), engine.allocate_slot("b")
    with pytest.raises(SlotError, match=message):
        engine.batch_prefill(batch_misuse(engine, name))
    assert is_empty(engine, 0) and is_empty(engine, 1)


def test_batches_know_what_was_prefilled(build: Build) -> None:
    engine = open_clean(build("qwen3"), slots=2)
    first, second = (BatchedRequest(name, PROMPT, engine.allocate_slot(name)) for name in ("a", "b"))
    engine.batch_prefill([first])
    with pytest.raises(SlotError, match="decode of request 'b' in slot 1 before prefill"):
        engine.batch_decode_step([first, second])
    with pytest.raises(SlotError, match="request 'a' was prefilled in slot 0 already"):
        engine.batch_prefill([second, first])
    assert first.seq_len == engine.store.length(0) == 70 and is_empty(engine, 1)
    engine.release_slot(0)
    with pytest.raises(SlotError, match="request 'a' uses slot 0, which is not allocated: request 'a' released it"):
        engine.batch_decode_step([first])


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
def test_the_number_of_slots_can_change(build: Build, kind: str) -> None:
    engine = open_engine(build(kind))
    expected = engine.prefill(PROMPT)
    with pytest.raises(SlotError, match="slot 0 holds tokens of no request id"):
        engine.allocate_batch_slots(3)
    engine.reset()
    assert engine.allocate_batch_slots(3) == (0, 1, 2)
    assert all(torch.equal(engine.prefill(PROMPT, slot), expected) for slot in range(3))
    engine.reset_all()
    assert engine.allocate_batch_slots(1) == (0,)
    with pytest.raises(UsageError, match="at least one"):
        engine.allocate_batch_slots(0)
    assert torch.equal(engine.prefill(PROMPT), expected)


def test_slots_that_do_not_fit_leave_those_there_were(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(build("qwen3"))
    expected = engine.prefill(PROMPT)
    engine.reset()
    open_store = engine.slots._open_store

    def without_room(sizes: StoreSizes) -> KVStore:
        if sizes.slots > 1:
            raise CapacityError("2 buffers do not fit into the memory of cpu")
        return open_store(sizes)

    monkeypatch.setattr(engine.slots, "_open_store", without_room)
    with pytest.raises(CapacityError, match="do not fit into the memory of cpu"):
        engine.allocate_batch_slots(2)
    assert len(engine.slots.allocator) == 1
    assert torch.equal(engine.prefill(PROMPT), expected)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
@pytest.mark.parametrize("taken", [0, 1, 3, 8])
def test_a_generation_that_is_over_or_given_up_empties_its_slot(build: Build, kind: str, taken: int) -> None:
    engine = open_clean(build(kind), slots=2)
    engine.prefill(PROMPT, 0)
    tokens = iter(generate(engine, 1))
    got = [next(tokens) for _ in range(taken)]
    assert len(got) == taken
    tokens.close()
    assert is_empty(engine, 1)
    assert engine.store.length(0) == 70


def test_a_generation_nobody_refers_to_empties_its_slot(build: Build) -> None:
    engine = open_engine(build("qwen3"))
    tokens = iter(generate(engine))
    next(tokens)
    assert not is_empty(engine)
    del tokens
    gc.collect()
    assert is_empty(engine)


def test_errors_and_interrupts_end_a_generation(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(build("qwen3"))
    norm = engine.provider.model.model.norm

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    def told(done: int) -> None:
        raise RuntimeError(f"after {done} tokens")

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(norm, "forward", fail)
        list(generate(engine))
    assert is_empty(engine)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        for _ in generate(engine):
            patch.setattr(norm, "forward", fail)
    assert is_empty(engine)
    with pytest.raises(RuntimeError, match="after 64 tokens"):
        list(
            engine.generate(
                PROMPT, max_new_tokens=3, stop_ids=(), sampler=Sampler(SamplingSettings(), 0), on_prefill=told
            )
        )
    assert is_empty(engine)
    with pytest.raises(ZeroDivisionError), closing(iter(generate(engine))) as tokens:
        for token in tokens:
            print(token / 0)
    assert is_empty(engine)


def test_a_generation_is_iterated_once(build: Build) -> None:
    """Its sampler has drawn numbers and seen tokens by then."""
    generation = generate(open_engine(build("qwen3")))
    assert len(list(generation)) == 8
    with pytest.raises(UsageError, match="a generation is iterated once"):
        iter(generation)
    assert generation.finish_reason == "length" and generation.stats is not None


NO_TOKENS = [torch.tensor([PROMPT]), torch.tensor(5), [3.7, 4.2], "abc", None, [[1, 2], [3]], [True, False], [2**70]]


@pytest.mark.parametrize("tokens", NO_TOKENS, ids=[str(tokens)[:12] for tokens in NO_TOKENS])
def test_what_is_no_list_of_whole_numbers_is_refused(build: Build, tokens: Any) -> None:
    engine = open_clean(build("qwen3"))
    sampler = Sampler(SamplingSettings(), 0)
    request = BatchedRequest("a", tokens, engine.allocate_slot("a"))
    assert "must be a list of whole numbers" in str(engine.batch_prefill([request])[0].error)
    with pytest.raises(UsageError, match="token ids must be a list of whole numbers"):
        engine.prefill(tokens)
    with pytest.raises(UsageError, match="token ids must be a list of whole numbers"):
        list(engine.generate(tokens, max_new_tokens=1, stop_ids=(), sampler=sampler))
    assert is_empty(engine) and engine.prefill([3, 4]) is not None


def test_a_generation_whose_slot_was_taken_stops_and_leaves_the_new_request_alone(build: Build) -> None:
    engine = open_engine(build("qwen3"))
    expected = open_engine(build("qwen3")).prefill(PROMPT[::-1])
    stale = iter(generate(engine))
    next(stale)
    assert torch.equal(engine.prefill(PROMPT[::-1]), expected)
    with pytest.raises(SlotError, match="this request is over: slot 0 was reset, or another request was begun in it"):
        next(stale)
    other = iter(generate(engine))
    next(other)
    assert engine.prefill(PROMPT[::-1]) is not None
    del other
    gc.collect()
    assert engine.store.length(0) == 70


def test_a_scrubbed_engine_leaves_zeros(build: Build) -> None:
    """Host memory goes back to the pool as it is, or overwritten; so do the buffers that all slots share."""
    for scrub in (False, True):
        engine = open_engine(build("qwen3"), scrub=scrub)
        prompt = random_ids(200)[0].tolist()
        engine.prefill(prompt)
        engine.decode_step(5)
        engine.reset()
        parts = engine.store._parts
        pool = parts.host.pool()
        assert pool and any(bool(memory.any()) for memory in pool) != scrub
        shared = [*parts.ring.entries, *parts.prefill.all()]
        assert any(bool(torch.nan_to_num(buffer.k).any()) for buffer in shared) != scrub
