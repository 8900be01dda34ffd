"""What an engine says it did, against counting by hand."""

from __future__ import annotations

from dataclasses import asdict
from itertools import count

import pytest

from longgen.kv.counters import Counters, TierBlocks
from longgen.metrics import Observer
from longgen.sampling import Sampler, SamplingSettings
from longgen.sparse.base import Phase
from tests.checkpoints import Build, random_ids
from tests.engine.running import BLOCK, open_engine

LAYERS, TOKEN = 3, 2 * 2 * 16 * 4  # of the tiny qwen3: K and V of 2 KV heads of 16 in fp32
PROMPT = random_ids(150)[0].tolist()  # chunks of 64, 64 and 22
RUN = 2 * BLOCK  # tokens in a ring entry and in an extent


def test_copies_are_counted_to_the_byte(build: Build) -> None:
    engine = open_engine(build("qwen3"))
    assert engine.store.layout.token_bytes == TOKEN
    engine.prefill(PROMPT, new_tokens=2)
    stats = engine.observer.request(0)
    assert stats is not None
    assert stats.prompt_tokens == 150 and stats.decode_steps == 0
    # Loaded: 64 tokens, then 128, in runs of 32; the open block of 6 comes back once.
    assert stats.prefill.h2d_bytes == LAYERS * TOKEN * (64 + 128 + 6)
    assert stats.prefill.h2d_copies == LAYERS * 2 * (64 // RUN + 128 // RUN + 1)
    assert stats.prefill.ring_hits == LAYERS * (64 + 128) // RUN and stats.prefill.ring_waits == 0
    # Offloaded: every token, in pieces of an extent. Written on the device: every token, to the staging.
    assert stats.prefill.d2h_bytes == LAYERS * TOKEN * 150
    assert stats.prefill.d2h_copies == LAYERS * 2 * -(-150 // RUN)
    assert (stats.prefill.d2d_bytes, stats.prefill.d2d_copies) == (LAYERS * TOKEN * 150, LAYERS * 2 * 3)
    assert stats.decode == Counters()
    assert stats.blocks == TierBlocks(resident=0, host=9 * LAYERS, open=LAYERS)
    assert stats.host_bytes == 10 * BLOCK * LAYERS * TOKEN  # with the block that the open one goes to
    engine.decode_step(5)
    after = engine.observer.request(0)
    assert after is not None and after.prefill == stats.prefill and after.decode_steps == 1
    assert after.decode.h2d_bytes == LAYERS * TOKEN * 144
    assert (after.decode.d2d_bytes, after.decode.d2h_bytes) == (LAYERS * TOKEN, 0)


def test_resident_blocks_are_not_copied_and_are_counted(build: Build) -> None:
    engine = open_engine(build("qwen3"), resident=4)
    engine.prefill(PROMPT)
    stats = engine.observer.request(0)
    assert stats is not None
    assert stats.blocks == TierBlocks(resident=4 * LAYERS, host=5 * LAYERS, open=LAYERS)
    assert stats.prefill.d2h_bytes == LAYERS * TOKEN * (150 - 64)
    # The first chunk goes straight to its resident blocks, the others to the staging.
    assert (stats.prefill.d2d_bytes, stats.prefill.d2d_copies) == (LAYERS * TOKEN * 150, LAYERS * 2 * 3)
    engine.prefill(PROMPT[:60])
    stats = engine.observer.request(0)
    assert stats is not None and stats.blocks == TierBlocks(resident=4 * LAYERS, host=0, open=0)


def test_requests_of_a_batch_have_figures_of_their_own(build: Build) -> None:
    engine, alone = open_engine(build("qwen3"), slots=2), open_engine(build("qwen3"))
    for slot, length in enumerate((150, 40)):
        engine.prefill(PROMPT[:length], slot)
    engine.decode_slots([1, 0], [5, 6])
    for slot, length in enumerate((150, 40)):
        alone.prefill(PROMPT[:length])
        alone.decode_step(5)
        mine, other = engine.observer.request(slot), alone.observer.request(0)
        assert mine is not None and other is not None
        assert (mine.prefill, mine.decode, mine.blocks) == (other.prefill, other.decode, other.blocks)


def test_a_reset_clears_a_request_and_adds_it_to_the_run(build: Build) -> None:
    engine = open_engine(build("qwen3"), slots=2)
    engine.prefill(PROMPT)
    engine.decode_step(5)
    stats = engine.observer.request(0)
    assert stats is not None
    for _ in range(2):
        engine.prefill(PROMPT)
        engine.decode_step(5)
    engine.reset()
    assert engine.observer.request(0) is None
    run = engine.observer.run()
    assert (run.requests, run.prompt_tokens, run.decode_steps) == (3, 450, 3)
    assert asdict(run.prefill) == {name: 3 * value for name, value in asdict(stats.prefill).items()}
    assert run.time_to_first_token is not None and run.time_to_first_token > 0
    assert run.host_bytes == engine.store.host_bytes > 0
    assert run.blocks == TierBlocks(host=3 * 9 * LAYERS, open=3 * LAYERS)
    engine.reset_all()
    cleared = engine.observer.run()
    assert (cleared.requests, cleared.blocks) == (0, TierBlocks())


def test_a_request_holds_host_memory_before_a_block_is_complete(build: Build) -> None:
    engine = open_engine(build("qwen3"), slots=2)
    engine.prefill(PROMPT[:5])
    stats = engine.observer.request(0)
    assert stats is not None and stats.blocks.host == 0
    assert stats.host_bytes == engine.store.host_bytes == BLOCK * LAYERS * TOKEN
    engine.prefill(PROMPT, 1)
    held = [engine.store.slot_host_bytes(slot) for slot in (0, 1)]
    assert sum(held) == engine.store.host_bytes and held[0] == stats.host_bytes
    engine.reset_all()
    assert engine.store.slot_host_bytes(0) == 0 < engine.store.host_bytes


def test_a_generation_has_its_figures_when_it_is_over(build: Build) -> None:
    engine = open_engine(build("qwen3"))
    generation = engine.generate(PROMPT, max_new_tokens=5, stop_ids=(), sampler=Sampler(SamplingSettings(), 0))
    assert generation.stats is None
    assert len(list(generation)) == 5
    stats = generation.stats
    assert stats is not None and (stats.prompt_tokens, stats.decode_steps) == (150, 4)
    assert stats.time_to_first_token is not None and stats.time_per_output_token is not None
    assert engine.observer.request(0) is None and engine.observer.run().requests == 1


def test_times_are_those_of_the_clock(build: Build) -> None:
    """A clock that ticks once a look."""
    ticks = count(10)
    engine = open_engine(build("qwen3"))
    observer = Observer(engine.store, clock=lambda: float(next(ticks)))
    observer.begun(0)  # 10
    observer.begun(0)
    observer.passed([0], Phase.PREFILL, 64)  # 11
    observer.passed([0], Phase.PREFILL, 20)  # 12
    observer.seen(0)  # 13
    stats = observer.request(0)
    assert stats is not None and (stats.time_to_first_token, stats.time_per_output_token) == (3.0, None)
    for _ in range(2):
        observer.passed([0], Phase.DECODE, 1)  # 14, 16
        observer.seen(0)  # 15, 17
    stats = observer.request(0)
    assert stats is not None and (stats.time_to_first_token, stats.time_per_output_token) == (3.0, 2.0)
    observer.ended(0)
    run = observer.run()
    assert (run.time_to_first_token, run.time_per_output_token) == (3.0, 2.0)


@pytest.mark.parametrize("failing", [True, False])
def test_a_pass_that_fails_counts_for_nothing_later(
    build: Build, monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    engine = open_engine(build("qwen3"))
    if failing:
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(engine.provider.model.model.norm, "forward", lambda *_: 1 / 0)
            engine.prefill(PROMPT)
    engine.prefill(PROMPT)
    stats = engine.observer.request(0)
    assert stats is not None and stats.prefill.d2h_bytes == LAYERS * TOKEN * 150
