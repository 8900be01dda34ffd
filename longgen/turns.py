"""One call at a time into an engine, whatever thread it comes from."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from longgen.errors import SlotError
from longgen.kv.transfer import make_current


class Turns:
    """Calls take turns; work that may come at any moment is done between them.

    Such work is the end of a generator: garbage collection can close one in the middle of a turn of the same thread,
    where it can neither wait for that turn nor change what the turn is working on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._late: deque[Callable[[], None]] = deque()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for other threads' calls, and keeps them out. Raises SlotError inside a turn of the same thread."""
        if self._holder == threading.get_ident():
            raise SlotError("the engine was called from within one of its own calls (by a policy, say)")
        try:
            with self._lock, self._held():
                make_current(self._device)  # a thread that is new to CUDA has the first card as its current one
                self._catch_up()
                yield
        finally:
            self._sweep()

    def later(self, work: Callable[[], None]) -> None:
        """Does `work` as a turn of its own: now, or right after the turn that is running. Never waits."""
        self._late.append(work)
        self._sweep()

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Notes that this thread has the lock."""
        self._holder = threading.get_ident()
        try:
            yield
        finally:
            self._holder = None

    def _sweep(self) -> None:
        # Whoever finds the lock taken can go: its holder comes here on its way out.
        while self._late and self._lock.acquire(blocking=False):
            try:
                with self._held():
                    self._catch_up()
            finally:
                self._lock.release()

    def _catch_up(self) -> None:
        while self._late:
            self._late.popleft()()
