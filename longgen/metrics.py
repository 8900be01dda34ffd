"""What an engine did for each request and in all: times, copies, and where blocks lie."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from longgen.kv.counters import Counters, TierBlocks
from longgen.kv.store import KVStore
from longgen.sparse.base import Phase


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One request so far. Seconds and bytes; None where nothing was timed yet.

    Attributes:
        prompt_tokens: tokens run in prefill passes.
        decode_steps: tokens run in decode passes.
        time_to_first_token: from the start of its prefill until the host had what its first token is chosen from.
        time_per_output_token: of the tokens after the first, on average.
        prefill, decode: what was moved in passes of each kind.
        blocks: where its blocks lie.
        host_bytes: of host memory held for it, room for tokens to come included.
    """

    prompt_tokens: int
    decode_steps: int
    time_to_first_token: float | None
    time_per_output_token: float | None
    prefill: Counters
    decode: Counters
    blocks: TierBlocks
    host_bytes: int


@dataclass(frozen=True, slots=True)
class RunStats:
    """All requests that have ended since the last `Engine.reset_all`.

    Attributes:
        requests: how many.
        prompt_tokens, decode_steps, prefill, decode: summed.
        time_to_first_token, time_per_output_token: on average, seconds.
        blocks: where their blocks lay at their ends, summed.
        host_bytes: of host memory held for KV now, by slots and by the pool of returned blocks.
    """

    requests: int
    prompt_tokens: int
    decode_steps: int
    time_to_first_token: float | None
    time_per_output_token: float | None
    prefill: Counters
    decode: Counters
    blocks: TierBlocks
    host_bytes: int


@dataclass(slots=True)
class _Record:
    """A request under way. first, last: when the host had the prompt's result, and the newest one."""

    started: float
    first: float | None = None
    last: float | None = None
    prompt_tokens: int = 0
    decode_steps: int = 0
    prefill: Counters = field(default_factory=Counters)
    decode: Counters = field(default_factory=Counters)
    counted: Counters = field(default_factory=Counters)  # of the slot's counters, what is in the two above


@dataclass(slots=True)
class _Totals:
    requests: int = 0
    timed: int = 0
    prompt_tokens: int = 0
    decode_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefill: Counters = field(default_factory=Counters)
    decode: Counters = field(default_factory=Counters)
    blocks: TierBlocks = field(default_factory=TierBlocks)


class Observer:
    """Keeps the figures of one engine's requests, by slot, and their sums. The store counts; this only reads it."""

    def __init__(self, store: KVStore, clock: Callable[[], float] = time.perf_counter) -> None:
        self._store, self._clock = store, clock
        self._records: dict[int, _Record] = {}
        self._totals = _Totals()

    def begun(self, slot_id: int) -> None:
        """A slot's request starts, unless it has already."""
        if slot_id not in self._records:
            self._records[slot_id] = _Record(self._clock())

    def passed(self, slot_ids: Sequence[int], phase: Phase, tokens: int) -> None:
        """A pass of `tokens` new tokens of each slot was committed."""
        for slot_id in slot_ids:
            record, counters = self._records[slot_id], self._store.counters(slot_id)
            if phase is Phase.PREFILL:
                record.prompt_tokens += tokens
                record.prefill.add(counters, record.counted)
            else:
                record.decode_steps += tokens
                record.decode.add(counters, record.counted)
            record.counted = counters
            self.seen(slot_id)

    def seen(self, slot_id: int) -> None:
        """The host has what the slot's last pass gave. Without this call, a decode step counts until it is queued."""
        record = self._records.get(slot_id)
        if record is not None:
            record.last = self._clock()
            if record.decode_steps == 0:
                record.first = record.last

    def ended(self, slot_id: int) -> None:
        """A slot's request ends: its figures join the run's and are gone."""
        record = self._records.pop(slot_id, None)
        if record is None:
            return
        totals = self._totals
        totals.requests += 1
        totals.prompt_tokens += record.prompt_tokens
        totals.decode_steps += record.decode_steps
        totals.prefill.add(record.prefill)
        totals.decode.add(record.decode)
        totals.blocks += self._store.blocks(slot_id)
        if record.first is not None and record.last is not None:
            totals.timed += 1
            totals.prefill_seconds += record.first - record.started
            totals.decode_seconds += record.last - record.first

    def clear(self) -> None:
        """Forgets everything, the run's sums too."""
        self._records.clear()
        self._totals = _Totals()

    def request(self, slot_id: int) -> RequestStats | None:
        """The figures of the request in a slot; None if there is none."""
        record = self._records.get(slot_id)
        if record is None:
            return None
        first, last, steps = record.first, record.last, record.decode_steps
        return RequestStats(
            prompt_tokens=record.prompt_tokens,
            decode_steps=steps,
            time_to_first_token=None if first is None else first - record.started,
            time_per_output_token=None if first is None or last is None or not steps else (last - first) / steps,
            prefill=record.prefill.copy(),
            decode=record.decode.copy(),
            blocks=self._store.blocks(slot_id),
            host_bytes=self._store.slot_host_bytes(slot_id),
        )

    def phases(self) -> dict[str, float]:
        """Seconds of all requests that have ended, up to their first tokens and after them."""
        return {"prefill": self._totals.prefill_seconds, "decode": self._totals.decode_seconds}

    def run(self) -> RunStats:
        """The sums over all requests that have ended."""
        totals = self._totals
        return RunStats(
            requests=totals.requests,
            prompt_tokens=totals.prompt_tokens,
            decode_steps=totals.decode_steps,
            time_to_first_token=totals.prefill_seconds / totals.timed if totals.timed else None,
            time_per_output_token=totals.decode_seconds / totals.decode_steps if totals.decode_steps else None,
            prefill=totals.prefill.copy(),
            decode=totals.decode.copy(),
            blocks=totals.blocks,
            host_bytes=self._store.host_bytes,
        )
