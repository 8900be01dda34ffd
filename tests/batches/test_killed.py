"""Batches that are killed, interrupted, run twice at once, or whose reader goes away."""

from __future__ import annotations

import io
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from longgen.config import Settings
from longgen.run.batch import run as run_here
from longgen.run.output import StreamOutput
from longgen.run.records import RequestFiles
from longgen.run.result_file import ResultFile
from tests.batches.running import PATIENCE, Command, batch, read_lines, run, start, untimed, write_records

RECORDS = 40
KILLS = 25
AGAIN = 21  # records to be done again where every other one had failed
WORDS = "The quick brown fox jumps over the lazy dog "
FLAGS = ("--max-new-tokens", "3", "--temperature", "0.8", "--max-len", "300")
ENDLESS = [{"prompt": "x"}, {"prompt": "y", "max_tokens": 20_000}]  # the second, with a model that never stops
# Runs the program, which waits after ten answers.
HELD = """
import sys
from longgen.__main__ import main
from tests.batches.running import hold
hold(10)
sys.exit(main(sys.argv[1:]))
"""


def forty(path: Path, failing: Sequence[int] = (7,)) -> Path:
    """Forty records, of which those and number 22 fail every time."""
    records: list[dict[str, Any]] = [{"index": n, "prompt": WORDS * (n % 4 + 1) + str(n)} for n in range(RECORDS)]
    for number in failing:
        records[number]["temperature"] = "hot"
    records[22]["prompt"] = WORDS * 50  # more than --max-len
    return write_records(path, records)


def until(what: Callable[[], bool]) -> None:
    """Waits until something is so."""
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


def lines_in(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:  # not there yet, or no longer
        return 0


def kill(command: Command, seconds: float, come: Callable[[], bool] = lambda: True) -> None:
    """Kills a command some seconds after something has come, unless it has ended by itself."""
    until(lambda: come() or command.process.exitcode is not None)
    command.process.join(timeout=seconds)
    if command.process.exitcode is None:
        command.signal(signal.SIGKILL)
    command.process.join()


def kill_halfway(command: Command, out: Path) -> None:
    """Kills a command that waits after five answers, once they are in the file."""
    kill(command, 0, lambda: lines_in(out) >= 5)


def retried(out: Path) -> Path:
    return Path(f"{out}.retried")


def kill_at_random(command: Command, out: Path, chance: random.Random) -> None:
    """Kills it while it loads, or when it has so many lines more, or done so many of the failed records again."""
    if chance.random() < 0.2:
        kill(command, chance.uniform(0, 1))
    elif lines_in(out) < RECORDS:
        count = lines_in(out) + chance.randint(1, RECORDS - 5)
        kill(command, chance.uniform(0, 0.03), lambda: lines_in(out) >= count)
    else:
        count = lines_in(retried(out)) + chance.randint(1, AGAIN)  # the last of them are about to be put in place
        kill(command, chance.uniform(0, 0.005), lambda: lines_in(retried(out)) >= count)


@pytest.mark.slow
def test_a_batch_that_is_killed_at_any_moment_is_resumed_to_the_same_file(tiny: Path, tmp_path: Path) -> None:
    prompts, whole = forty(tmp_path / "a.jsonl"), tmp_path / "whole"
    assert run(tmp_path / "run", *batch(tiny, prompts, *FLAGS, "--output", str(whole))).code == 1
    expected = untimed(whole)
    assert [line["index"] for line in expected] == list(range(RECORDS))
    assert [line["index"] for line in expected if line["error"]] == [7, 22]
    failing, failed = forty(tmp_path / "failing.jsonl", range(1, RECORDS, 2)), tmp_path / "failed"
    assert run(tmp_path / "run", *batch(tiny, failing, *FLAGS, "--output", str(failed))).code == 1
    chance, midst, again = random.Random(0), 0, 0
    for number in range(KILLS):
        out = tmp_path / f"out{number}"
        if number % 3 == 0:
            shutil.copy(failed, out)
        arguments = batch(tiny, prompts, *FLAGS, "--output", str(out))
        if number < 2:  # halfway through what was failed, and through all, however late the kill comes
            kill_halfway(start(tmp_path / "killed", *arguments, answers=5), out if number else retried(out))
            midst += 0 < lines_in(out) < RECORDS
            again += 0 < lines_in(retried(out)) < AGAIN
        for _ in range(chance.choice((1, 1, 2, 3))):
            kill_at_random(start(tmp_path / "killed", *arguments), out, chance)
        done = run(tmp_path / "resumed", *arguments)
        assert done.code == 1, done.err
        assert untimed(out) == expected
        assert {path.name for path in tmp_path.glob("out*")} == {f"out{n}" for n in range(number + 1)}
    assert (midst, again) == (1, 1)


@pytest.mark.slow
def test_the_program_itself_is_killed_and_resumed(tiny: Path, tmp_path: Path) -> None:
    prompts, out, whole = forty(tmp_path / "a.jsonl"), tmp_path / "out", tmp_path / "whole"
    assert run(tmp_path / "run", *batch(tiny, prompts, *FLAGS, "--output", str(whole))).code == 1
    arguments = batch(tiny, prompts, *FLAGS, "--output", str(out))
    environment, root = {**os.environ, "HF_HUB_OFFLINE": "1"}, Path(__file__).parents[2]
    killed = subprocess.Popen(
        [sys.executable, "-c", HELD, *arguments], stderr=subprocess.DEVNULL, env=environment, cwd=root
    )
    until(lambda: lines_in(out) >= 5 or killed.poll() is not None)
    killed.kill()
    killed.wait()
    kept = lines_in(out)
    assert 5 <= kept < RECORDS
    command = [sys.executable, "-m", "longgen", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"longgen: {kept - (kept > 7) - (kept > 22)} of 40 records are done; going on" in done.stderr
    assert untimed(out) == untimed(whole)


def test_finished_records_are_skipped_and_changed_ones_are_done_again(tiny: Path, tmp_path: Path) -> None:
    prompts, out = forty(tmp_path / "a.jsonl"), tmp_path / "out"
    arguments = batch(tiny, prompts, *FLAGS, "--output", str(out))
    run(tmp_path / "run", *arguments)
    before = read_lines(out)
    records = [json.loads(line) for line in prompts.read_text().splitlines()]
    records[3]["prompt"] += " changed"
    records[7]["temperature"] = 1.0
    write_records(prompts, [{"id": "new", "prompt": "new"}, *records, {"id": "last", "prompt": "last"}])
    done = run(tmp_path / "again", *arguments)
    assert "longgen: 37 of 42 records are done; going on with the others" in done.err
    after = read_lines(out)
    assert [line["id"] for line in after] == ["new", *map(str, range(RECORDS)), "last"]
    same = [old == new for old, new in zip(before, after[1:-1], strict=True)]
    assert [number for number in range(RECORDS) if not same[number]] == [3, 7]  # timings too: nothing else was run
    assert (after[8]["error"], after[23]["finish_reason"]) == (None, "error")


def test_other_settings_are_told_and_finished_records_stay(tiny: Path, tmp_path: Path) -> None:
    prompts, out = write_records(tmp_path / "a.jsonl", [{"prompt": WORDS}, {"prompt": "x"}]), tmp_path / "out"
    run(tmp_path / "run", *batch(tiny, prompts, "--max-new-tokens", "3", "--output", str(out)))
    before = out.read_bytes()
    done = run(tmp_path / "other", *batch(tiny, prompts, "--max-new-tokens", "4", "--output", str(out)))
    assert (
        f"longgen: note: keeping 2 results of other settings: {prompts} line 1 with "
        "max_new_tokens 3, now 4; --overwrite does them anew\n"
    ) in done.err
    assert (done.code, out.read_bytes()) == (0, before)
    assert "longgen: 2 of 2 records are done; nothing is left to do\n" in done.err


def test_results_of_other_prompts_are_refused_if_all_are_and_counted_if_some_are(tiny: Path, tmp_path: Path) -> None:
    flags, out = ("--max-new-tokens", "3", "--max-len", "60"), tmp_path / "out"
    first = write_records(tmp_path / "a.jsonl", [{"prompt": "x"}, {"prompt": "y"}, {"prompt": WORDS * 50}])
    other = write_records(tmp_path / "b.jsonl", [{"prompt": "p"}, {"prompt": "q"}, {"prompt": "r"}])
    assert run(tmp_path / "first", *batch(tiny, first, *flags, "--output", str(out))).code == 1
    before = out.read_bytes()
    refused = run(tmp_path / "other", *batch(tiny, other, *flags, "--output", str(out)))
    assert (refused.code, out.read_bytes()) == (2, before)
    assert refused.err == (
        f"longgen: error: the output {out} holds answers to other prompts: 2 answers under ids of this batch, none "
        f"to the prompt of that id, such as {other} line 1; give another --output, or --overwrite to replace the "
        "file\n"
    )
    write_records(other, [{"prompt": "x"}, {"prompt": "q"}, {"prompt": "r"}])
    done = run(tmp_path / "some", *batch(tiny, other, *flags, "--output", str(out)))
    assert "longgen: note: replacing 1 result whose prompt has changed\n" in done.err
    assert (done.code, [line["error"] for line in read_lines(out)]) == (0, [None] * 3)
    write_records(other, [{"prompt": "u"}, {"prompt": "v"}, {"prompt": "w"}])
    assert run(tmp_path / "replaced", *batch(tiny, other, *flags, "--output", str(out), "--overwrite")).code == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--output", "{}", "--overwrite"), "; the same command without --overwrite goes on from there"),
        (("--output", "/dev/null"), ""),
    ],
)
def test_what_an_interrupted_run_says_of_going_on_is_true(
    endless: Path, tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    prompts, out = write_records(tmp_path / "a.jsonl", ENDLESS), tmp_path / "out"
    given = [flag.format(out) for flag in flags]
    command = start(tmp_path / "run", *batch(endless, prompts, "--max-new-tokens", "3", *given))
    err = tmp_path / "run" / "stderr"
    until(lambda: err.exists() and " 1/2 " in err.read_text())
    until(lambda: lines_in(out) == 1 or "/dev/null" in given)
    command.signal(signal.SIGINT)
    done = command.wait()
    assert done.code == 130
    state = "longgen: 1 of 2 records are done"
    assert done.err.splitlines()[-2:] == [state + said, "longgen: interrupted"]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("to", ["out", "/dev/null"])
def test_an_interrupted_run_counts_what_is_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, late: bool
) -> None:
    kind = StreamOutput if to == "/dev/null" else ResultFile
    write = kind.write

    def interrupted(self: Any, *what: Any) -> None:
        if not late:
            signal.raise_signal(signal.SIGINT)
        write(self, *what)
        if late:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(kind, "write", interrupted)
    prompts = write_records(tmp_path / "a.jsonl", [{"prompt": "x"}, {"prompt": "y"}])
    settings, err = Settings(max_new_tokens=3, output=str(tmp_path / to), device="cpu"), io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        run_here(str(tiny), RequestFiles([str(prompts)], None), settings, io.BytesIO(), err)
    assert err.getvalue().splitlines()[-1].startswith("longgen: 1 of 2 records are done")
    assert to == "/dev/null" or lines_in(tmp_path / to) == 1


def test_a_wrong_model_leaves_no_output(tmp_path: Path) -> None:
    prompts, out = write_records(tmp_path / "a.jsonl", [{"prompt": "x"}]), tmp_path / "out"
    assert run(tmp_path / "run", *batch(tmp_path / "nowhere", prompts, "--output", str(out))).code == 2
    assert not out.exists()


def test_an_output_that_is_there_is_refused_or_replaced_where_asked(tiny: Path, tmp_path: Path) -> None:
    prompts, out = write_records(tmp_path / "a.jsonl", [{"prompt": WORDS}]), tmp_path / "out"
    arguments = batch(tiny, prompts, "--max-new-tokens", "3", "--output", str(out))
    assert run(tmp_path / "run", *arguments, "--no-resume").code == 0
    before = out.read_bytes()
    refused = run(tmp_path / "refused", *arguments, "--no-resume")
    assert (refused.code, refused.err) == (
        2,
        f"longgen: error: the output {out} is there already; --overwrite replaces it\n",
    )
    broken = run(tmp_path / "broken", *batch(tmp_path / "nowhere", prompts, "--output", str(out), "--overwrite"))
    assert (broken.code, out.read_bytes()) == (2, before)  # nothing is thrown away before there is something new
    assert run(tmp_path / "replaced", *arguments, "--overwrite", "--max-new-tokens", "2").code == 0
    assert [line["generated_tokens"] for line in read_lines(out)] == [2]


def test_the_second_of_two_processes_on_one_output_is_refused(endless: Path, tmp_path: Path) -> None:
    prompts, out = write_records(tmp_path / "a.jsonl", ENDLESS), tmp_path / "out"
    arguments = batch(endless, prompts, "--max-new-tokens", "3", "--output", str(out))
    first = start(tmp_path / "first", *arguments)
    until(lambda: lines_in(out) == 1)
    for flags in ((), ("--overwrite",)):
        second = run(tmp_path / "second", *arguments, *flags)
        assert second.code == 2
        assert (
            second.err
            == f"longgen: error: the output {out} is in use by another run; wait for it, or give another one\n"
        )
    kill(first, 0)
    assert lines_in(out) == 1
    write_records(prompts, ENDLESS[:1])
    assert run(tmp_path / "third", *arguments).code == 0  # a lock does not outlive its process


def test_ctrl_c_closes_cleanly_and_ends_with_130(tiny: Path, tmp_path: Path) -> None:
    prompts, out = forty(tmp_path / "a.jsonl"), tmp_path / "out"
    arguments = batch(tiny, prompts, *FLAGS, "--output", str(out))
    whole = tmp_path / "whole"
    run(tmp_path / "run", *batch(tiny, prompts, *FLAGS, "--output", str(whole)))
    chance = random.Random(1)
    for _ in range(4):
        command = start(tmp_path / "stopped", *arguments, answers=8)  # less than a fourth of all, however late we are
        least = lines_in(out) + chance.randint(1, 6)
        until(lambda least=least: lines_in(out) >= least)  # type: ignore[misc]
        command.signal(signal.SIGINT)
        done = command.wait()
        assert done.code == 130
        assert done.out == ""
        assert done.err.splitlines()[-2].endswith("; the same command goes on from there")
        assert done.err.splitlines()[-1] == "longgen: interrupted"
        assert out.read_bytes().endswith(b"\n")
        assert [line["index"] for line in read_lines(out)] == list(range(lines_in(out)))
    assert run(tmp_path / "resumed", *arguments).code == 1
    assert untimed(out) == untimed(whole)


@pytest.mark.parametrize("output", [None, "/dev/stdout"])
def test_a_second_ctrl_c_does_not_wait_for_a_reader_that_stands_still(
    tiny: Path, tmp_path: Path, output: str | None
) -> None:
    prompts = write_records(tmp_path / "a.jsonl", [{"prompt": "x", **dict.fromkeys("abcdefgh", "y" * 16_000)}])
    pipe, flags = tmp_path / "pipe", ("--output", output) if output else ()
    os.mkfifo(pipe)  # holds 64 KiB, and the line is twice as long
    command = start(tmp_path / "run", *batch(tiny, prompts, "--max-new-tokens", "3", *flags), stdout=pipe)
    with pipe.open("rb") as reader:
        select.select([reader], [], [])  # it has begun to write, and nothing is read
        command.signal(signal.SIGINT)
        command.process.join(timeout=1)
        assert command.process.exitcode is None
        command.signal(signal.SIGINT)
        done = command.wait()
    assert done.code == 130
    assert done.err.endswith("\nlonggen: interrupted\n")


@pytest.mark.parametrize("output", [None, "/dev/stdout"])
def test_a_closed_pipe_ends_quietly(tiny: Path, tmp_path: Path, output: str | None) -> None:
    prompts, pipe = forty(tmp_path / "a.jsonl"), tmp_path / "pipe"
    # Fields of their own make the lines longer than a pipe can hold, so the run does not end before its reader goes.
    notes = {f"note{n}": "x" * 16_000 for n in range(3)}
    write_records(prompts, [json.loads(line) | notes for line in prompts.read_text().splitlines()])
    os.mkfifo(pipe)
    flags = ("--output", output) if output else ()
    command = start(tmp_path / "run", *batch(tiny, prompts, *FLAGS, *flags), stdout=pipe)
    with pipe.open("rb") as reader:
        assert json.loads(reader.readline())["id"] == "0"
    done = command.wait()
    assert done.code == 141
    assert "Broken" not in done.err and "interrupted" not in done.err
    assert "40/40" not in done.err


def test_a_line_is_there_as_soon_as_its_record_is_done(endless: Path, tmp_path: Path) -> None:
    prompts, pipe = write_records(tmp_path / "a.jsonl", ENDLESS), tmp_path / "pipe"
    os.mkfifo(pipe)
    command = start(tmp_path / "run", *batch(endless, prompts, "--max-new-tokens", "3"), stdout=pipe)
    with pipe.open("rb") as reader:
        assert json.loads(reader.readline())["generated_tokens"] == 3
        assert command.process.exitcode is None
        command.signal(signal.SIGINT)
        assert command.wait().code == 130
        assert reader.read() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_output_that_takes_no_more_is_one_line_and_exit_code_1(tiny: Path, tmp_path: Path) -> None:
    prompts = write_records(tmp_path / "a.jsonl", [{"prompt": "x"}, {"prompt": "y"}])
    arguments = batch(tiny, prompts, "--max-new-tokens", "3")
    for name, done in (
        ("/dev/full", run(tmp_path / "a", *arguments, "--output", "/dev/full")),
        ("standard output", start(tmp_path / "b", *arguments, stdout=Path("/dev/full")).wait()),
    ):
        assert done.code == 1
        assert done.err.splitlines()[-1] == f"longgen: error: {name} cannot be written: No space left on device"
