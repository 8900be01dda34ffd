"""Transfers that shake the order of things on the device, and work that keeps the rest of it busy."""

from __future__ import annotations

import random

import torch

from longgen.kv.transfer import CudaTransfer, Event, Queue, Transfer
from tests.kv.lazy_transfer import LazyTransfer

LONGEST_SLEEP = 400_000  # clock cycles: about 0.2 ms
MATRIX = 4096
COPY_BYTES = 128 << 20


class Noise:
    """Matrix products and large device-to-device copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        a, b = (torch.randn(MATRIX, MATRIX, device=device, dtype=torch.bfloat16) for _ in range(2))
        self._matrices = (a, b, torch.empty_like(a))
        self._bytes = tuple(torch.zeros(COPY_BYTES, device=device, dtype=torch.uint8) for _ in range(2))
        for tensor in (*self._matrices, *self._bytes):
            tensor.record_stream(self._stream)  # its memory is reused only after what is queued here
        torch.cuda.synchronize(device)  # made on the current stream

    def step(self) -> None:
        """Some 0.3 ms of work, queued; nothing waits for it."""
        a, b, product = self._matrices
        with torch.cuda.stream(self._stream):
            torch.mm(a, b, out=product)
            self._bytes[0].copy_(self._bytes[1], non_blocking=True)


class DisturbedTransfer(CudaTransfer):
    """Sleeps at random on each stream, where only an event keeps what follows in order.

    A sleep after a wait on COMPUTE delays the readers, so that a load that comes too early overwrites what they read;
    a sleep before a copy delays the data, so that a reader that comes too early reads what was there before.

    Args:
        seed: of when and how long; it must not change any result.
        likelihood: of a sleep at each such place.
    """

    def __init__(self, device: torch.device, *, seed: int, likelihood: float = 0.15) -> None:
        super().__init__(device)
        self._rng = random.Random(seed)
        self._likelihood = likelihood
        self._noise = Noise(device)

    def wait(self, queue: Queue, event: Event) -> None:
        super().wait(queue, event)
        self._disturb(queue)

    def load(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._disturb(Queue.LOAD)
        super().load(target, source)

    def offload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._disturb(Queue.OFFLOAD)
        super().offload(target, source)

    def _disturb(self, queue: Queue) -> None:
        if self._rng.random() < self._likelihood:
            with torch.cuda.stream(self._stream(queue)):
                torch.cuda._sleep(self._rng.randint(1, LONGEST_SLEEP))
        if self._rng.random() < self._likelihood:
            self._noise.step()


class _Unordered(Transfer):
    """Leaves out the waits of one queue."""

    unordered = Queue.COMPUTE

    def wait(self, queue: Queue, event: Event) -> None:
        if queue is not self.unordered:
            super().wait(queue, event)  # type: ignore[safe-super]


class UnorderedCuda(_Unordered, DisturbedTransfer):
    """The others sleep at every turn, so that this one runs into them."""

    def _disturb(self, queue: Queue) -> None:
        if queue is not self.unordered:
            super()._disturb(queue)


class UnorderedCpu(_Unordered, LazyTransfer):
    pass


def disturbed_transfer(device: torch.device, seed: int) -> Transfer:
    """On the CPU: copies as late as the events allow, whatever the seed."""
    return DisturbedTransfer(device, seed=seed) if device.type == "cuda" else LazyTransfer()


def unordered_transfer(device: torch.device, queue: Queue) -> Transfer:
    """Like `disturbed_transfer`, but `queue` waits for nothing."""
    transfer = UnorderedCuda(device, seed=0, likelihood=1.0) if device.type == "cuda" else UnorderedCpu()
    transfer.unordered = queue
    return transfer
