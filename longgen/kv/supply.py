"""Host memory made ahead of its use: mapped, touched and pinned by background threads, in the order it was asked for.

Threads live only while something is left to make. What they share, the `_Workshop`, knows nothing of the HostSupply
that feeds it: a supply that is dropped, or a main thread that ends, stops them after the piece at hand.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from longgen.kv.transfer import Transfer, make_current

MOST_THREADS = 4  # pin as fast as the driver lets them


class Piece:
    """Host memory that was asked for.

    Attributes:
        nbytes: its size.
        memory: uint8 [nbytes], once it is made.
        error: why it could not be made.
        maker: the thread that makes it or made it; None while it waits for one.
    """

    __slots__ = ("error", "maker", "memory", "nbytes")

    def __init__(self, nbytes: int, memory: torch.Tensor | None = None) -> None:
        self.nbytes, self.memory = nbytes, memory
        self.error: BaseException | None = None
        self.maker: threading.Thread | None = None

    @property
    def done(self) -> bool:
        return self.memory is not None or self.error is not None


class _Workshop:
    """What a supply and its threads share: the pieces that wait to be made."""

    def __init__(self, transfer: Transfer) -> None:
        self.changed = threading.Condition()
        self.waiting: deque[Piece] = deque()
        self.threads: set[threading.Thread] = set()
        self.most = 0  # threads that may be at work at once
        self.held = False  # no thread begins a piece
        self.closed = False  # a supply that is dropped sets it without the lock: that may happen anywhere
        self._transfer = transfer

    def start(self, most: int) -> None:
        """From now on up to `most` threads are at work at once; starts them for what waits. Those that are too many end
        after the piece at hand. Where the system gives no thread, whoever needs a piece makes it."""
        with self.changed:
            self.most = most
            missing = 0 if self.closed or self.held else min(most, len(self.waiting)) - len(self.threads)
            for _ in range(missing):
                # Not daemons: one that is killed inside the driver could take the process with it.
                thread = threading.Thread(target=self._work, name="longgen-supply", daemon=False)
                try:
                    thread.start()
                except RuntimeError:
                    return
                self.threads.add(thread)

    def hold(self) -> None:
        """Waits until no thread is at work; none starts before `release`."""
        with self.changed:
            self.held = True
        self.join()

    def release(self) -> None:
        """Threads start again for what waits, as many as were allowed last."""
        self.held = False
        self.start(self.most)

    def join(self) -> None:
        """Waits for the threads that are to end."""
        for thread in tuple(self.threads):
            if thread is not threading.current_thread():
                thread.join()

    def take(self, piece: Piece) -> bool:
        """Whether the calling thread is now to make the piece; otherwise it is made or another thread is at it."""
        with self.changed:
            thread = threading.current_thread()
            if piece.done or piece.maker not in (None, thread):
                return False
            if piece.maker is None:
                self.waiting.remove(piece)
                piece.maker = thread
            return True  # also what this thread once began, and an interrupt kept it from

    def make(self, piece: Piece) -> None:
        """Makes a piece that the calling thread has taken. What goes wrong is kept for whoever waits for it."""
        memory: torch.Tensor | None = None
        failure: BaseException | None = None
        try:
            memory = self._transfer.allocate_host(piece.nbytes)
        except Exception as error:
            failure = error
        except BaseException as error:
            failure = error
            raise
        finally:
            with self.changed:
                piece.memory, piece.error = memory, failure
                self.changed.notify_all()

    def finish(self, piece: Piece) -> None:
        """Waits until a piece that some other thread has taken is done."""
        with self.changed:
            self.changed.wait_for(lambda: piece.done)

    def _work(self) -> None:
        try:
            # A new thread's current device is the first card, and pinning would make a context there.
            make_current(self._transfer.device)
            while (piece := self._next()) is not None:
                self.make(piece)
        finally:
            with self.changed:
                self.threads.discard(threading.current_thread())

    def _next(self) -> Piece | None:
        """The next piece to make; None ends the thread."""
        with self.changed:
            # The main thread has ended when the interpreter, about to exit, waits for the others.
            idle = not self.waiting or len(self.threads) > self.most
            if self.closed or self.held or idle or not threading.main_thread().is_alive():
                # In the same breath as the look at what waits, so that `start` knows who will not look again.
                self.threads.discard(threading.current_thread())
                return None
            piece = self.waiting.popleft()
            piece.maker = threading.current_thread()
            return piece


def _memory(piece: Piece) -> torch.Tensor:
    """The memory of a piece that is done. Raises what went wrong with it."""
    if piece.memory is None:
        raise piece.error or AssertionError("a piece is done, with neither memory nor an error")
    return piece.memory


class HostSupply:
    """Makes host memory for one store ahead of its use.

    Whoever needs a piece that no thread has begun makes it itself, so a supply serves without threads too, and after
    `close`. All threads are at work until the first pieces are collected, and while a collector waits; otherwise one,
    because a registration and the start of a kernel wait for the same locks of the driver.
    """

    def __init__(self, transfer: Transfer, threads: int | None = None) -> None:
        """
        Args:
            transfer: of the store; gives the memory.
            threads: most at work at once. None: half of the cores, four at most.
        """
        self.transfer = transfer
        self.threads = threads or max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._workshop = _Workshop(transfer)
        self._prepared: list[Piece] = []
        weakref.finalize(self, setattr, self._workshop, "closed", True)

    def prepare(self, sizes: Iterable[int]) -> None:
        """Starts to make pieces for the next order, before there is one."""
        pieces = [Piece(size) for size in sizes]
        self._prepared += pieces
        self._line_up(pieces)

    def order(self, sizes: Iterable[int]) -> list[Piece]:
        """A piece of each size, made in this order. What was prepared serves where its size is exactly right, and is
        let go where it is not."""
        prepared: dict[int, deque[Piece]] = {}
        for piece in self._prepared:
            prepared.setdefault(piece.nbytes, deque()).append(piece)
        self._prepared.clear()
        pieces = [prepared[size].popleft() if prepared.get(size) else Piece(size) for size in sizes]
        self.cancel([piece for left in prepared.values() for piece in left])
        self._line_up(pieces)
        return pieces

    def collect(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """The memory of pieces. Raises what went wrong with the first that could not be made."""
        if not pieces:  # as in most passes: whoever is at work goes on
            return []
        shop = self._workshop
        if not all(piece.done for piece in pieces):
            shop.start(self.threads)
            for piece in pieces:
                if shop.take(piece):
                    shop.make(piece)
            for piece in pieces:
                shop.finish(piece)
        shop.start(1)
        return [_memory(piece) for piece in pieces]

    def cancel(self, pieces: Collection[Piece]) -> list[Piece]:
        """Stops making pieces, waits for those at work, a fraction of a second, and returns the ones that are made."""
        shop, dropped = self._workshop, set(pieces)
        with shop.changed:
            shop.waiting = deque(piece for piece in shop.waiting if piece not in dropped)
        for piece in pieces:
            if piece.maker not in (None, threading.current_thread()):
                shop.finish(piece)
        return [piece for piece in pieces if piece.memory is not None]

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """No thread is at work inside, nor begins a piece; afterwards they go on. For what is timed.

        Whoever needs a piece meanwhile makes it itself.
        """
        try:
            self._workshop.hold()
            yield
        finally:
            self._workshop.release()

    @property
    def prepared_bytes(self) -> int:
        """Host memory that is prepared now and that no order has taken."""
        return sum(piece.nbytes for piece in self._prepared if piece.memory is not None)

    def close(self) -> None:
        """Ends the threads, each after the piece at hand, and lets go of what is only prepared."""
        shop = self._workshop
        shop.closed = True
        self.cancel(self._prepared)
        self._prepared.clear()
        shop.join()

    def _line_up(self, pieces: Sequence[Piece]) -> None:
        """Puts what nobody has begun of `pieces` at the end of the line, in this order."""
        shop = self._workshop
        with shop.changed:
            waiting = [piece for piece in pieces if piece.maker is None and not piece.done]
            moved = set(waiting)
            shop.waiting = deque([*(piece for piece in shop.waiting if piece not in moved), *waiting])
        shop.start(self.threads)
