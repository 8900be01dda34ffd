"""Where results go: standard output, or a file that a run which was killed can be resumed on."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TextIO

from longgen.config import Settings
from longgen.errors import OutputError, UsageError
from longgen.run.interrupts import uninterrupted
from longgen.run.result_file import ResultFile
from longgen.run.results import Written


class Output(Protocol):
    """Takes a line for each record of a batch."""

    def written(self, record_id: str) -> Written | None:
        """What is known of a record from an earlier run; None: nothing."""

    def in_turn(self, ids: Sequence[str]) -> list[str]:
        """The records with these ids, in the order in which their lines should be written."""

    def write(self, record_id: str, line: bytes) -> None:
        """Writes a record's line. Raises OutputError, or BrokenPipeError if its reader has gone away."""

    def finish(self) -> None:
        """All records have their lines."""

    @property
    def going_on(self) -> str:
        """How a run that was interrupted is gone on with, as the end of a sentence; empty: it cannot be."""


@contextmanager
def open_output(settings: Settings, out: BinaryIO, ids: Sequence[str], err: TextIO) -> Iterator[Output]:
    """The output that the settings name, or `out` if they name none.

    ids: of all records of the batch, in order. Notices go to `err`.
    Raises UsageError for an output that cannot be opened, is locked, holds something else than results, or is there
    although it should not be.
    """
    if settings.output is None:
        yield StreamOutput(out, "standard output")
        return
    with ExitStack() as stack:
        try:
            opened: Any = _special(settings.output) or ResultFile(settings, ids, err)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            problem, path = getattr(error, "strerror", error), getattr(error, "filename", None)
            beside = path is not None and path != os.path.realpath(settings.output)
            name = path if beside else settings.output
            raise UsageError(f"the output {name} cannot be opened: {problem}") from None
        output = stack.enter_context(opened)
        yield output if isinstance(output, ResultFile) else StreamOutput(output, settings.output)


def _special(path: str) -> BinaryIO | None:
    """An output that is neither a file nor absent, such as a pipe or /dev/null, open for writing."""
    kind = os.stat(path).st_mode if os.path.exists(path) else stat.S_IFREG
    return None if stat.S_ISREG(kind) else open(path, "wb", buffering=0)


class StreamOutput:
    """A stream that lines are written to in the order of the records, each in one piece."""

    going_on = ""

    def __init__(self, out: BinaryIO, name: str) -> None:
        out.flush()
        self._out: Any = getattr(out, "raw", out)
        self._name = name

    def written(self, record_id: str) -> Written | None:
        return None

    def in_turn(self, ids: Sequence[str]) -> list[str]:
        return list(ids)

    def write(self, record_id: str, line: bytes) -> None:
        try:
            with uninterrupted():
                rest = memoryview(line)
                while rest:
                    rest = rest[self._out.write(rest) or 0 :]
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(error, self._name) from error

    def finish(self) -> None:
        pass


def check_apart(output: str | None, sources: Iterable[str]) -> None:
    """Raises UsageError if the output is one of the prompt files."""
    for source in sources:
        if output is not None and Path(output).is_file() and source != "-" and os.path.samefile(output, source):
            raise UsageError(f"the output {output} is one of the prompts; give another --output")
