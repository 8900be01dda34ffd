"""Ctrl-C at any moment of the program ends it with 130, with one line or nothing, and never with a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from longgen.commands.common import stopping
from longgen.run.interrupts import Interrupts, check_interrupted, raise_interrupts, uninterrupted
from tests.checkpoints import Build, never_ending

SMALL = ("--block-size", "16", "--chunk-size", "64", "--dtype", "float32", "--device", "cpu")
# Runs the program and interrupts it once while a module is imported, within what that module's own import does.
WITHIN_AN_IMPORT = """
import builtins, os, signal, sys
from longgen.__main__ import main
usual = builtins.__import__
def importing(name, *rest):
    if name == sys.argv[1] or name.startswith(sys.argv[1] + "."):
        builtins.__import__ = usual
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            pass  # as an extension does that tries whether something is there
    return usual(name, *rest)
builtins.__import__ = importing
sys.exit(main(sys.argv[2:]))
"""
# Interrupts it in a destructor, in which no exception gets further, once the model is loaded.
IN_A_DESTRUCTOR = """
import os, signal, sys
from longgen.run import answering
from longgen.__main__ import main
class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass
usual = answering.record_seed
def seed(*arguments):
    Dropped()
    return usual(*arguments)
answering.record_seed = seed
sys.exit(main(sys.argv[1:]))
"""
# Says on standard output that it is in charge of Ctrl-C.
IN_CHARGE = """
import os, sys
from longgen import __main__ as program
usual = program.Interrupts.installed
def installed():
    handler = usual()
    os.write(1, b"!")
    return handler
program.Interrupts.installed = installed
sys.exit(program.main(sys.argv[1:]))
"""
AFTER_THE_COMMAND = """
import atexit, os, signal, sys
from longgen.__main__ import main
atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def batch(build: Build, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "a.jsonl"
    prompts.write_text('{"id": "a", "prompt": "The quick"}\n{"id": "b", "prompt": "brown fox"}\n', encoding="utf-8")
    return ["run", "--model", str(build("qwen3")), "-f", str(prompts), "--max-new-tokens", "200", *SMALL]


def _run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.parametrize("module", ["typer", "torch", "numpy", "transformers"])
def test_an_interrupt_within_an_import_ends_the_program(batch: list[str], module: str) -> None:
    done = _run(WITHIN_AN_IMPORT, module, *batch)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "longgen: interrupted\n")


@pytest.mark.parametrize("command", [["plan"], ["doctor"], ["bench", "--shape", "qwen3-0.6b", "--lengths", "1K"]])
def test_so_does_one_within_the_imports_of_the_other_commands(command: list[str]) -> None:
    done = _run(WITHIN_AN_IMPORT, "yaml" if command == ["plan"] else "torch", *command)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "longgen: interrupted\n")


def test_an_interrupt_that_is_swallowed_is_raised_again(batch: list[str]) -> None:
    done = _run(IN_A_DESTRUCTOR, *batch)
    assert (done.returncode, done.stdout) == (130, "")
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert done.stderr.endswith("\nlonggen: interrupted\n")


def test_an_interrupt_after_the_command_ends_with_130_too(batch: list[str]) -> None:
    done = _run(AFTER_THE_COMMAND, "--version")
    assert (done.returncode, done.stderr) == (130, "longgen: interrupted\n")


@pytest.mark.slow
def test_the_program_is_interrupted_at_many_moments(batch: list[str], tmp_path: Path) -> None:
    """From its first line, until it answers; what Python itself does with an interrupt before that is Python's."""
    model = never_ending(Path(batch[batch.index("--model") + 1]), tmp_path / "endless")
    arguments = [*batch, "--model", str(model), "--max-new-tokens", "20K"]
    command, environment = [sys.executable, "-c", IN_CHARGE, *arguments], {**os.environ, "HF_HUB_OFFLINE": "1"}
    for number in range(16):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert process.stdout is not None
        assert process.stdout.read(1) == b"!"
        time.sleep(0.15 * number)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=600)[1].decode()
        assert process.returncode == 130, err
        assert "Traceback" not in err
        assert err.endswith("longgen: interrupted\n") and err.count("interrupted") == 1


def test_a_swallowed_interrupt_is_raised_where_it_is_asked_for() -> None:
    before = signal.getsignal(signal.SIGINT)
    hook = sys.unraisablehook
    try:
        handler = Interrupts.installed()
        raise_interrupts()
        check_interrupted()
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            signal.raise_signal(signal.SIGINT)
            check_interrupted()  # not here
            assert handler.noted
        with pytest.raises(KeyboardInterrupt):
            check_interrupted()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = hook


def test_an_interrupt_at_the_end_of_what_holds_it_back_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = signal.signal

    def late(number: int, handler: Any) -> Any:
        signal.raise_signal(number)
        return usual(number, handler)

    monkeypatch.setattr(Interrupts, "leave", lambda *_, **__: pytest.fail("it ended the process"))
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        monkeypatch.setattr(signal, "signal", late)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_at_the_end_of_a_command_is_one_like_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = iter([KeyboardInterrupt])

    def late(raised: bool) -> None:
        for interrupt in calls:
            raise interrupt

    monkeypatch.setattr("longgen.commands.common.raise_interrupts", late)
    with pytest.raises(typer.Exit) as ended, stopping():
        pass
    assert (ended.value.exit_code, capsys.readouterr().err) == (130, "longgen: interrupted\n")


def test_where_interrupts_are_ignored_they_stay_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        Interrupts.installed()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
