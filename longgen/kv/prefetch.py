"""Loads that run ahead of the model, through the ring and across layers."""

from __future__ import annotations

from collections import deque

from longgen.errors import LongGenError
from longgen.kv.device_buffers import KVBuffer
from longgen.kv.parts import StoreParts
from longgen.kv.schedule import Load, Member, ReadSchedule, Run
from longgen.kv.transfer import Queue


class Prefetcher:
    """Fills ring entries in schedule order, as many ahead as there are entries.

    An entry is filled again only after its last read (`free`), and read only after its load (`filled`).
    """

    def __init__(self, parts: StoreParts, schedule: ReadSchedule) -> None:
        self._parts, self._schedule = parts, schedule
        self._idle = deque(parts.ring.entries)
        self._issued: deque[tuple[Load, KVBuffer]] = deque()

    def run_ahead(self) -> None:
        """Issues loads until the ring is full or the next load is not known yet."""
        while self._idle:
            load = self._schedule.next_load()
            if load is None:
                return
            self._issue(load, self._idle.popleft())

    def take(self, layer: int, member: Member, run: Run) -> KVBuffer:
        """The entry that holds `run`, which must be next in schedule order; COMPUTE sees its data from now on."""
        load, entry = self._issued.popleft()
        if load != Load(layer, member, run):
            raise LongGenError(f"the ring holds {load}, but layer {layer} reads {run} of slot {member.slot_id}")
        transfer = self._parts.transfer
        self._parts.counters[member.slot_id].taken(hit=transfer.reached(entry.filled))
        transfer.wait(Queue.COMPUTE, entry.filled)
        return entry

    def give_back(self, entry: KVBuffer) -> None:
        """The reads of an entry are on the COMPUTE queue: it can be filled again after them."""
        entry.free = self._parts.transfer.record(Queue.COMPUTE)
        self._idle.append(entry)
        self.run_ahead()

    def _issue(self, load: Load, entry: KVBuffer) -> None:
        transfer = self._parts.transfer
        transfer.wait(Queue.LOAD, entry.free)
        run = load.run
        self._parts.load_tokens(load.member.slot_id, load.layer, run.start, run.stop, entry, run.heads)
        entry.filled = transfer.record(Queue.LOAD)
        self._issued.append((load, entry))
