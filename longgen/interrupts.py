"""Holding Ctrl-C back while something is done that should not be left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Within it Ctrl-C is only noted; KeyboardInterrupt is raised at the end. Other signals are left alone.

    Does nothing outside the main thread, where no KeyboardInterrupt is raised, and where Ctrl-C means something else.
    """
    usual = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if noted:
            raise KeyboardInterrupt
