"""What Ctrl-C does to the program, and holding it back while something is done that should not be left half done."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

EXIT_INTERRUPTED = 130
INTERRUPTED = "longgen: interrupted\n"


class Interrupts:
    """The program's handler of SIGINT: whenever Ctrl-C comes, the program ends with 130 and one line or none.

    A KeyboardInterrupt within an import, a destructor or an extension's code is swallowed, turned into another
    exception, or ends in an abort. So Ctrl-C ends the process on the spot while nothing is held that could be lost:
    until the libraries are imported, and again when a command is over. In between it raises KeyboardInterrupt, so that
    what is open is closed; `check_interrupted` raises it again where it was swallowed. A second Ctrl-C, which comes
    while that goes on or while the first is held back, ends the process on the spot.

    in_charge: whether it may end the process at all.   noted: whether Ctrl-C has come.
    at_once: whether it ends the process on the spot.   held: how many blocks hold it back, see `uninterrupted`.
    """

    def __init__(self, *, in_charge: bool = True) -> None:
        self.in_charge = in_charge
        self.noted, self.at_once, self.held = False, True, 0

    @classmethod
    def installed(cls) -> Interrupts:
        """A handler that is in charge, unless Ctrl-C is ignored, as in the background of a shell."""
        handler = cls()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, handler)
            sys.unraisablehook = handler._unraisable
        return handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # What holds the first back may never end: a write waits for as long as its reader stands still.
        if self.in_charge and (self.noted or (self.at_once and not self.held)):
            self.leave(said=self.noted and not self.held)
        self.noted = True
        if not self.held:
            raise KeyboardInterrupt

    def leave(self, *, said: bool) -> None:
        """Ends the process. said: whether it has been told that it was interrupted."""
        if not said:
            with suppress(OSError):
                os.write(2, INTERRUPTED.encode("ascii"))
        os._exit(EXIT_INTERRUPTED)

    def _unraisable(self, unraisable: Any) -> None:
        """Keeps quiet about an interrupt that was swallowed: it is not lost."""
        if not (self.noted and issubclass(unraisable.exc_type, KeyboardInterrupt)):
            sys.__unraisablehook__(unraisable)


def _handler() -> Interrupts | None:
    handler = signal.getsignal(signal.SIGINT)
    return handler if isinstance(handler, Interrupts) else None


def raise_interrupts(raised: bool = True) -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, or ends the process on the spot, if the program is in charge."""
    if handler := _handler():
        handler.at_once = not raised


def was_interrupted() -> bool:
    """Whether Ctrl-C has come, if the program is in charge."""
    handler = _handler()
    return handler is not None and handler.noted


def check_interrupted() -> None:
    """Raises KeyboardInterrupt if one has been swallowed."""
    handler = _handler()
    if handler is not None and handler.noted and not handler.held:
        raise KeyboardInterrupt


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Within it Ctrl-C is only noted; KeyboardInterrupt is raised at the end. A second one ends the program on the
    spot, as it does anywhere. Other signals are left alone.

    Does nothing outside the main thread, where no KeyboardInterrupt is raised, and where Ctrl-C means something else.
    """
    usual = signal.getsignal(signal.SIGINT)
    ours = isinstance(usual, Interrupts) or usual is signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or not ours:
        yield
        return
    holder = usual if isinstance(usual, Interrupts) else Interrupts(in_charge=False)
    holder.held += 1
    signal.signal(signal.SIGINT, holder)
    try:
        yield
    finally:
        # In this order: what comes in between finds the usual handler, or is still held back and raised below.
        signal.signal(signal.SIGINT, usual)
        holder.held -= 1
        if holder.noted and not holder.held:
            raise KeyboardInterrupt
