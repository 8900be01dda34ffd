"""Which request has which slot, by names that the caller gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from longgen.cuts import Cuts
from longgen.errors import SlotError, UsageError

RequestId = str | int  # never an object's id(): Python gives that to the next object


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """One request in one slot of one engine: whoever means that request and no other holds on to it.

    No two are equal, and one is in its slot from the request's begin to its end. So a caller that comes late is told
    from the request that came after, also where the request ids are the same.

    Attributes:
        slot_id: where the request runs.
        request_id: whose slot it has to be; None: anybody's.
    """

    slot_id: int
    request_id: RequestId | None = None


@dataclass(slots=True)
class Place:
    """One slot as callers see it.

    Attributes:
        owner: the request it is allocated to; None: free.
        last_owner: the one before, for messages.
        ticket: of the request in it; None: nothing ran in it since it was last emptied.
        cuts: of that request.
    """

    owner: RequestId | None = None
    last_owner: RequestId | None = None
    ticket: Ticket | None = None
    cuts: Cuts = field(default_factory=Cuts)


class SlotAllocator:
    """Gives a fixed number of slots to requests."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise UsageError(f"slots is {count}: at least one is needed")
        self._places = tuple(Place() for _ in range(count))

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Place]:
        return iter(self._places)

    def __getitem__(self, slot_id: int) -> Place:
        if not isinstance(slot_id, int) or not 0 <= slot_id < len(self._places):
            raise SlotError(f"slot {slot_id} is unknown: this engine has slots 0 to {len(self._places) - 1}")
        return self._places[slot_id]

    def named(self, slot_id: int) -> str:
        """The slot and its request, for messages."""
        owner = self[slot_id].owner
        return f"slot {slot_id}" if owner is None else f"slot {slot_id} of request {owner!r}"

    def allocate(self, request_id: RequestId) -> int:
        """Gives the first free slot that holds nothing to a request.

        Raises SlotError if it has one already, if all are taken, or for an id that is no text or number.
        """
        if not isinstance(request_id, (str, int)) or isinstance(request_id, bool):
            raise SlotError(f"request id {request_id!r} is neither text nor a whole number")
        for slot_id, place in enumerate(self._places):
            if place.owner == request_id:
                raise SlotError(f"request {request_id!r} has slot {slot_id} already: release it first")
        for slot_id, place in enumerate(self._places):
            if place.owner is None and place.ticket is None:
                place.owner = request_id
                return slot_id
        raise SlotError(f"no slot is free for request {request_id!r}: {self.taken()}; release one, or allocate more")

    def release(self, slot_id: int) -> None:
        """Takes a slot from its request. Raises SlotError if it has none."""
        place = self[slot_id]
        if place.owner is None:
            raise SlotError(f"slot {slot_id} is not allocated: {self._history(slot_id)}")
        place.owner, place.last_owner = None, place.owner

    def expect(self, slot_id: int, request_id: RequestId) -> None:
        """Raises SlotError unless the slot is the request's."""
        try:
            owner = self[slot_id].owner
        except SlotError as error:
            raise SlotError(f"request {request_id!r} uses a slot that is not there: {error}") from None
        if owner is None:
            raise SlotError(
                f"request {request_id!r} uses slot {slot_id}, which is not allocated: {self._history(slot_id)}"
            )
        if owner != request_id:
            raise SlotError(f"request {request_id!r} uses slot {slot_id}, which belongs to request {owner!r}")

    def taken(self) -> str:
        """What every slot that is not free holds, for messages."""
        return ", ".join(
            f"slot {slot_id} belongs to request {place.owner!r}"
            if place.owner is not None
            else f"slot {slot_id} holds tokens of no request id"
            for slot_id, place in enumerate(self._places)
            if place.owner is not None or place.ticket is not None
        )

    def _history(self, slot_id: int) -> str:
        last = self[slot_id].last_owner
        return "it never was" if last is None else f"request {last!r} released it"
