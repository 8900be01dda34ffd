"""The life of a slot: opened, given to a request, begun, ended. All that belongs to a request is cleared here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from longgen.allocation import RequestId, SlotAllocator
from longgen.errors import SlotError
from longgen.kv.sizes import StoreSizes
from longgen.kv.store import KVStore
from longgen.metrics import Observer
from longgen.model.provider import Provider
from longgen.shortage import shortage_reported


class SlotManager:
    """The slots of one engine, with all that is kept by slot: KV, recurrent states, figures, owners.

    It has no lock of its own: what changes a slot is called in a turn of the engine.

    Args:
        provider: gives the weights; the states are made here.
        open_store: makes a store of given sizes.
        planned: tokens that each slot was planned for; None: no limit.
    """

    def __init__(
        self,
        provider: Provider,
        open_store: Callable[[StoreSizes], KVStore],
        sizes: StoreSizes,
        planned: int | None,
    ) -> None:
        self._open_store, self._planned = open_store, planned
        self._tickets = count()
        self._open(provider, sizes)

    def _open(self, provider: Provider, sizes: StoreSizes) -> None:
        self.allocator = SlotAllocator(sizes.slots)
        self.provider = provider.with_slots(sizes.slots)
        self.store = self._open_store(sizes)
        self.observer = Observer(self.store)

    def reopen(self, slots: int) -> None:
        """Makes buffers and states for another number of slots, all empty.

        Raises SlotError if a slot is taken, CapacityError if there is no room: then the slots are as many as before.
        """
        if taken := self.allocator.taken():
            raise SlotError(f"the number of slots cannot change to {slots}: {taken}; release or reset every slot first")
        before, provider = self.store.sizes, self.provider
        if slots == before.slots:
            return
        del self.store, self.observer  # their memory is free before more is taken
        try:
            with shortage_reported(f"allocating {slots} slots", provider.device):
                self._open(provider, replace(before, slots=slots))
        except BaseException:
            self._open(provider, before)
            raise

    def length(self, slot_id: int) -> int:
        """Tokens in a slot."""
        return self.store.length(slot_id)

    def named(self, slot_id: int) -> str:
        """The slot and its request, for messages."""
        return self.allocator.named(slot_id)

    def begin(self, slot_id: int, tokens: int) -> int:
        """Readies a slot for a request of `tokens` tokens in all; returns a ticket that tells it from all others.

        Raises SlotError if the slot belongs to a request id and holds tokens, or was planned for fewer.
        """
        place = self.allocator[slot_id]
        if place.owner is not None and self.length(slot_id):
            raise SlotError(
                f"prefill into {self.named(slot_id)}, which holds {self.length(slot_id):,} tokens: reset or release it "
                "first"
            )
        self._check_planned(slot_id, tokens)
        self.empty(slot_id)
        self.use(slot_id)
        self.store.announce(slot_id, tokens)
        place.ticket = next(self._tickets)
        return place.ticket

    def use(self, slot_id: int) -> None:
        """Something is about to run in a slot."""
        self.allocator[slot_id].used = True
        self.observer.begun(slot_id)

    def holds(self, slot_id: int, ticket: int) -> bool:
        """Whether the request with this ticket is still in the slot."""
        return slot_id < len(self.allocator) and self.allocator[slot_id].ticket == ticket

    def end(self, slot_id: int, ticket: int) -> None:
        """Ends the request with this ticket, unless it has ended."""
        if self.holds(slot_id, ticket):
            self.empty(slot_id)

    def empty(self, slot_id: int) -> None:
        """The end of whatever is in a slot: the one place where everything that belongs to a request is cleared."""
        place = self.allocator[slot_id]
        self.observer.ended(slot_id)
        self.store.reset(slot_id)
        self.provider.reset(slot_id)
        place.used, place.ticket = False, None

    def release(self, slot_id: int) -> None:
        """Empties a slot and takes it from its request. Raises SlotError if it belongs to none."""
        self.allocator.release(slot_id)
        self.empty(slot_id)

    def clear(self) -> None:
        """Empties every slot, takes it from its owner if it has one, and clears the figures."""
        for slot_id, place in enumerate(self.allocator):
            if place.owner is not None:
                self.allocator.release(slot_id)
            self.empty(slot_id)
        self.observer.clear()

    def check_owner(self, slot_id: int, request_id: RequestId) -> None:
        """Raises SlotError unless the slot is allocated to the request."""
        self.allocator.expect(slot_id, request_id)

    def check_filled(self, slot_ids: Sequence[int]) -> None:
        """Raises SlotError if a slot holds no tokens, so that nothing can be decoded in it, or is named twice."""
        if len(set(slot_ids)) != len(slot_ids):
            raise SlotError(f"a slot is named twice among {list(slot_ids)}: a step decodes one token of each")
        for slot_id in slot_ids:
            if self.allocator[slot_id] and self.length(slot_id) == 0:
                raise SlotError(f"decode in {self.named(slot_id)} before prefill: it holds no tokens")

    def check_room(self, slot_ids: Sequence[int], tokens: int) -> None:
        """Raises SlotError if a slot was not planned for `tokens` more tokens."""
        for slot_id in slot_ids:
            self._check_planned(slot_id, self.length(slot_id) + tokens)

    def _check_planned(self, slot_id: int, tokens: int) -> None:
        if self._planned is not None and tokens > self._planned:
            raise SlotError(
                f"{self.named(slot_id)} was planned for {self._planned:,} tokens, and {tokens:,} are asked for"
            )
