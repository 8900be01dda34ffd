"""The ordered list of attention backends, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from longgen.attention.call import AttentionCall, Partial
from longgen.attention.cpu import CpuFlash
from longgen.errors import LongGenError


class Backend(Protocol):
    """One implementation of attention that returns (out, natural-log LSE)."""

    @property
    def name(self) -> str: ...

    def refuses(self, call: AttentionCall) -> str | None:
        """Why this backend cannot take the call, or None."""

    def __call__(self, call: AttentionCall) -> Partial: ...


class Kernels:
    """Takes each call to the first backend that does not refuse it."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.backends = tuple(backends)

    def __call__(self, call: AttentionCall) -> Partial:
        return self.choose(call)(call)

    def choose(self, call: AttentionCall) -> Backend:
        """The first backend that takes the call; LongGenError with every backend's reason if none does."""
        reasons = []
        for backend in self.backends:
            reason = backend.refuses(call)
            if reason is None:
                return backend
            reasons.append(f"{backend.name}: {reason}")
        raise LongGenError("no attention backend takes this call: " + "; ".join(reasons))


def default_kernels() -> Kernels:
    """The backends of this machine, fastest first."""
    return Kernels([CpuFlash()])
