"""A run's trace: which passes are in it, what it names, and that it is written whatever happens to the run."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import warnings
from pathlib import Path

import pytest
import torch

from longgen.cli import main
from longgen.engine import Engine
from longgen.errors import LongGenError, UsageError
from longgen.model.tiny import make_checkpoint
from longgen.tracing import STEPS, Trace, trace_path, traced, unlabelled
from tests.engine.running import small_options
from tests.traces import ranges

CPU = torch.device("cpu")
OLD_TRACE = '{\n  "schemaVersion": 1, "traceEvents": []}'
SMALL = (
    "--block-size",
    "16",
    "--chunk-size",
    "64",
    "--dtype",
    "float32",
    "--device",
    "cpu",
    "--raw",
    "--max-len",
    "4K",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", max_position=4096)


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text("It was a bright cold day in April, and the clocks were striking. " * 40, encoding="utf-8")
    return path


def run(checkpoint: Path, prompt: Path, *more: str) -> int:
    arguments = ["run", "--model", str(checkpoint), "--prompt", str(prompt), *SMALL, "--resident-blocks", "0", *more]
    return main(arguments)


@pytest.mark.parametrize(("file", "chunks"), [("t.json", 2), ("t.json.gz", 3), ("t.json", 1000)])
def test_the_last_chunks_and_the_first_steps_are_recorded(
    checkpoint: Path, prompt: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], file: str, chunks: int
) -> None:
    trace = tmp_path / file
    more = ["--trace", str(trace), "--trace-chunks", str(chunks), "--max-new-tokens", "9"]
    assert run(checkpoint, prompt, *more) == 0
    err = capfd.readouterr().err
    tokens = int(re.search(r"([0-9,]+) prompt tokens?", err)[1].replace(",", ""))  # type: ignore[index]
    starts = list(range(0, tokens, 64))[-chunks:]
    assert all(line.startswith("longgen: ") for line in err.splitlines())
    passes = [name for name in ranges(trace) if ": running" in name]
    expected = [f"prefill: running {min(64, tokens - start):,} tokens after {start:,}" for start in starts]
    expected += [f"decode: running 1 token after {tokens + step:,}" for step in range(STEPS)]
    assert passes == expected
    assert f"longgen: trace of {len(starts)} chunks and {STEPS} decode steps in {trace}" in err


def test_a_trace_names_attention_loads_offloads_and_merges(checkpoint: Path, prompt: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    assert run(checkpoint, prompt, "--trace", str(trace), "--max-new-tokens", "2") == 0
    found = ranges(trace)
    for layer in range(3):
        assert f"attention of layer {layer}" in found
        for what in ("load", "offload"):
            assert any(re.fullmatch(rf"{what} tokens \d+ to \d+ of layer {layer}", name) for name in found)
    assert "merge" in found


def test_only_the_first_prompt_is_recorded(
    checkpoint: Path, prompt: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.json"
    short = tmp_path / "short.txt"
    short.write_text("a short text", encoding="utf-8")
    more = ("--prompt", str(short), "--trace", str(trace), "--max-new-tokens", "1")
    assert run(checkpoint, prompt, *more) == 0
    assert len([name for name in ranges(trace) if ": running" in name]) == 2
    assert "trace of 2 chunks and 0 decode steps" in capfd.readouterr().err
    assert run(checkpoint, short, "--trace", str(trace), "--trace-chunks", "1", "--max-new-tokens", "2") == 0
    assert "trace of 1 chunk and 1 decode step in" in capfd.readouterr().err


def test_what_was_recorded_of_a_run_that_fails_is_written(
    checkpoint: Path, prompt: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "t.json"

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("longgen.engine.Engine.decode_requests", fail)
    assert run(checkpoint, prompt, "--trace", str(trace)) == 130
    assert "trace of 2 chunks and 0 decode steps" in capfd.readouterr().err
    assert "attention of layer 0" in ranges(trace)


def test_a_run_that_ends_before_its_last_chunks_leaves_an_empty_trace(
    checkpoint: Path, prompt: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "t.json"

    def fail(*_: object, **__: object) -> None:
        raise LongGenError("no more of this")

    monkeypatch.setattr("longgen.engine.Engine.load", fail)
    assert run(checkpoint, prompt, "--trace", str(trace)) == 1
    assert ranges(trace) == []
    err = capfd.readouterr().err
    assert f"longgen: the trace {trace} is empty" in err and "longgen: error: no more of this" in err


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_read(
    tmp_path: Path, prompt: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for place, reason in ((tmp_path / "absent" / "t.json", "No such file"), (tmp_path, "Is a directory")):
        assert run(tmp_path / "no-checkpoint", prompt, "--trace", str(place)) == 2
        out, err = capfd.readouterr()
        assert out == "" and err.count("\n") == 1
        assert err.startswith(f"longgen: error: the trace {place} cannot be written: {reason}")


def test_what_is_no_file_is_neither_waited_for_nor_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(UsageError, match=f"the trace {place} cannot be written: it is there and is no file"):
            trace_path(str(place))


def test_a_trace_does_not_replace_the_results(
    checkpoint: Path, prompt: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = prompt.with_name("results.jsonl")
    assert run(checkpoint, prompt, "--output", str(results), "--max-new-tokens", "2") == 0
    written, link = results.read_bytes(), prompt.with_name("link.json")
    link.symlink_to(results)
    for trace in (results, link):
        capfd.readouterr()
        assert run(checkpoint, prompt, "--output", str(results), "--trace", str(trace), "--overwrite") == 2
        err = capfd.readouterr().err
        assert err == f"longgen: error: the trace {trace} would replace the output; give it a file of its own\n"
    assert results.read_bytes() == written


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written: File name too long"):
        trace_path(str(tmp_path / ("t" * 300)))


def test_looking_at_a_place_leaves_it_as_it_was(tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    there.write_text(OLD_TRACE, encoding="utf-8")
    assert trace_path(str(there)) == there and there.read_text(encoding="utf-8") == OLD_TRACE
    assert not trace_path(str(tmp_path / "new.json")).exists()
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "absent.json")
    assert trace_path(str(link)).is_symlink() and not link.exists()
    with pytest.raises(UsageError):
        trace_path(str(there / "below.json"))


def test_only_a_trace_is_replaced_by_a_trace(
    checkpoint: Path, prompt: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = prompt.read_text(encoding="utf-8")
    assert run(checkpoint, prompt, "--trace", str(prompt)) == 2
    err = capfd.readouterr().err
    assert (
        err == f"longgen: error: the trace {prompt} would replace a file that is no trace; give it a file of its own\n"
    )
    assert prompt.read_text(encoding="utf-8") == text
    for name, content in (
        ("other.json", b'{"rows": []}'),
        ("torn.json.gz", gzip.compress(OLD_TRACE.encode())[:12]),
        ("plain.json.gz", OLD_TRACE.encode()),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match="would replace a file that is no trace"):
            trace_path(str(tmp_path / name))
    for name, content in (
        ("empty.json", b""),
        ("empty.json.gz", b""),
        ("old.json", OLD_TRACE.encode()),
        ("old.json.gz", gzip.compress(OLD_TRACE.encode())),
    ):
        (tmp_path / name).write_bytes(content)
        with traced(trace_path(str(tmp_path / name)), CPU, io.StringIO()) as trace:
            assert trace is not None
            trace.chunk(1)
        assert trace_path(str(tmp_path / name)) == tmp_path / name  # and once more


def test_a_trace_is_written_where_a_link_leads(tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "there.json")
    with traced(link, CPU, err := io.StringIO()) as trace:
        assert trace is not None
        trace.chunk(1)
    assert link.is_symlink() and "traceEvents" in json.loads((tmp_path / "there.json").read_text(encoding="utf-8"))
    assert err.getvalue() == f"longgen: trace of 1 chunk and 0 decode steps in {link}\n"


def test_what_torch_warns_of_when_it_begins_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11 does of every trace."""
    prepare = torch.profiler.profile.prepare_trace

    def prepare_and_warn(profiler: torch.profiler.profile) -> None:
        prepare(profiler)
        warnings.warn("Profiler clears events at the end of each cycle.", stacklevel=2)

    monkeypatch.setattr("torch.profiler.profile.prepare_trace", prepare_and_warn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = Trace(CPU)
        trace.chunk(1)
        trace.stop()


def test_a_trace_that_cannot_be_written_at_the_end_fails_the_run(tmp_path: Path) -> None:
    gone = tmp_path / "folder" / "t.json"
    with pytest.raises(LongGenError, match=r"the trace .* cannot be written"), traced(gone, CPU, io.StringIO()):
        pass
    err = io.StringIO()
    with pytest.raises(ZeroDivisionError), traced(gone, CPU, err):  # that it failed is what matters
        raise ZeroDivisionError
    assert "longgen: error: the trace" in err.getvalue()


def test_without_a_trace_nothing_is_labelled(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by a trace that records nothing yet."""

    def fail(_: str) -> None:
        raise AssertionError("a range was made")

    monkeypatch.setattr("torch.profiler.record_function", fail)
    for trace in (None, Trace(CPU, chunks=1)):
        engine = Engine.load(checkpoint, small_options(), trace=trace)
        if trace is not None:
            monkeypatch.setattr(trace, "chunk", lambda left: None)
        engine.prefill([5] * 130, new_tokens=70)
        engine.decode_step(7)
    with traced(None, CPU, io.StringIO()) as nothing:
        assert nothing is None
    assert unlabelled("x").__enter__() is None


@pytest.mark.cuda
def test_on_cuda_kernels_and_copies_are_recorded_by_stream(checkpoint: Path, prompt: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    assert run(checkpoint, prompt, "--device", "cuda", "--trace", str(trace)) == 0
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    streams = {
        what: {event["args"]["stream"] for event in events if event.get("cat") == what}
        for what in ("kernel", "gpu_memcpy")
    }
    assert streams["kernel"] and len(streams["gpu_memcpy"] - streams["kernel"]) >= 2  # loads and offloads
    assert "attention of layer 0" in ranges(trace)
