"""Whoever comes late, or means another request, is refused: by request, not by name, and before anything has run."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from longgen.batching import BatchedRequest
from longgen.cuts import Cuts
from longgen.engine import Engine
from longgen.errors import SlotError, UsageError
from longgen.sampling import Sampler, SamplingSettings
from tests.checkpoints import Build, random_ids
from tests.engine.running import open_engine

PROMPT = random_ids(70)[0].tolist()
OTHER = random_ids(150, seed=1)[0].tolist()  # three chunks


def batched(engine: Engine, name: str, prompt: list[int] = PROMPT) -> BatchedRequest:
    """In a slot of its own, prefilled."""
    request = BatchedRequest(name, prompt, engine.allocate_slot(name), max_new_tokens=20)
    engine.batch_prefill([request])
    return request


def steps(engine: Engine, request: BatchedRequest, count: int) -> list[int | None]:
    return [engine.batch_decode_step([request])[0].token for _ in range(count)]


def test_a_request_does_not_decode_into_the_next_one_of_its_name(build: Build) -> None:
    engine, fresh = open_engine(build("qwen3")), open_engine(build("qwen3"))
    old = batched(engine, "a")
    engine.release_slot(old.slot_id)
    new = batched(engine, "a", OTHER)
    with pytest.raises(SlotError, match="request 'a' is over: slot 0 was reset, or another request was begun in it"):
        engine.batch_decode_step([old])
    assert engine.store.length(0) == new.seq_len == 150 and not new.finished
    assert steps(engine, new, 5) == steps(fresh, batched(fresh, "a", OTHER), 5)


def test_a_request_that_fails_late_does_not_end_the_next_one(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot is another's by the time its token is chosen."""
    engine = open_engine(build("qwen3"))
    old = batched(engine, "a")
    sample = Sampler.sample

    def late(self: Sampler, logits: torch.Tensor) -> int:
        monkeypatch.setattr(Sampler, "sample", sample)
        engine.release_slot(0)
        batched(engine, "a", OTHER)
        raise KeyboardInterrupt

    monkeypatch.setattr(Sampler, "sample", late)
    with pytest.raises(KeyboardInterrupt):
        engine.batch_decode_step([old])
    assert old.finish_reason == "error" and engine.store.length(0) == 150


@pytest.mark.parametrize(
    ("message", "misuse"),
    [
        ("request 'b' is over: slot 1 was reset", lambda engine: engine.reset(1)),
        ("slot 1 of request 'b' was planned for 100 tokens, and 101 are", lambda engine: engine.extend(PROMPT[:30], 1)),
        ("decode in slot 1 of request 'b' before prefill", lambda engine: engine.truncate(0, 1)),
    ],
)
def test_misuse_of_one_request_of_a_batch_leaves_the_others_as_they_were(
    build: Build, message: str, misuse: Callable[[Engine], object]
) -> None:
    engine, fresh = open_engine(build("qwen3"), slots=2, slot_tokens=100), open_engine(build("qwen3"))
    first, second = batched(engine, "a"), batched(engine, "b")
    misuse(engine)
    with pytest.raises(SlotError, match=message):
        engine.batch_decode_step([first, second])
    assert (first.finished, first.finish_reason, engine.store.length(0)) == (False, None, 70)
    assert steps(engine, first, 5) == steps(fresh, batched(fresh, "a"), 5)


def test_a_slot_that_is_taken_away_inside_the_step_spares_the_others(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the batch was checked, before its turn came: as another thread may."""
    engine, fresh = open_engine(build("qwen3"), slots=2), open_engine(build("qwen3"))
    first, second = batched(engine, "a"), batched(engine, "b")
    token_ids = Engine.token_ids

    def late(self: Engine, tokens: list[int]) -> torch.Tensor:
        monkeypatch.setattr(Engine, "token_ids", token_ids)
        engine.reset(1)
        return token_ids(self, tokens)

    monkeypatch.setattr(Engine, "token_ids", late)
    with pytest.raises(SlotError, match="request 'b' is over"):
        engine.batch_decode_step([first, second])
    assert (first.finished, second.finish_reason, engine.store.length(0)) == (False, "error", 70)
    assert steps(engine, first, 5) == steps(fresh, batched(fresh, "a"), 5)


def test_a_second_request_of_the_same_name_is_refused_while_the_first_is_alive(build: Build) -> None:
    engine, fresh = open_engine(build("qwen3")), open_engine(build("qwen3"))
    first = batched(engine, "a")
    second = BatchedRequest("a", OTHER, first.slot_id, max_new_tokens=20)
    with pytest.raises(SlotError, match="prefill into slot 0 of request 'a', which holds 70 tokens"):
        engine.batch_prefill([second])
    assert (second.finished, engine.store.length(0)) == (False, 70)
    assert steps(engine, first, 5) == steps(fresh, batched(fresh, "a"), 5)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
@pytest.mark.parametrize("whole", [False, True], ids=["reset", "reset_all"])
def test_a_prompt_whose_slot_is_emptied_between_its_chunks_stops(build: Build, kind: str, whole: bool) -> None:
    engine = open_engine(build(kind))
    done: list[int] = []

    def told(count: int) -> None:
        done.append(count)
        engine.reset_all() if whole else engine.reset(0)

    with pytest.raises(SlotError, match="this request is over: slot 0 was reset"):
        engine.prefill(OTHER, on_chunk=told)
    assert done == [64] and engine.store.length(0) == 0
    assert torch.equal(engine.prefill(PROMPT), open_engine(build(kind)).prefill(PROMPT))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
@pytest.mark.parametrize("call", ["prefill", "extend", "generate"])
def test_a_prompt_whose_slot_is_taken_between_its_chunks_leaves_the_new_request_alone(
    build: Build, kind: str, call: str
) -> None:
    engine, fresh = open_engine(build(kind)), open_engine(build(kind))
    fresh.prefill(PROMPT)

    def told(_: int) -> None:
        engine.prefill(PROMPT)

    sampler = Sampler(SamplingSettings(), 0)
    with pytest.raises(SlotError, match="another request was begun in it"):
        match call:
            case "prefill":
                engine.prefill(OTHER, on_chunk=told)
            case "extend":
                engine.extend(OTHER, on_chunk=told)
            case _:
                list(engine.generate(OTHER, max_new_tokens=3, stop_ids=(), sampler=sampler, on_prefill=told))
    assert engine.store.length(0) == 70
    assert torch.equal(engine.decode_step(5), fresh.decode_step(5))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
def test_a_snapshot_is_of_one_request_in_one_slot_of_one_engine(build: Build, kind: str) -> None:
    engine, fresh = open_engine(build(kind), slots=2), open_engine(build(kind))
    engine.prefill(PROMPT)
    mark = engine.snapshot()
    engine.prefill(OTHER, engine.allocate_slot("b"))
    with pytest.raises(SlotError, match="request 'b': a snapshot of slot 0 cannot be restored in slot 1"):
        engine.restore(mark, 1)
    engine.prefill(OTHER)
    with pytest.raises(SlotError, match="this request is over"):
        engine.restore(mark)
    fresh.prefill(PROMPT)
    with pytest.raises(SlotError, match="this request is over"):
        engine.restore(fresh.snapshot())
    fresh.prefill(OTHER)
    expected = fresh.decode_step(5)
    assert all(torch.equal(engine.decode_step(5, slot), expected) for slot in (0, 1))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
def test_a_snapshot_is_void_once_the_slot_was_cut_to_less(build: Build, kind: str) -> None:
    engine, fresh = open_engine(build(kind)), open_engine(build(kind))
    marks = []
    for start in range(0, 60, 20):
        engine.extend(PROMPT[start : start + 20])
        marks.append(engine.snapshot())
    engine.restore(marks[2])
    engine.restore(marks[1])
    engine.extend(OTHER[:30])  # the last mark's tokens are others now
    later = engine.snapshot()
    with pytest.raises(SlotError, match="slot 0 at 60 tokens is void: the slot was cut to 40 since then"):
        engine.restore(marks[2])
    assert engine.store.length(0) == 70
    for _ in range(2):  # a mark serves more than once
        engine.decode_step(5)
        engine.restore(later)
    fresh.prefill([*PROMPT[:40], *OTHER[:30]])
    torch.testing.assert_close(engine.decode_step(5), fresh.decode_step(5), atol=1e-5, rtol=0)
    engine.restore(marks[0])
    fresh.prefill(PROMPT[:20])
    torch.testing.assert_close(engine.decode_step(5), fresh.decode_step(5), atol=1e-5, rtol=0)
    for mark in (marks[1], later):
        with pytest.raises(SlotError, match="is void: the slot was cut to 20 since then"):
            engine.restore(mark)


def test_the_least_that_cuts_left_is_known_from_any_moment_on() -> None:
    chance, cuts, lengths = random.Random(0), Cuts(), list[int]()
    for _ in range(300):
        assert cuts.count == len(lengths)
        for moment in range(len(lengths) + 1):
            assert cuts.least_since(moment) == min(lengths[moment:], default=None)
        lengths.append(chance.randrange(40))
        cuts.add(lengths[-1])


@pytest.mark.parametrize(("slots", "tokens"), [([0, 1], [5]), ([0], [5, 6])])
def test_a_step_of_more_slots_than_tokens_changes_nothing(build: Build, slots: list[int], tokens: list[int]) -> None:
    engine = open_engine(build("qwen3"), slots=2)
    for slot in (0, 1):
        engine.prefill(PROMPT, slot)
    with pytest.raises(UsageError, match=f"{len(slots)} slots and {len(tokens)} tokens"):
        engine.decode_slots(slots, tokens)
    assert [engine.store.length(slot) for slot in (0, 1)] == [70, 70]
