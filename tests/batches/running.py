"""The command in processes of its own, which are quick to start: they are forked from one that has loaded torch."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

SMALL = ("--block-size", "16", "--chunk-size", "64", "--dtype", "float32", "--device", "cpu")
PATIENCE = 600  # seconds, for what must come
PRELOADED = ["longgen.cli", "longgen.run.batch", "longgen.planning.opening", "longgen.planning.plans"]
PRELOADED += ["longgen.model.provider", "longgen.model.tokenizer", "longgen.model.quiet"]
PRELOADED += ["transformers.models.qwen3.modeling_qwen3"]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        return as_lines(self.out)


def as_lines(text: str) -> list[dict[str, Any]]:
    """The results in a text, which must hold whole lines."""
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.split("\n")[:-1]]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return as_lines(path.read_text(encoding="utf-8"))


def untimed(path: Path) -> list[dict[str, Any]]:
    """The results of a file without their timings."""
    return [{name: value for name, value in line.items() if name != "timings"} for line in read_lines(path)]


def write_records(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def hold(answers: int) -> None:
    """Makes a batch of this process wait before another answer once it has given so many, until it is stopped."""
    from longgen.run import record_batch

    usual, given = record_batch.answer, itertools.count()

    def answer(*rest: Any) -> Any:
        while next(given) >= answers:
            time.sleep(0.01)
        return usual(*rest)

    patch.object(record_batch, "answer", answer).start()


def _child(arguments: list[str], folder: str, stdin: str, stdout: str, answers: int | None) -> None:
    for number, (path, flags) in enumerate(
        (
            (stdin, os.O_RDONLY),
            (stdout, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
            (f"{folder}/stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        )
    ):
        descriptor = os.open(path, flags, 0o666)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["HF_HUB_OFFLINE"] = "1"

    from tqdm import tqdm

    from longgen.__main__ import main

    tqdm.set_lock(threading.RLock())  # its usual one is a semaphore that a killed process leaves behind
    if answers is not None:
        hold(answers)
    code = main(arguments)
    sys.stderr.flush()
    os._exit(code)


@dataclass
class Command:
    """A command that runs. folder: where its streams are kept."""

    process: BaseProcess
    folder: Path

    def wait(self) -> Result:
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None, "still running"
        out = self.folder / "stdout"
        text = out.read_text(encoding="utf-8") if out.exists() else ""
        err = (self.folder / "stderr").read_text(encoding="utf-8")
        assert "Traceback" not in err, err
        return Result(self.process.exitcode, text, err)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def start(
    folder: Path, *arguments: str, stdin: bytes = b"", stdout: Path | None = None, answers: int | None = None
) -> Command:
    """Starts the command; its streams are files in `folder`, standard output may be another file or a named pipe.

    answers: of a batch, after which it waits until it is stopped.
    """
    folder.mkdir(exist_ok=True)
    (folder / "stdin").write_bytes(stdin)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    streams = (str(folder), str(folder / "stdin"), str(stdout or folder / "stdout"))
    # A daemon, so that one which a test that failed leaves behind does not keep the tests from ending.
    process = context.Process(target=_child, args=(list(arguments), *streams, answers), daemon=True)
    process.start()
    return Command(process, folder)


def run(folder: Path, *arguments: str, stdin: bytes = b"") -> Result:
    return start(folder, *arguments, stdin=stdin).wait()


def batch(model: Path, prompts: Path | str | Sequence[Path | str], *flags: str) -> list[str]:
    """The arguments of a run over prompt files."""
    given = [prompts] if isinstance(prompts, (str, Path)) else prompts
    return ["run", "--model", str(model), *(flag for each in given for flag in ("-f", str(each))), *SMALL, *flags]
