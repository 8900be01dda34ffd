"""Ends that something fails on the way to: at the very beginning, in the clearing itself, and after the request."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch

from longgen.batching import BatchedRequest
from longgen.engine import Engine
from longgen.errors import CapacityError
from longgen.sampling import Sampler, SamplingSettings
from tests.checkpoints import Build, random_ids
from tests.engine.running import open_engine
from tests.engine.test_slots import is_empty

PROMPT = random_ids(70)[0].tolist()


def generated(engine: Engine) -> list[int]:
    sampler = Sampler(SamplingSettings(), 0)
    return list(engine.generate(PROMPT, max_new_tokens=3, stop_ids=(), sampler=sampler))


def prefilled(engine: Engine) -> None:
    engine.batch_prefill([BatchedRequest("a", PROMPT, engine.allocate_slot("a"))])


@pytest.mark.parametrize(
    "call",
    [generated, partial(Engine.prefill, tokens=PROMPT), partial(Engine.fill_random, tokens=70), prefilled],
    ids=["generate", "prefill", "fill_random", "batch_prefill"],
)
def test_an_interrupt_at_the_very_beginning_leaves_a_free_slot(
    build: Build, monkeypatch: pytest.MonkeyPatch, call: Callable[[Engine], object]
) -> None:
    engine = open_engine(build("qwen3"), slots=2)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine.store, "announce", interrupted)
        call(engine)
    assert is_empty(engine) and engine.slots.allocator[0].ticket is None
    if call is prefilled:
        engine.release_slot(0)
    assert engine.allocate_batch_slots(3) == (0, 1, 2)


def test_more_tokens_than_any_memory_holds_are_refused_before_memory_is_made(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, expected = open_engine(build("qwen3"), slots=2), open_engine(build("qwen3")).prefill(PROMPT)

    def made(*_: object) -> None:
        raise AssertionError("memory is made")

    with monkeypatch.context() as patch:
        patch.setattr(engine.store._parts.host, "announce", made)
        with pytest.raises(CapacityError, match=r"a request of 1,000,000,000,070 tokens needs .*give fewer"):
            engine.prefill(PROMPT, new_tokens=10**12)
        request = BatchedRequest("a", PROMPT, engine.allocate_slot("a"), max_new_tokens=10**12)
        (result,) = engine.batch_prefill([request])
    assert isinstance(result.error, CapacityError) and result.finish_reason == "error"
    assert is_empty(engine)
    assert torch.equal(engine.prefill(PROMPT), expected)


def test_requests_run_where_the_system_gives_no_thread(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    expected = open_engine(build("qwen3")).prefill(PROMPT, new_tokens=500)
    engine = open_engine(build("qwen3"))
    monkeypatch.setattr(threading.Thread, "start", refused)
    assert torch.equal(engine.prefill(PROMPT, new_tokens=500), expected)


class Broken(Exception):
    pass


def failing_once(real: Callable[..., object]) -> Callable[..., object]:
    """Raises instead of the first call."""
    left = [Broken("the first time")]

    def call(*args: object, **options: object) -> object:
        if left:
            raise left.pop()
        return real(*args, **options)

    return call


CLEARING = ["transfer.drain", "_parts.host.release", "_parts.policy.reset", "_release_shared"]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
@pytest.mark.parametrize("step", CLEARING)
def test_a_clearing_that_fails_clears_all_the_rest(
    build: Build, monkeypatch: pytest.MonkeyPatch, kind: str, step: str
) -> None:
    """Of two slots of one pass; and the error is that of the pass."""
    engine, fresh = open_engine(build(kind), slots=2), open_engine(build(kind))
    for slot in (0, 1):
        engine.prefill(PROMPT, slot)
    *path, name = step.split(".")
    owner = engine.store
    for part in path:
        owner = getattr(owner, part)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(owner, name, failing_once(getattr(owner, name)))
        patch.setattr(engine.provider.model.model.norm, "forward", lambda *_: 1 / 0)
        engine.decode_slots([0, 1], [5, 6])
    assert is_empty(engine, 1)
    assert [engine.store.length(slot) for slot in (0, 1)] == [0, 0]
    assert [place.ticket for place in engine.slots.allocator] == [None, None]
    assert all(torch.equal(engine.extend(PROMPT, slot), fresh.prefill(PROMPT)) for slot in (0, 1))
    assert is_empty(engine, 0) is False and engine.store.blocks(0) == fresh.store.blocks(0)


def test_a_reset_that_fails_says_so(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(build("qwen3"), slots=2)
    for slot in (0, 1):
        engine.prefill(PROMPT, slot)
    with monkeypatch.context() as patch, pytest.raises(Broken):
        patch.setattr(engine.store.transfer, "drain", failing_once(engine.store.transfer.drain))
        engine.reset_all()
    assert is_empty(engine, 0) and is_empty(engine, 1)


def test_memory_whose_return_is_interrupted_is_returned_once(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice in the pool, it would be two requests' at once."""
    engine = open_engine(build("qwen3"), slots=2)
    prompt = random_ids(200)[0].tolist()
    engine.prefill(prompt)
    host = engine.store._parts.host
    give_back, left = host._return, [2]

    def interrupted(*args: object) -> None:
        give_back(*args)  # type: ignore[arg-type]
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(host, "_return", interrupted)
        engine.reset()
    engine.reset()
    addresses = [memory.data_ptr() for memory in host.pool()]
    assert len(addresses) > 2 and len(set(addresses)) == len(addresses)


def test_an_error_keeps_neither_the_engine_nor_the_prompt(build: Build) -> None:
    engine = open_engine(build("qwen3"))
    request = BatchedRequest("a", [5, 100_000], engine.allocate_slot("a"))
    engine.batch_prefill([request])
    error, alive = request.error, weakref.ref(engine)
    assert error is not None and "token id 100000" in str(error)
    assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)
    del engine, request
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
def test_closing_ends_every_request(build: Build, kind: str) -> None:
    engine = open_engine(build(kind), slots=2, scrub=True)
    for slot in (0, 1):
        engine.prefill(PROMPT, slot)
    engine.close()
    assert is_empty(engine, 0) and is_empty(engine, 1)
    assert engine.store._parts.host.pool() and not any(bool(m.any()) for m in engine.store._parts.host.pool())


def test_figures_can_be_read_while_a_request_grows(build: Build) -> None:
    """By another thread, which is let in wherever it can be."""
    engine, over, errors = open_engine(build("qwen3")), threading.Event(), []

    def watch() -> None:
        while not over.is_set():
            try:
                engine.observer.run()
                engine.observer.request(0)
            except Exception as error:
                errors.append(error)

    watcher, interval = threading.Thread(target=watch), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        watcher.start()
        for _ in range(12):
            engine.prefill(PROMPT * 2, new_tokens=3000)
    finally:
        over.set()
        watcher.join()
        sys.setswitchinterval(interval)
    assert errors == []
