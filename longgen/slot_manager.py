"""The life of a slot: opened, given to a request, begun, ended. All that belongs to a request is cleared here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from longgen.allocation import RequestId, SlotAllocator, Ticket
from longgen.cuts import Cuts
from longgen.ends import do_all
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

    @contextmanager
    def naming(self, slot_id: int) -> Iterator[None]:
        """Adds the request that has the slot to a SlotError that does not name it."""
        owner = self.allocator[slot_id].owner
        try:
            yield
        except SlotError as error:
            if owner is None or repr(owner) in str(error):
                raise
            raise SlotError(f"request {owner!r}: {error}") from error

    def begin(self, ticket: Ticket, tokens: int) -> None:
        """Ends what is in a slot, and begins the request with this ticket there, of `tokens` tokens in all.

        If it fails later than by a SlotError, the request has begun, and whoever has the ticket ends it.

        Raises SlotError as `check_begin`.
        """
        self.check_begin(ticket, tokens)
        self.empty(ticket.slot_id)
        self.allocator[ticket.slot_id].ticket = ticket
        self.observer.begun(ticket.slot_id)
        self.store.announce(ticket.slot_id, tokens)

    def use(self, slot_id: int, tokens: int = 0) -> Ticket:
        """The request in a slot, which begins here if there is none, to run `tokens` more tokens.

        Raises SlotError if the slot was planned for fewer.
        """
        place = self.allocator[slot_id]
        self._check_planned(slot_id, self.length(slot_id) + tokens)
        if place.ticket is None:
            if not self.length(slot_id):
                self.empty(slot_id)  # once more: the last time may have failed
            place.ticket = Ticket(slot_id, place.owner)
            self.observer.begun(slot_id)
        return place.ticket

    def holds(self, ticket: Ticket) -> bool:
        """Whether the request with this ticket is still in its slot."""
        return any(place.ticket is ticket for place in self.allocator)  # of a slot that is unknown, nothing is

    def check(self, ticket: Ticket) -> None:
        """Raises SlotError unless the request with this ticket is still in its slot."""
        if not self.holds(ticket):
            who = "this request" if ticket.request_id is None else f"request {ticket.request_id!r}"
            raise SlotError(f"{who} is over: slot {ticket.slot_id} was reset, or another request was begun in it")

    def check_begin(self, ticket: Ticket, tokens: int) -> None:
        """Raises SlotError for a slot that belongs to another request, belongs to one and is not empty, or was planned
        for fewer tokens."""
        slot_id = ticket.slot_id
        if ticket.request_id is not None:
            self.check_owner(slot_id, ticket.request_id)
        if self.allocator[slot_id].owner is not None and self.length(slot_id):
            raise SlotError(
                f"prefill into {self.named(slot_id)}, which holds {self.length(slot_id):,} tokens: reset or release it "
                "first"
            )
        self._check_planned(slot_id, tokens)

    def check_step(self, tickets: Sequence[Ticket]) -> None:
        """Raises SlotError for a request that is over, holds no tokens, has no room for one more, or is named twice."""
        slot_ids = [ticket.slot_id for ticket in tickets]
        if len(set(slot_ids)) != len(slot_ids):
            raise SlotError(f"a slot is named twice among {slot_ids}: a step decodes one token of each")
        for ticket in tickets:
            self.check(ticket)
            self._check_filled(ticket.slot_id)
            self._check_planned(ticket.slot_id, self.length(ticket.slot_id) + 1)

    def step_tickets(self, slot_ids: Sequence[int]) -> list[Ticket]:
        """The requests in slots that a token is to be decoded in. Raises SlotError for a slot that holds no tokens."""
        for slot_id in slot_ids:
            self._check_filled(slot_id)
        return [self.use(slot_id) for slot_id in slot_ids]

    def cut(self, slot_id: int, length: int) -> None:
        """Cuts the KV of a slot to its first `length` tokens."""
        before = self.length(slot_id)
        self.store.truncate(slot_id, length)
        if length < before:
            self.allocator[slot_id].cuts.add(length)

    def check_kept(self, slot_id: int, length: int, cuts: int) -> None:
        """Raises SlotError if the first `length` tokens of a slot are not those it held after so many cuts."""
        least = self.allocator[slot_id].cuts.least_since(cuts)
        if least is not None and least < length:
            raise SlotError(
                f"the snapshot of {self.named(slot_id)} at {length:,} tokens is void: the slot was cut to {least:,} "
                "since then"
            )

    def seen(self, ticket: Ticket) -> None:
        """The host has what the request's last pass gave."""
        if self.holds(ticket):
            self.observer.seen(ticket.slot_id)

    def end(self, *tickets: Ticket) -> None:
        """Ends the requests with these tickets that have not ended."""
        do_all(*(partial(self.empty, ticket.slot_id) for ticket in tickets if self.holds(ticket)))

    def empty(self, slot_id: int) -> None:
        """The end of whatever is in a slot: the one place where everything that belongs to a request is cleared.

        All of it is tried, whatever fails; the next request in the slot begins with it again.
        """
        place = self.allocator[slot_id]
        place.ticket, place.cuts = None, Cuts()
        do_all(
            partial(self.observer.ended, slot_id),
            partial(self.store.reset, slot_id),
            partial(self.provider.reset, slot_id),
        )

    def empty_all(self) -> None:
        """The end of whatever is in any slot."""
        do_all(*(partial(self.empty, slot_id) for slot_id in range(len(self.allocator))))

    def release(self, slot_id: int) -> None:
        """Empties a slot and takes it from its request. Raises SlotError if it belongs to none."""
        self.allocator.release(slot_id)
        self.empty(slot_id)

    def clear(self) -> None:
        """Empties every slot, takes it from its owner if it has one, and clears the figures."""
        for slot_id, place in enumerate(self.allocator):
            if place.owner is not None:
                self.allocator.release(slot_id)
        do_all(self.empty_all, self.observer.clear)

    def check_owner(self, slot_id: int, request_id: RequestId) -> None:
        """Raises SlotError unless the slot is allocated to the request."""
        self.allocator.expect(slot_id, request_id)

    def _check_filled(self, slot_id: int) -> None:
        if self.allocator[slot_id] and self.length(slot_id) == 0:
            raise SlotError(f"decode in {self.named(slot_id)} before prefill: it holds no tokens")

    def _check_planned(self, slot_id: int, tokens: int) -> None:
        if self._planned is not None and tokens > self._planned:
            raise SlotError(
                f"{self.named(slot_id)} was planned for {self._planned:,} tokens, and {tokens:,} are asked for"
            )
