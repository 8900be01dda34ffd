"""Copies between host and device, and the queues and events that order them.

Work runs on three queues: COMPUTE (the model and attention), LOAD (host to device) and OFFLOAD (device to host).
Work on one queue runs in order; across queues only `wait` orders it. An event is recorded on one queue and waited for
on another, by the device: the host is never held up, except in `drain`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Any

import torch

from longgen.kv.pinned import PinnedMemory

Event = Any  # opaque: what `record` returned


class Queue(Enum):
    COMPUTE = "compute"
    LOAD = "load"
    OFFLOAD = "offload"


class Transfer(ABC):
    """Moves K and V between the host cache and the device buffers of one store."""

    device: torch.device

    @property
    def pinning_refusal(self) -> str | None:
        """Why host memory is not pinned though copies would be faster if it were; None if nothing was refused."""
        return None

    @abstractmethod
    def record(self, queue: Queue) -> Event:
        """An event that is reached when all work now on `queue` is done."""

    @abstractmethod
    def wait(self, queue: Queue, event: Event) -> None:
        """Work put on `queue` from now on starts only after `event`. None is always reached."""

    @abstractmethod
    def reached(self, event: Event) -> bool:
        """Whether an event is reached (None always is). Asks the device and does not wait for it."""

    def copies(self, target: torch.Tensor, source: torch.Tensor) -> int:
        """How many copies `load` and `offload` make of one call."""
        return 1

    @abstractmethod
    def load(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies host `source` [kv_heads, tokens, head_dim] to device `target` on the LOAD queue."""

    @abstractmethod
    def offload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies device `source` [kv_heads, tokens, head_dim] to host `target` on the OFFLOAD queue."""

    @abstractmethod
    def upload(self, source: torch.Tensor) -> torch.Tensor:
        """A small host tensor (token ids) as a device tensor for the COMPUTE queue; the host does not wait."""

    @abstractmethod
    def settle(self, event: Event) -> None:
        """Holds the host until an event is reached (None always is), to keep it from running far ahead."""

    @abstractmethod
    def drain(self) -> None:
        """Holds the host until every queue is empty. For the ends of requests, never inside a pass."""

    @abstractmethod
    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Exactly `nbytes` of host memory, as uint8 [nbytes]; freed with the tensor."""


class CpuTransfer(Transfer):
    """Everything at once and in order: plain copies, and events that are always reached."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def record(self, queue: Queue) -> Event:
        return None

    def wait(self, queue: Queue, event: Event) -> None:
        pass

    def reached(self, event: Event) -> bool:
        return True

    def load(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def offload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def upload(self, source: torch.Tensor) -> torch.Tensor:
        return source

    def settle(self, event: Event) -> None:
        pass

    def drain(self) -> None:
        pass

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


class CudaTransfer(Transfer):
    """Two copy streams beside the current one, ordered by events; host memory is pinned in place."""

    def __init__(self, device: torch.device, *, warns: bool = True) -> None:
        self.device = with_index(device)  # threads that make host memory have another current device
        self._streams = {queue: torch.cuda.Stream(self.device) for queue in (Queue.LOAD, Queue.OFFLOAD)}
        self._pinned = PinnedMemory(warns=warns)

    @property
    def pinning_refusal(self) -> str | None:
        return self._pinned.refused

    def record(self, queue: Queue) -> Event:
        event = torch.cuda.Event()
        event.record(self._stream(queue))
        return event

    def wait(self, queue: Queue, event: Event) -> None:
        if event is not None:
            self._stream(queue).wait_event(event)

    def reached(self, event: Event) -> bool:
        return event is None or bool(event.query())

    def copies(self, target: torch.Tensor, source: torch.Tensor) -> int:
        """One where both sides are contiguous, else one a KV head: a strided copy of the whole runs at a tenth of the
        wire's rate."""
        return 1 if target.is_contiguous() and source.is_contiguous() else len(target)

    def load(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copy(Queue.LOAD, target, source)

    def offload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copy(Queue.OFFLOAD, target, source)

    def upload(self, source: torch.Tensor) -> torch.Tensor:
        return source.pin_memory().to(self.device, non_blocking=True)

    def settle(self, event: Event) -> None:
        if event is not None:
            event.synchronize()

    def drain(self) -> None:
        torch.cuda.synchronize(self.device)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        return self._pinned.allocate(nbytes)

    def _stream(self, queue: Queue) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device) if queue is Queue.COMPUTE else self._streams[queue]

    def _copy(self, queue: Queue, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._streams[queue]):
            if self.copies(target, source) == 1:
                target.copy_(source, non_blocking=True)
            else:
                for head_target, head_source in zip(target, source, strict=True):
                    head_target.copy_(head_source, non_blocking=True)


def make_current(device: torch.device) -> None:
    """Makes a CUDA device the process's current one. Pinning and some kernels go by it: with another one current they
    would take memory there too."""
    if device.type == "cuda":
        torch.cuda.set_device(with_index(device))


def with_index(device: torch.device) -> torch.device:
    """`device` with its number: CUDA without one is the device that is current now."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def open_transfer(device: torch.device, *, warns: bool = True) -> Transfer:
    """The transfer of a device: CPU or CUDA. `warns`: whether memory that cannot be pinned is worth a warning."""
    return CudaTransfer(device, warns=warns) if device.type == "cuda" else CpuTransfer()
