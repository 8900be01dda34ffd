"""The file of results: whatever moment a run is killed at, the next one makes the same file."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from longgen.config import Settings
from longgen.errors import OutputError, UsageError
from longgen.run import result_file
from longgen.run.interrupts import uninterrupted
from longgen.run.output import StreamOutput, open_output
from longgen.run.requests import Request
from longgen.run.result_file import ResultFile
from longgen.run.results import Result, may_be_torn, read_line, result_line

IDS = ("a", "b", "c", "d", "e")
FORMATS = ("jsonl", "openai")


def line(record_id: str, error: str | None = None, output_format: str = "jsonl", pred: str = "pred") -> bytes:
    request = Request(record_id, "somewhere", fields={"outputs": [record_id]})
    reason = "stop" if error is None else "error"
    result = Result(request, f"hash of {record_id}", pred, reason, error, 3, 2, {"seed": 1, "model": "m"})
    return result_line(result, output_format)


def settings(path: Path, **others: Any) -> Settings:
    return Settings(**{"output": str(path), "output_format": "jsonl", **others})


def opened(path: Path, ids: Sequence[str] = IDS, **others: Any) -> ResultFile:
    return ResultFile(settings(path, **others), ids, io.StringIO())


def go_on(path: Path, bad: Sequence[str] = (), ids: Sequence[str] = IDS, log: list[str] | None = None) -> list[str]:
    """Does what a run does with an output; returns what it wrote, and notes it in `log` at once."""
    with opened(path, ids) as file:
        missing = [each for each in ids if (seen := file.written(each)) is None or seen.failed]
        order = file.in_turn(missing)
        for record_id in order:
            file.write(record_id, line(record_id, "broken" if record_id in bad else None))
            if log is not None:
                log.append(record_id)
        file.finish()
    return order


def content(bad: Sequence[str] = (), ids: Sequence[str] = IDS) -> bytes:
    return b"".join(line(each, "broken" if each in bad else None) for each in ids)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("output_format", FORMATS)
def test_a_line_says_what_was_written(output_format: str) -> None:
    for error in (None, "too long"):
        written = read_line(line("a", error, output_format), output_format)
        assert written is not None
        assert (written.id, written.prompt_hash, written.failed) == ("a", "hash of a", error is not None)
        assert (written.prompt_tokens, written.settings) == (3, {"seed": 1, "model": "m"})
    other = next(each for each in FORMATS if each != output_format)
    assert read_line(line("a", None, output_format), other) is None
    for text in (b"", b"{}", b"[]", b"5\n", b'{"id": 1}', b"[" * 100_000, b"\xff\n"):
        assert read_line(text, output_format) is None


def test_a_line_is_one_line_for_every_reader_of_lines() -> None:
    pred = "a\r\n\x0b\x0c\x1c\x85\u2028\u2029\ud800 \u4f60\x7f"
    written = line("a", pred=pred)
    assert len(written.decode().splitlines()) == 1
    assert "\u4f60" in written.decode()
    assert json.loads(written)["pred"] == pred


def test_a_line_is_never_something_that_json_has_no_word_for() -> None:
    request = Request("a", "somewhere", fields={"n": float("inf")})
    with pytest.raises(ValueError, match="JSON"):
        result_line(Result(request, "hash"), "jsonl")


def test_lines_are_in_the_order_of_the_batch(tmp_path: Path) -> None:
    path = tmp_path / "out"
    assert go_on(path) == list(IDS)
    assert path.read_bytes() == content()
    assert go_on(path) == []
    assert names(tmp_path) == ["out"]


def test_a_file_that_is_cut_off_at_any_byte_becomes_the_same(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for size in range(len(content(bad="b"))):
        path.write_bytes(content(bad="b")[:size])
        whole = content(bad="b")[:size].count(b"\n")
        with opened(path) as file:  # a run that is killed after one more line
            file.write(IDS[whole], line(IDS[whole]))
        assert path.read_bytes() == content(bad="b", ids=IDS[:whole]) + line(IDS[whole])
        assert len(go_on(path)) == len(IDS) - whole - 1 + (whole >= 2)
        assert path.read_bytes() == content()
        assert names(tmp_path) == ["out"]


def test_failed_records_are_tried_again_last_and_their_lines_put_in_place(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(content(bad="ac", ids="abcd"))
    assert go_on(path, bad="c") == ["e", "a", "c"]
    assert path.read_bytes() == content(bad="c")
    assert go_on(path) == ["c"]
    assert path.read_bytes() == content()


def test_what_was_done_again_is_not_lost_when_a_run_is_killed(tmp_path: Path) -> None:
    path, again = tmp_path / "out", tmp_path / "out.retried"
    for torn in range(len(line("c")) + 1):
        path.write_bytes(content(bad="ac"))
        with opened(path) as file:
            file.write("a", line("a"))
        assert (path.read_bytes(), again.read_bytes()) == (content(bad="ac"), line("a"))
        with again.open("ab") as half:
            half.write(line("c")[:torn])
        assert go_on(path) == ["c"] * (torn <= len(line("c")) - 1)
        assert path.read_bytes() == content()
        assert names(tmp_path) == ["out"]


class Killed(BaseException):
    pass


def _calls() -> Iterator[tuple[str, int]]:
    for name in ("write", "ftruncate", "open", "fchmod", "fsync", "replace", "unlink", "pread"):
        for number in range(4):
            yield name, number


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("name", "number"), list(_calls()))
def test_a_run_that_dies_at_any_call_is_made_good_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int, after: bool
) -> None:
    path = tmp_path / "out"
    path.write_bytes(content(bad="ac", ids="abcd") + line("e")[:40])
    real: Callable[..., Any] = getattr(os, name)
    left, done = [number], ["b", "d"]

    def dying(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            return real(*arguments, **named)
        if left[0] < -1:
            raise Killed  # nothing is done any more
        if after:
            real(*arguments, **named)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(result_file.os, name, dying)
        try:
            go_on(path, log=done)
            assert left[0] >= 0
        except Killed:
            pass
    assert not {*go_on(path)} & {*done}  # nothing that was done is lost
    assert path.read_bytes() == content()
    assert names(tmp_path) in (["out"], ["out", "out.tmp"])


def test_what_comes_out_of_order_is_put_in_order(tmp_path: Path) -> None:
    path = tmp_path / "out"
    go_on(path, ids="bd")
    assert go_on(path) == ["e", "a", "c"]
    assert path.read_bytes() == content()


def test_results_of_other_records_stay_after_those_of_the_batch(tmp_path: Path) -> None:
    path, err = tmp_path / "out", io.StringIO()
    path.write_bytes(content(ids="xay"))
    with ResultFile(settings(path), IDS, err):
        assert "note: keeping 2 results of other records in" in err.getvalue()
    go_on(path)
    assert path.read_bytes() == content(ids=[*IDS, "x", "y"])


def test_of_two_lines_of_a_record_the_later_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(content(bad="ab") + line("a") + line("b"))
    assert go_on(path) == []
    assert path.read_bytes() == content()


def test_the_second_run_on_an_output_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(content(bad="a"))
    with opened(path) as file:
        with pytest.raises(UsageError, match=r"the output .*out is in use by another run"):
            opened(path, overwrite=True)
        file.write("a", line("a"))
        file.finish()  # another file is in its place now
        with pytest.raises(UsageError, match=r"the output .*out is in use by another run"):
            opened(path)
    assert go_on(path) == []


def test_a_file_that_another_run_put_in_place_meanwhile_is_the_one_that_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "out", result_file.fcntl.flock
    path.write_bytes(b"old")

    def replaced(descriptor: int, operation: int) -> None:
        if path.read_bytes() == b"old":
            (tmp_path / "new").write_bytes(content())
            os.replace(tmp_path / "new", path)
        real(descriptor, operation)

    monkeypatch.setattr(result_file.fcntl, "flock", replaced)
    with opened(path) as file:
        assert file.written("e") is not None


def test_where_files_cannot_be_locked_a_note_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(result_file.fcntl, "flock", unsupported)
    err = io.StringIO()
    with ResultFile(settings(tmp_path / "out"), IDS, err):
        assert "cannot be locked here" in err.getvalue()


def test_an_output_that_is_there_can_be_refused_or_replaced(tmp_path: Path) -> None:
    path, again = tmp_path / "out", tmp_path / "out.retried"
    path.touch()
    opened(path, resume=False).close()  # there is nothing in it
    path.write_bytes(content())
    again.write_bytes(line("a"))
    with pytest.raises(UsageError, match="is there already; --overwrite replaces it"):
        opened(path, resume=False)
    with opened(path, overwrite=True) as file:
        assert file.written("a") is None
        assert path.read_bytes() == content()  # until there is something to write
        file.write("a", line("a", pred="new"))
    assert path.read_bytes() == line("a", pred="new")
    assert names(tmp_path) == ["out"]


def test_results_done_again_do_not_outlive_a_file_that_was_deleted(tmp_path: Path) -> None:
    (tmp_path / "out.retried").write_bytes(line("a", pred="old"))
    assert go_on(tmp_path / "out") == list(IDS)
    assert (tmp_path / "out").read_bytes() == content()
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("data", "number"),
    [
        (b"notes of mine", 1),
        (b'{"prompt": "x"}\n', 1),
        (content() + b"\0\0\0\n", 6),
        (content() + b'{"id": 1}', 6),
        (content() + line("a", None, "openai"), 6),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, data: bytes, number: int) -> None:
    path = tmp_path / "out"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=f"out line {number} is no result of --output-format jsonl; give another"):
        opened(path)
    assert path.read_bytes() == data


def test_what_may_be_torn_is_the_beginning_of_a_result() -> None:
    whole = line("a")[:-1]
    assert all(may_be_torn(whole[:size]) for size in range(len(whole)))
    assert not may_be_torn(b'{"prompt": "x') and not may_be_torn(b'{"id": 1}')


def test_a_link_stays_a_link_and_the_file_keeps_its_mode(tmp_path: Path) -> None:
    path, link = tmp_path / "out", tmp_path / "link"
    path.write_bytes(content(bad="a"))
    path.chmod(0o640)
    link.symlink_to(path)
    go_on(link)
    assert link.is_symlink() and path.read_bytes() == content()
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "out", os.write
    with opened(path) as file:
        file.write("a", line("a"))
        room = [7]

        def full(descriptor: int, data: Any) -> int:
            if not room[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = real(descriptor, data[: room[0]])
            room[0] -= written
            return written

        monkeypatch.setattr(result_file.os, "write", full)
        with pytest.raises(OutputError, match=r"out cannot be written: No space left on device"):
            file.write("b", line("b"))
    assert path.read_bytes() == line("a")


@pytest.mark.parametrize("beside", ["retried", "tmp"])
def test_a_file_beside_the_output_that_cannot_be_written_is_named(tmp_path: Path, beside: str) -> None:
    path, other = tmp_path / "out", tmp_path / f"out.{beside}"
    path.write_bytes(content(bad="a"))
    with opened(path) as file:
        other.mkdir()
        with pytest.raises(OutputError, match=f"^{other} cannot be written: Is a directory$"):
            file.write("a", line("a"))
            file.finish()
    if beside == "retried":
        with (
            pytest.raises(UsageError, match=f"^the output {other} cannot be opened: Is a directory$"),
            open_output(settings(path), io.BytesIO(), IDS, io.StringIO()),
        ):
            pass


def test_ctrl_c_within_a_write_comes_after_the_whole_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def interrupted(descriptor: int, data: Any) -> int:
        written = real(descriptor, data[:7])
        signal.raise_signal(signal.SIGINT)
        return written

    class Raw(io.FileIO):
        def write(self, data: Any) -> int:
            return interrupted(self.fileno(), data)

    monkeypatch.setattr(result_file.os, "write", interrupted)
    with opened(tmp_path / "out") as file, pytest.raises(KeyboardInterrupt):
        file.write("a", line("a"))
    assert (tmp_path / "out").read_bytes() == line("a")
    with Raw(str(tmp_path / "stream"), "wb") as out, pytest.raises(KeyboardInterrupt):
        StreamOutput(out, "standard output").write("a", line("a"))
    assert (tmp_path / "stream").read_bytes() == line("a")


def test_a_line_reaches_the_file_in_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, sizes = os.write, []

    def counted(descriptor: int, data: Any) -> int:
        sizes.append(len(data))
        return real(descriptor, data)

    monkeypatch.setattr(result_file.os, "write", counted)
    long = line("a", pred="x" * 1_000_000)
    with opened(tmp_path / "out") as file:
        file.write("a", long)
    assert sizes == [len(long)]


def test_a_line_reaches_a_stream_in_one_write_and_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Raw(io.FileIO):
        def write(self, data: Any) -> int:
            sizes.append(len(data))
            return super().write(data)

    long = line("a", pred="x" * 1_000_000)
    with io.BufferedWriter(Raw(str(tmp_path / "out"), "wb")) as out:
        StreamOutput(out, "standard output").write("a", long)
        assert (tmp_path / "out").read_bytes() == long
    assert sizes == [len(long), *sizes[1:]] and sum(sizes[1:]) == 0


def test_an_output_that_is_no_file_is_written_to(tmp_path: Path) -> None:
    for _ in range(2):
        with open_output(settings(Path("/dev/null")), io.BytesIO(), IDS, io.StringIO()) as output:
            assert output.in_turn(IDS) == list(IDS) and output.written("a") is None
            output.write("a", line("a"))
            output.finish()
    with (
        pytest.raises(UsageError, match="cannot be opened: Is a directory"),
        open_output(settings(tmp_path), io.BytesIO(), IDS, io.StringIO()),
    ):
        pass


def test_ctrl_c_waits_for_what_should_not_be_left_half_done() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            steps.append("done")
        steps.append("never")
    assert steps == ["done"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_file_that_a_failed_run_made_and_never_wrote_to_does_not_stay(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with pytest.raises(UsageError), opened(path):
        assert path.exists()
        raise UsageError("no such model")
    assert names(tmp_path) == []
    path.touch()
    with pytest.raises(UsageError), opened(path):
        raise UsageError("no such model")
    path.unlink()
    with pytest.raises(KeyboardInterrupt), opened(path) as file:
        file.write("a", line("a"))
        raise KeyboardInterrupt
    assert path.read_bytes() == line("a")
    empty = tmp_path / "empty"
    with opened(empty, ids=()) as file:
        file.finish()  # of a shard without a record
    assert names(tmp_path) == ["empty", "out"]


@pytest.mark.parametrize(
    ("others", "before", "after"),
    [
        ({}, "; the same command goes on from there", "; the same command goes on from there"),
        ({"overwrite": True}, "; {} is as it was", "; the same command without --overwrite goes on from there"),
        (
            {"resume": False},
            "; the same command goes on from there",
            "; the same command without --no-resume goes on from there",
        ),
    ],
)
def test_how_an_interrupted_run_is_gone_on_with(
    tmp_path: Path, others: dict[str, Any], before: str, after: str
) -> None:
    with opened(tmp_path / "out", **others) as file:
        assert file.going_on == before.format(tmp_path / "out")
        file.write("a", line("a"))
        assert file.going_on == after
