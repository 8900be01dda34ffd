"""What several commands share: options, and how they stop."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated

import typer

from longgen.errors import UsageError
from longgen.run.interrupts import EXIT_INTERRUPTED, INTERRUPTED, raise_interrupts, was_interrupted

EXIT_BROKEN_PIPE = 141  # what a shell reports for a program that SIGPIPE ended

GpuMemory = Annotated[
    str | None,
    typer.Option(metavar="AMOUNT|FRACTION", help="GPU memory of the whole process: 24GiB, or 0.5 of the card."),
]
CpuMemory = Annotated[
    str | None, typer.Option(metavar="AMOUNT", help="Host memory for the run, e.g. 96GiB. Default: what is available.")
]


def missing_options(command: str, values: Mapping[str, object]) -> UsageError:
    """An error that says which required options, by their names, have no value."""
    missing = [name for name, value in values.items() if not value]
    return UsageError(f"give {' and '.join(missing)}; see longgen {command} --help")


@contextmanager
def stopping() -> Iterator[None]:
    """Exit codes for a command that is told to stop: by Ctrl-C, or by the reader of its output going away."""
    try:
        try:
            yield
        finally:
            raise_interrupts(False)  # in here: an interrupt that comes just before it is one like the others
    except BaseException as error:
        # An interrupt may have become another exception on its way, or none.
        if isinstance(error, KeyboardInterrupt) or was_interrupted():
            raise_interrupts(False)  # where the one above was what it came before
            print(INTERRUPTED, end="", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(EXIT_BROKEN_PIPE) from None
        raise
