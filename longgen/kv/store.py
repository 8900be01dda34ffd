"""The KV store: slots, their blocks, and the passes that read and extend them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch

from longgen.attention.kernels import Kernels
from longgen.ends import do_all
from longgen.errors import CapacityError, SlotError
from longgen.kv.budget import beyond_machine
from longgen.kv.counters import Counters, TierBlocks
from longgen.kv.device_buffers import DecodeBuffers, KVBuffer, PrefillBuffers, ResidentTier, RingBuffer, WindowBuffers
from longgen.kv.filling import write_random_chunk
from longgen.kv.host_cache import HostCache
from longgen.kv.layout import KVLayout
from longgen.kv.parts import StoreParts
from longgen.kv.passes import Pass
from longgen.kv.schedule import Member
from longgen.kv.sizes import StoreSizes
from longgen.kv.slots import Slot, SlotTable
from longgen.kv.supply import HostSupply
from longgen.kv.transfer import Transfer
from longgen.sparse.base import Phase, SparsePolicy
from longgen.sparse.full import FullAttentionPolicy
from longgen.tracing import Label, unlabelled
from longgen.units import show_bytes


class KVStore:
    """Keeps the KV of several slots: the newest tokens on the device, the rest in host blocks.

    One pass is open at a time: `begin` it, `attend` once per layer, then `commit` or `abort`.
    """

    def __init__(
        self,
        layout: KVLayout,
        sizes: StoreSizes,
        *,
        transfer: Transfer,
        kernels: Kernels,
        policy: SparsePolicy | None = None,
        supply: HostSupply | None = None,
        scrub: bool = False,
        label: Label = unlabelled,
    ) -> None:
        """Allocates every device buffer.

        Args:
            policy: None is full attention.
            supply: of host memory through `transfer`, which may be at work already; None: one of the store's own.
            scrub: see `reset`.
            label: of ranges in a trace.
        """
        sizes.check(layout.shape)
        self.layout, self.sizes, self.transfer = layout, sizes, transfer
        self.slots = SlotTable(sizes.slots)
        self._full = FullAttentionPolicy()
        self._open: Pass | None = None
        self._supply = supply or HostSupply(transfer)
        self._scrub = scrub
        device, resident = transfer.device, sizes.resident_by_layer(layout.shape)
        self._parts = StoreParts(
            layout=layout,
            sizes=sizes,
            transfer=transfer,
            kernels=kernels,
            policy=policy or self._full,
            host=HostCache(layout, sizes, self._supply),
            ring=RingBuffer(layout, entries=sizes.ring_entries, run_blocks=sizes.run_blocks, device=device),
            prefill=PrefillBuffers(layout, depth=sizes.prefill_depth, chunk_tokens=sizes.chunk_tokens, device=device),
            decode=DecodeBuffers(layout, slots=sizes.slots, margin=sizes.decode_tokens, device=device),
            resident=ResidentTier(layout, slots=sizes.slots, blocks=resident, device=device),
            windows=WindowBuffers(
                layout,
                slots=sizes.slots,
                pass_tokens=sizes.pass_tokens,
                keep=sizes.window_keep,
                device=device,
            ),
            counters=tuple(Counters() for _ in range(sizes.slots)),
            label=label,
        )
        # Its memory, too, goes back only after every queue. At the end of the program it goes nowhere.
        weakref.finalize(self, _drain, transfer).atexit = False

    @property
    def host_bytes(self) -> int:
        """Host memory held for KV now, what is made ahead and what was returned included, in bytes."""
        return self._parts.host.nbytes

    def slot_host_bytes(self, slot_id: int) -> int:
        """Host memory held for a slot's request now, what is made ahead included, in bytes."""
        return self._parts.host.slot_bytes(self.slots[slot_id].id)

    def length(self, slot_id: int) -> int:
        """Tokens in a slot."""
        return self.slots[slot_id].length

    def counters(self, slot_id: int) -> Counters:
        """What was moved for a slot since its reset; a copy."""
        return self._parts.counters[self.slots[slot_id].id].copy()

    def blocks(self, slot_id: int) -> TierBlocks:
        """Where a slot's blocks lie now."""
        complete, tail = divmod(self.slots[slot_id].length, self.layout.block_size)
        opened = int(tail > 0)
        resident = self._parts.resident.blocks.values()
        return TierBlocks(
            resident=sum(min(complete + opened, most) for most in resident),
            host=sum(max(complete - most, 0) for most in resident),
            open=sum(opened for most in resident if complete >= most),
        )

    def announce(self, slot_id: int, tokens: int) -> None:
        """Says how many tokens the slot's request will have in all, so that host memory is cut to fit exactly and made
        in the background from now on. Raises CapacityError if they are more than the machine could ever hold."""
        needed = self.sizes.host_bytes(self.layout.shape, tokens)
        if excess := beyond_machine(needed):
            raise CapacityError(
                f"a request of {tokens:,} tokens needs {show_bytes(needed)} of host memory for its KV cache, {excess}; "
                "give fewer new tokens"
            )
        self._parts.host.announce(self.slots[slot_id].id, tokens)

    def grow(self, slot_id: int, tokens: int) -> None:
        """Waits until the slot has host blocks for `tokens` tokens. A pass does so by itself, for its own tokens.

        Raises CapacityError for host memory that cannot be had.
        """
        self._parts.host.grow(self.slots[slot_id].id, tokens)

    def fill_random(self, slot_id: int, tokens: int, generator: torch.Generator) -> None:
        """Fills an empty slot with `tokens` tokens of random K and V, as if a prompt had been prefilled.

        Host blocks, resident blocks, the open block and windows get standard normal values, drawn chunk by chunk
        (`sizes.chunk_tokens`), layer by layer in model order, K before V. For measuring decoding at a depth without
        the prefill, and for tests.

        Args:
            generator: on the store's device.

        Raises:
            SlotError: the slot holds tokens, its last commit failed, or a pass is open.
            CapacityError: host memory that cannot be had.
        """
        slot = self._usable(slot_id)
        if slot.length or self._open is not None:
            raise SlotError(f"slot {slot_id} cannot be filled: it holds {slot.length:,} tokens, or a pass is open")
        for start in range(0, tokens, self.sizes.chunk_tokens):
            (member,) = self._members([(slot_id, min(self.sizes.chunk_tokens, tokens - start))])
            self._parts.host.grow(slot_id, start + member.tokens)
            slot.written = start + member.tokens
            write_random_chunk(self._parts, member, generator)
            slot.length = slot.written

    def begin(self, requests: Sequence[tuple[int, int]], phase: Phase = Phase.PREFILL) -> Pass:
        """Opens a pass of n new tokens of one slot, or of one token of each of several slots.

        Args:
            requests: (slot id, new tokens) in batch order.
            phase: what the policy is told that the pass does.

        Raises:
            SlotError: an unknown slot, one named twice, a batch of more than one token each, a slot whose last
                commit failed, or a pass is open.
            CapacityError: more tokens than the buffers of a pass hold, or host memory that cannot be had.
        """
        members = self._members(requests)
        tokens, most = members[0].tokens, max(self.sizes.chunk_tokens, self.sizes.decode_tokens)
        if tokens > most:
            raise CapacityError(f"a pass of {tokens} tokens is larger than the chunk size {most}")
        for member in members:
            slot = self.slots[member.slot_id]
            end = member.length + member.tokens
            self._parts.host.grow(slot.id, end)
            slot.written = max(slot.written, end)
        policy = self._parts.policy
        supported = policy.supports_decode if phase is Phase.DECODE else policy.supports_prefill
        self._open = Pass(
            self._parts, policy if supported else self._full, phase, members, lambda counts: self._end(members, counts)
        )
        return self._open

    def truncate(self, slot_id: int, length: int) -> None:
        """Cuts a slot to its first `length` tokens.

        Raises:
            SlotError: the slot is in a pass, has fewer tokens, or a sliding-window layer no longer has the tokens
                before `length`.
        """
        slot = self._usable(slot_id)
        if self._open is not None and slot_id in self._open.slots:
            raise SlotError(f"slot {slot_id} is in an open pass: commit or abort it first")
        if not 0 <= length <= slot.length:
            raise SlotError(f"cannot truncate slot {slot_id} to {length} tokens: it has {slot.length}")
        floor = self._parts.windows.floor(slot.written)
        if 0 < length < floor:
            raise SlotError(
                f"cannot truncate slot {slot_id} to {length} tokens: its sliding-window layers keep the past of "
                f"{floor} tokens or more (raise window_keep, {self.sizes.window_keep} now)"
            )
        if length // self.layout.block_size != slot.length // self.layout.block_size:
            self._parts.restore_open_block(slot_id, length)
        slot.length = length
        if length == 0:
            slot.written = 0

    def reset(self, slot_id: int) -> None:
        """Empties a slot: it has no token, host block or event any more, and its device buffers are zeroed.

        Its host blocks go back to the pool as they are, and the buffers that all slots share (ring, prefill, window
        scratch) keep what was last in them, which nothing reads. With `scrub` these are overwritten too. A pass that
        is open over the slot is aborted. All of this is done also where a part of it fails, which is then raised.
        """
        parts, slot = self._parts, self.slots[slot_id]
        do_all(
            partial(self._abort_over, slot_id),
            parts.transfer.drain,
            parts.transfer.drain,  # at once, unless an interrupt kept the first from waiting
            slot.clear,
            partial(parts.host.release, slot_id, scrub=self._scrub),
            partial(parts.policy.reset, slot_id),
            parts.counters[slot_id].clear,
            partial(parts.forget_offloads, slot_id),
            *(partial(_empty, buffer) for buffer in self._slot_buffers(slot_id)),
            self._release_shared,
        )

    def close(self) -> None:
        """Ends the threads that make host memory. A store that is dropped ends them by itself, a moment later; what is
        still being copied is waited for before its memory is freed."""
        self._supply.close()

    def poison(self, value: float = float("nan")) -> None:
        """Fills every buffer that holds nothing of a slot with `value`: a read of stale data then shows in the result.

        Slots that hold tokens are left alone, and so are their host blocks.
        """
        self._parts.transfer.drain()
        free = [slot_id for slot_id in range(len(self.slots)) if self.slots[slot_id].length == 0]
        for buffer in (*self._shared_buffers(), *(b for slot_id in free for b in self._slot_buffers(slot_id))):
            buffer.k.fill_(value)
            buffer.v.fill_(value)
        self._parts.host.poison_pool(value)
        self._parts.transfer.drain()

    def _members(self, requests: Sequence[tuple[int, int]]) -> tuple[Member, ...]:
        if self._open is not None:
            raise SlotError(f"a pass over slots {self._open.slots} is open: commit or abort it first")
        ids = [slot_id for slot_id, _ in requests]
        if not requests or len(set(ids)) != len(ids):
            raise SlotError(f"a pass needs one or more different slots, not {ids}")
        counts = {tokens for _, tokens in requests}
        if min(counts) < 1 or (len(ids) > 1 and counts != {1}):
            raise SlotError(f"a pass takes n tokens of one slot or one token of several, not {list(requests)}")
        return tuple(Member(slot_id, self._usable(slot_id).length, tokens) for slot_id, tokens in requests)

    def _usable(self, slot_id: int) -> Slot:
        slot = self.slots[slot_id]
        if slot.broken:
            raise SlotError(f"a commit to slot {slot_id} failed halfway, so its tokens are lost: reset it")
        return slot

    def _end(self, members: tuple[Member, ...], counts: tuple[int, ...] | None) -> None:
        self._open = None
        for i, member in enumerate(members):
            slot = self.slots[member.slot_id]
            if counts is None:
                slot.broken = True
            else:
                slot.length = member.length + counts[i]

    def _abort_over(self, slot_id: int) -> None:
        if self._open is not None and slot_id in self._open.slots:
            self._open.abort()

    def _release_shared(self) -> None:
        """Drops the events of the buffers that all slots share, since every queue was drained. Not beside an open pass,
        which may be loading into them."""
        if self._open is not None:
            return
        for buffer in self._shared_buffers():
            buffer.filled = buffer.free = None
            if self._scrub:
                _empty(buffer)
        if self._scrub:
            self._parts.transfer.drain()  # a load does not wait for what COMPUTE does to an entry that is free

    def _shared_buffers(self) -> list[KVBuffer]:
        return [*self._parts.ring.entries, *self._parts.prefill.all(), self._parts.windows.scratch()]

    def _slot_buffers(self, slot_id: int) -> list[KVBuffer]:
        parts = (self._parts.decode, self._parts.resident, self._parts.windows)
        return [buffer for part in parts for buffer in part.of_slot(slot_id).values()]


def _empty(buffer: KVBuffer) -> None:
    """Zeroes a buffer that no queue uses."""
    buffer.filled = buffer.free = None
    buffer.k.zero_()
    buffer.v.zero_()


def _drain(transfer: Transfer) -> None:
    """Waits for every queue. On a device that has failed there is nothing left to wait for."""
    with suppress(Exception):
        transfer.drain()
