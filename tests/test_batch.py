"""The request loop: what reaches the output, and that a generation is over before the next. The engine is faked."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from longgen.errors import CapacityError, CheckpointError, OutputError, UsageError
from longgen.run import batch
from longgen.run.answering import RunOptions
from longgen.run.jobs import AnswerSettings, Job, check_length, check_vocabulary
from longgen.run.requests import Request
from longgen.sampling import SamplingSettings


@dataclass
class FakeGeneration:
    tokens: Iterator[int]
    finish_reason: str = "stop"
    stats: None = None

    def __iter__(self) -> Iterator[int]:
        return self.tokens


@dataclass
class FakeEngine:
    """Yields the prompt back, then raises what it was told to; notes each call, and how each generation ends."""

    failures: dict[int, BaseException] = field(default_factory=dict)
    calls: list[Any] = field(default_factory=list)

    def generate(
        self, prompt: torch.Tensor, *, max_new_tokens: int, on_prefill: Callable[[int], None], **others: Any
    ) -> FakeGeneration:
        ids = prompt.tolist()
        self.calls.append(("generate", ids, max_new_tokens))
        return FakeGeneration(self._tokens(ids, max_new_tokens, on_prefill))

    def _tokens(self, prompt: Sequence[int], count: int, on_prefill: Callable[[int], None]) -> Iterator[int]:
        try:
            on_prefill(len(prompt))
            yield from prompt[:count]
            if prompt[0] in self.failures:
                raise self.failures[prompt[0]]
        finally:
            self.calls.append(("ended",))


class FakeStream:
    """Holds every odd token back until the next push or the flush, as a decoder does with half a character."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, token: int) -> str:
        text, self.held = self.held + chr(token), ""
        if token % 2:
            text, self.held = text[:-1], text[-1]
        return text

    def flush(self) -> str:
        return self.held


class FakeTokenizer:
    def decode_stream(self) -> FakeStream:
        return FakeStream()


def _ids(text: str) -> torch.Tensor:
    return torch.tensor(list(map(ord, text)), dtype=torch.int32)


def _job(text: str, source: str = "a.txt", max_new_tokens: int = 100) -> Job:
    return Job(Request(source, source), _ids(text), AnswerSettings(max_new_tokens, SamplingSettings(), seed=0))


def _run(engine: FakeEngine, jobs: Sequence[Job], cap: int = 1000, out: Any = None) -> tuple[int, bytes, str]:
    out, err, options = out or io.BytesIO(), io.StringIO(), RunOptions(cap, progress=False)
    code = batch.run_jobs(cast(Any, engine), cast(Any, FakeTokenizer()), jobs, options, out, err)
    return code, out.getvalue(), err.getvalue()


def test_the_text_is_written_exactly_and_one_newline_follows() -> None:
    text = "a\u00e9\u4f60\r\n\n"
    code, out, err = _run(FakeEngine(), [_job(text)])
    assert (code, out) == (0, text.encode() + b"\n")
    assert "a.txt: 6 prompt tokens, 6 generated (stop), prefill " in err


def test_text_streams_as_it_comes() -> None:
    written: list[bytes] = []

    class Spy(io.BytesIO):
        def flush(self) -> None:
            written.append(self.getvalue())

    _run(FakeEngine(), [_job("bdf")], out=Spy())
    assert written == [b"b", b"bd", b"bdf", b"bdf\n"]


def test_the_cap_counts_prompt_and_text_together() -> None:
    engine = FakeEngine()
    _run(engine, [_job("b" * 10)], cap=14)
    _run(engine, [_job("b" * 10, max_new_tokens=3)], cap=14)
    assert [call[2] for call in engine.calls if call[0] == "generate"] == [4, 3]


def test_each_generation_is_over_before_the_next_begins() -> None:
    engine = FakeEngine()
    _run(engine, [_job("b"), _job("d")])
    assert [call[0] for call in engine.calls] == ["generate", "ended", "generate", "ended"]


def test_a_request_that_fails_is_reported_and_leaves_the_others_alone() -> None:
    engine = FakeEngine({ord("x"): CapacityError("no room for 7 blocks")})
    code, out, err = _run(engine, [_job("x", "bad.txt"), _job("d")])
    assert code == 1
    assert out.endswith(b"d\n")
    assert "longgen: error: bad.txt: no room for 7 blocks\n" in err
    assert [call[0] for call in engine.calls] == ["generate", "ended", "generate", "ended"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), RuntimeError("a fault")])
def test_what_ends_the_run_still_ends_the_generation(stop: BaseException) -> None:
    engine = FakeEngine({ord("x"): stop})
    with pytest.raises(type(stop)):
        _run(engine, [_job("x"), _job("d")])
    assert [call[0] for call in engine.calls] == ["generate", "ended"]


def test_a_closed_output_ends_the_run_and_the_generation() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    engine = FakeEngine()
    out = os.fdopen(writing, "wb", buffering=0)
    try:
        with pytest.raises(BrokenPipeError):
            _run(engine, [_job("b"), _job("d")], out=out)
    finally:
        out.close()
    assert [call[0] for call in engine.calls] == ["generate", "ended"]


def test_a_prompt_that_leaves_no_room_is_refused_with_both_counts() -> None:
    check_length("the prompt b.txt", 1023, 1024, trained=False)
    with pytest.raises(
        UsageError, match=r"b\.txt has 1,024 tokens, with one generated 1,025, .* than --max-len, 1,024;"
    ):
        check_length("the prompt b.txt", 1024, 1024, trained=False)
    with pytest.raises(UsageError, match=r"than the 1,024 that the checkpoint was trained for; give --max-len"):
        check_length("the prompt b.txt", 1024, 1024, trained=True)


def test_a_prompt_of_no_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match=r"a\.txt comes to no tokens"):
        check_length("the prompt a.txt", 0, 1024, trained=True)


def test_a_token_that_the_model_has_no_embedding_for_is_refused() -> None:
    check_vocabulary("the prompt b.txt", _ids("ab"), 99)
    with pytest.raises(CheckpointError, match=r"b\.txt has a token with the id 99, and the model has 99 of them"):
        check_vocabulary("the prompt b.txt", _ids("abc"), 99)


def test_the_text_of_a_request_that_fails_midway_is_ended_by_a_newline() -> None:
    engine = FakeEngine({ord("x"): CapacityError("no room"), ord("y"): CapacityError("no room")})
    code, out, _ = _run(engine, [_job(text, max_new_tokens=2) for text in ("xbd", "y", "d")])
    assert (code, out) == (1, b"xb\nd\n")


def test_an_output_that_takes_no_more_ends_the_run_and_the_generation() -> None:
    class Full(io.BytesIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    engine = FakeEngine()
    with pytest.raises(OutputError, match="standard output cannot be written: No space left on device"):
        _run(engine, [_job("b"), _job("d")], out=Full())
    assert [call[0] for call in engine.calls] == ["generate", "ended"]
