"""A transfer that does every copy as late as the events allow, so that a missing wait reads stale data."""

from __future__ import annotations

from collections.abc import Callable

import torch

from longgen.kv.transfer import Event, Queue, Transfer


class LazyTransfer(Transfer):
    """COMPUTE runs at once, as torch does on the CPU; LOAD and OFFLOAD run only when something waits for them."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._work: dict[Queue, list[Callable[[], object]]] = {Queue.LOAD: [], Queue.OFFLOAD: []}
        self._done = {Queue.LOAD: 0, Queue.OFFLOAD: 0}

    def record(self, queue: Queue) -> Event:
        return None if queue is Queue.COMPUTE else (queue, len(self._work[queue]))

    def wait(self, queue: Queue, event: Event) -> None:
        if event is None:
            return
        if queue is Queue.COMPUTE:
            self._run(*event)
        else:
            self._work[queue].append(lambda: self._run(*event))

    def reached(self, event: Event) -> bool:
        return event is None or self._done[event[0]] >= event[1]

    def load(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._work[Queue.LOAD].append(lambda: target.copy_(source))

    def offload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._work[Queue.OFFLOAD].append(lambda: target.copy_(source))

    def upload(self, source: torch.Tensor) -> torch.Tensor:
        return source

    def settle(self, event: Event) -> None:
        self.wait(Queue.COMPUTE, event)

    def drain(self) -> None:
        for queue, work in self._work.items():
            self._run(queue, len(work))

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8)  # NaN in every float type

    def _run(self, queue: Queue, until: int) -> None:
        while self._done[queue] < until:
            index = self._done[queue]
            self._done[queue] += 1
            self._work[queue][index]()
