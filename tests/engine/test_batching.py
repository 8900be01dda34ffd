"""Batches of requests: the answers of each alone, results in order, and nothing that outlives a request."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch

from longgen.batching import BatchedRequest, StepResult
from longgen.engine import Engine
from longgen.errors import LongGenError
from longgen.sampling import Sampler, SamplingSettings, record_seed
from tests.checkpoints import Build, random_ids
from tests.engine.running import open_engine

KINDS = ["qwen3", "qwen3_moe", "qwen3_next"]
LENGTHS = (90, 7, 140)
WARM = SamplingSettings(temperature=1.5, repetition_penalty=1.3)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_ids(length, seed=seed)[0].tolist()


def request(engine: Engine, name: str, length: int, tokens: int, **options: object) -> BatchedRequest:
    slot_id = engine.allocate_slot(name)
    return BatchedRequest(name, prompt(length), slot_id, max_new_tokens=tokens, **options)  # type: ignore[arg-type]


def alone(engine: Engine, length: int, tokens: int, sampler: Sampler, stop_ids: Sequence[int] = ()) -> list[int]:
    return list(engine.generate(prompt(length), max_new_tokens=tokens, stop_ids=stop_ids, sampler=sampler))


def run(engine: Engine, requests: list[BatchedRequest]) -> list[list[StepResult]]:
    """All steps until every request has finished."""
    steps = [engine.batch_prefill(requests)]
    while not all(request.finished for request in requests):
        steps.append(engine.batch_decode_step(requests))
    return steps


@pytest.mark.parametrize("sampling", [SamplingSettings(), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_request_of_a_batch_gets_its_own_answer(build: Build, kind: str, sampling: SamplingSettings) -> None:
    """Each of another length, and each ends at another step."""
    single, engine = open_engine(build(kind)), open_engine(build(kind), slots=3)
    requests = [request(engine, f"r{n}", n, 4 + n % 5, sampling=sampling, seed=3) for n in LENGTHS]
    steps = run(engine, requests)
    for each in requests:
        n = len(each.prompt_tokens)
        expected = alone(single, n, each.max_new_tokens, Sampler(sampling, record_seed(3, f"r{n}")))
        assert each.generated_tokens == expected
        assert (each.finish_reason, each.error, each.seq_len) == ("length", None, n + len(expected) - 1)
    assert [[result.request_id for result in step] for step in steps] == [["r90", "r7", "r140"]] * len(steps)
    assert [engine.store.length(slot) for slot in range(3)] == [0, 0, 0]


def test_a_finished_request_repeats_its_last_token_and_does_not_run(build: Build) -> None:
    engine = open_engine(build("qwen3"), slots=2)
    whole = alone(engine, 40, 6, Sampler(SamplingSettings(), 0))
    stop = next(token for token in whole[1:] if token != whole[0])
    short = request(engine, "short", 40, 6, stop_ids=frozenset({stop}))
    long = request(engine, "long", 40, 20)
    steps = run(engine, [short, long])
    results = [step[0] for step in steps]
    end = whole.index(stop)
    assert short.generated_tokens == whole[:end] and short.finish_reason == "stop"
    assert [result.token for result in results] == whole[:end] + [stop] * (len(steps) - end)
    assert [result.finished for result in results] == [False] * end + [True] * (len(steps) - end)
    assert [result.logits is None for result in results] == [False] * (end + 1) + [True] * (len(steps) - end - 1)
    assert len(long.generated_tokens) == 20
    engine.release_slot(short.slot_id)
    again = engine.batch_decode_step([short, long])
    assert [(result.token, result.finished, result.logits) for result in again] == [
        (stop, True, None),
        (long.last_token, True, None),
    ]
    assert engine.allocate_slot("next") == short.slot_id


def test_weights_are_read_once_for_the_whole_batch(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(build("qwen3_moe"), slots=3)
    requests = [request(engine, f"r{n}", n, 4) for n in LENGTHS]
    engine.batch_prefill(requests)
    shapes = []
    forward = engine.provider.model.forward

    def note(*, input_ids: torch.Tensor, **others: object) -> object:
        shapes.append(tuple(input_ids.shape))
        return forward(input_ids=input_ids, **others)

    monkeypatch.setattr(engine.provider.model, "forward", note)
    engine.batch_decode_step(requests)
    assert shapes == [(3, 1)]


def test_a_request_whose_logits_are_broken_ends_alone(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(build("qwen3"), slots=2)
    good, bad = request(engine, "good", 40, 6), request(engine, "bad", 50, 6)
    engine.batch_prefill([good, bad])
    bad.sampler.settings = SamplingSettings(temperature=1e-45, repetition_penalty=1e-38)
    results = engine.batch_decode_step([bad, good])
    assert results[0].finished and isinstance(results[0].error, LongGenError) and bad.finish_reason == "error"
    assert engine.store.length(bad.slot_id) == 0
    while not good.finished:
        engine.batch_decode_step([bad, good])
    assert good.generated_tokens == alone(open_engine(build("qwen3")), 40, 6, Sampler(SamplingSettings(), 0))


def test_a_prompt_that_fails_leaves_the_others_of_its_batch_alone(build: Build) -> None:
    engine = open_engine(build("qwen3"), slots=3)
    requests = [request(engine, name, 40, 3) for name in "abc"]
    requests[1].prompt_tokens = [5, 100_000]
    results = engine.batch_prefill(requests)
    assert "token id 100000" in str(results[1].error)
    assert [(result.finished, result.finish_reason) for result in results] == [
        (False, None),
        (True, "error"),
        (False, None),
    ]
    assert results[0].token == results[2].token is not None
    run_on = engine.batch_decode_step(requests)
    assert [result.token is None for result in run_on] == [False, True, False]


def test_an_interrupt_ends_the_requests_of_its_pass(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the pass and the choice of a token, too: else that token would be run twice."""
    engine = open_engine(build("qwen3"), slots=3)
    requests = [request(engine, name, 40, 9) for name in "abc"]
    engine.batch_prefill(requests)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("longgen.sampling.Sampler.sample", interrupted)
        engine.batch_decode_step(requests[:2])
    assert [each.finish_reason for each in requests] == ["error", "error", None]
    assert [engine.store.length(slot) for slot in range(3)] == [0, 0, 40]
    assert len(run(engine, [_again(requests[0])])) == 9


def _again(request: BatchedRequest) -> BatchedRequest:
    """The same request once more, in the slot that is still its own."""
    return BatchedRequest(request.request_id, request.prompt_tokens, request.slot_id, max_new_tokens=9)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
def test_requests_whose_ids_python_reuses_carry_nothing_over(build: Build, kind: str) -> None:
    """Objects made and dropped in a loop get the addresses of those before them."""
    engine, fresh = open_engine(build(kind), slots=2), open_engine(build(kind))
    seen: set[int] = set()
    reused = turn = 0
    while reused < 10:  # which address the allocator gives is its own matter: as many turns as it takes
        turn += 1
        assert turn < 400, f"{reused} of {turn} objects got an earlier one's address"
        length, tokens = 5 + 37 * turn % 120, 1 + turn % 4
        name = f"r{turn}"
        one = BatchedRequest(name, prompt(length, turn), engine.allocate_slot(name), WARM, max_new_tokens=tokens)
        reused += id(one) in seen
        seen.add(id(one))
        engine.batch_prefill([one])
        while not one.finished and turn % 3:  # every third is dropped half way
            engine.batch_decode_step([one])
        sampler = Sampler(WARM, record_seed(0, name))
        expected = list(fresh.generate(prompt(length, turn), max_new_tokens=tokens, stop_ids=(), sampler=sampler))
        assert one.generated_tokens == expected[: len(one.generated_tokens)]
        assert one.finished or len(one.generated_tokens) == 1
        engine.release_slot(one.slot_id)
        del one, sampler
        gc.collect()
