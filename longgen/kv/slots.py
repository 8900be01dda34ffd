"""Slots: the requests a store can hold at once, each under an explicit id."""

from __future__ import annotations

from dataclasses import dataclass

from longgen.errors import SlotError, UsageError


@dataclass(slots=True)
class Slot:
    """One request's place in the store. Where a token lives follows from its position alone.

    Attributes:
        id: the slot's number, 0 to slots - 1.
        length: tokens that are part of the request.
        written: highest position ever staged since the reset, accepted or not; tells which tokens of a
            sliding-window layer are still there.
        broken: whether a commit failed halfway; only a reset helps.
    """

    id: int
    length: int = 0
    written: int = 0
    broken: bool = False

    def clear(self) -> None:
        """It holds nothing any more."""
        self.length = self.written = 0
        self.broken = False


class SlotTable:
    """A fixed number of slots, looked up by id."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise UsageError(f"slots is {count}: at least one is needed")
        self._slots = tuple(Slot(i) for i in range(count))

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, slot_id: int) -> Slot:
        if not 0 <= slot_id < len(self._slots):
            raise SlotError(f"slot {slot_id} is unknown: this store has slots 0 to {len(self._slots) - 1}")
        return self._slots[slot_id]
