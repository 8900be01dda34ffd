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

from longgen.errors import UsageError

Event = Any  # opaque: what `record` returned


class Queue(Enum):
    COMPUTE = "compute"
    LOAD = "load"
    OFFLOAD = "offload"


class Transfer(ABC):
    """Moves K and V between the host cache and the device buffers of one store."""

    device: torch.device

    @abstractmethod
    def record(self, queue: Queue) -> Event:
        """An event that is reached when all work now on `queue` is done."""

    @abstractmethod
    def wait(self, queue: Queue, event: Event) -> None:
        """Work put on `queue` from now on starts only after `event`. None is always reached."""

    @abstractmethod
    def load(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies host `source` [kv_heads, tokens, head_dim] to device `target` on the LOAD queue."""

    @abstractmethod
    def offload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies device `source` [kv_heads, tokens, head_dim] to host `target` on the OFFLOAD queue."""

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

    def load(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def offload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def drain(self) -> None:
        pass

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


def open_transfer(device: torch.device) -> Transfer:
    """The transfer of a device."""
    if device.type == "cpu":
        return CpuTransfer()
    raise UsageError(f"device {device} is not supported yet: use cpu")
