"""What was moved for a slot and where its blocks lie, in numbers. Without torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(slots=True)
class Counters:
    """Copies of K and V, and loads that attention found done or not.

    Attributes:
        h2d_bytes, h2d_copies: from host blocks to the device.
        d2h_bytes, d2h_copies: from the device to host blocks.
        d2d_bytes, d2d_copies: new tokens written to their buffers, and windows put in order.
        ring_hits: runs that were loaded already when the host came to queue their attention.
        ring_waits: runs that were not; the device then waits if the load is still not done when their turn comes.
    """

    h2d_bytes: int = 0
    h2d_copies: int = 0
    d2h_bytes: int = 0
    d2h_copies: int = 0
    d2d_bytes: int = 0
    d2d_copies: int = 0
    ring_hits: int = 0
    ring_waits: int = 0

    def loaded(self, nbytes: int, copies: int) -> None:
        self.h2d_bytes += nbytes
        self.h2d_copies += copies

    def offloaded(self, nbytes: int, copies: int) -> None:
        self.d2h_bytes += nbytes
        self.d2h_copies += copies

    def kept(self, nbytes: int, copies: int) -> None:
        self.d2d_bytes += nbytes
        self.d2d_copies += copies

    def taken(self, *, hit: bool) -> None:
        self.ring_hits += hit
        self.ring_waits += not hit

    def copy(self) -> Counters:
        return replace(self)

    def clear(self) -> None:
        for field in fields(self):
            setattr(self, field.name, 0)

    def add(self, more: Counters, less: Counters | None = None) -> None:
        """Adds `more`, of which `less` has been added before."""
        for field in fields(self):
            name = field.name
            grown = getattr(more, name) - (getattr(less, name) if less is not None else 0)
            setattr(self, name, getattr(self, name) + grown)


@dataclass(frozen=True, slots=True)
class TierBlocks:
    """Blocks of all layers of a slot: on the device, in host memory, and in the decode buffer, where they are open."""

    resident: int = 0
    host: int = 0
    open: int = 0

    def __add__(self, other: TierBlocks) -> TierBlocks:
        return TierBlocks(self.resident + other.resident, self.host + other.host, self.open + other.open)
