"""Finds accesses to the same memory from two queues that no event puts in order, on any machine.

Every torch operation on memory that the store copies to or from is taken down with the queue it runs on and a vector
clock (Lamport 1978; as in happens-before race detectors). Two accesses of which one writes race unless the earlier one
is known, through events, to be done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longgen.kv.transfer import CpuTransfer, Event, Queue

Clock = dict[Queue, int]


@dataclass(frozen=True, slots=True)
class Access:
    queue: Queue
    time: int
    start: int  # bytes, from the start of the storage
    stop: int
    writes: bool
    what: str


def byte_ranges(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """The bytes of a tensor within its storage, as contiguous pieces."""
    sizes, strides = map(int, tensor.shape), map(int, tensor.stride())
    dims = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size > 1 and stride]
    dims.sort(key=lambda dim: dim[1])
    dense = 1
    while dims and dims[0][1] == dense:
        dense *= dims.pop(0)[0]
    for index in product(*(range(size) for size, _ in dims)):
        at = int(tensor.storage_offset()) + sum(i * stride for i, (_, stride) in zip(index, dims, strict=True))
        yield at * tensor.itemsize, (at + dense) * tensor.itemsize


class RaceDetector(TorchDispatchMode):
    """A context in which a store with `transfer` runs; AssertionError at the first race."""

    def __init__(self, dropped: tuple[Queue, Queue] | None = None) -> None:
        """`dropped`: waits of the first queue for the second are ignored, as if the code had forgotten them."""
        super().__init__()
        self.transfer = ClockedTransfer(self, dropped)
        self._queue = Queue.COMPUTE
        self._time: Clock = dict.fromkeys(Queue, 0)
        self._known: dict[Queue, Clock] = {queue: dict.fromkeys(Queue, 0) for queue in Queue}
        self._accesses: dict[int, list[Access]] = {}

    def record(self, queue: Queue) -> Clock:
        return {**self._known[queue], queue: self._time[queue]}

    def learn(self, queue: Queue, clock: Clock) -> None:
        self._known[queue] = {other: max(time, clock[other]) for other, time in self._known[queue].items()}

    def watch(self, tensor: torch.Tensor) -> None:
        """Accesses to the tensor's storage are taken down from now on."""
        self._accesses.setdefault(tensor.untyped_storage().data_ptr(), [])

    @contextmanager
    def running_on(self, queue: Queue) -> Iterator[None]:
        self._queue = queue
        yield
        self._queue = Queue.COMPUTE

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        only_view = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        if not only_view:
            for i, argument in enumerate(schema.arguments):
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                writes = bool(argument.alias_info and argument.alias_info.is_write)
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(tensor, torch.Tensor):
                        self._access(tensor, writes, schema.name)
        return result

    def _access(self, tensor: torch.Tensor, writes: bool, what: str) -> None:
        log = self._accesses.get(tensor.untyped_storage().data_ptr())
        if log is None:
            return
        queue, known = self._queue, self._known[self._queue]
        self._time[queue] += 1
        done = {q: min(self._known[other][q] for other in Queue if other is not q) for q in Queue}
        log[:] = [access for access in log if access.time > done[access.queue]]
        for start, stop in byte_ranges(tensor):
            for earlier in log:
                if earlier.queue is queue or not (writes or earlier.writes):
                    continue
                if earlier.start < stop and start < earlier.stop:
                    race = f"{what} on {queue.name} races with {earlier.what} on {earlier.queue.name}"
                    assert earlier.time <= known[earlier.queue], race
            log.append(Access(queue, self._time[queue], start, stop, writes, what))


class ClockedTransfer(CpuTransfer):
    """Plain copies whose events are the detector's clocks."""

    def __init__(self, detector: RaceDetector, dropped: tuple[Queue, Queue] | None) -> None:
        super().__init__()
        self._detector, self._dropped = detector, dropped

    def record(self, queue: Queue) -> Event:
        return (queue, self._detector.record(queue))

    def wait(self, queue: Queue, event: Event) -> None:
        if event is not None and (queue, event[0]) != self._dropped:
            self._detector.learn(queue, event[1])

    def load(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copy(Queue.LOAD, target, source)

    def offload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copy(Queue.OFFLOAD, target, source)

    def drain(self) -> None:
        clocks = [self._detector.record(queue) for queue in Queue]
        for queue in Queue:
            for clock in clocks:
                self._detector.learn(queue, clock)

    def _copy(self, queue: Queue, target: torch.Tensor, source: torch.Tensor) -> None:
        self._detector.watch(target)
        self._detector.watch(source)
        with self._detector.running_on(queue):
            target.copy_(source)
