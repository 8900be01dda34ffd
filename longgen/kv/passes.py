"""One forward pass over the store: stage new K and V, attend to past and chunk, then commit or abort."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

import torch

from longgen.attention.call import AttentionCall
from longgen.attention.merge import MergedAttention
from longgen.errors import LongGenError, SlotError
from longgen.kv.parts import StoreParts
from longgen.kv.prefetch import Prefetcher
from longgen.kv.reads import KVRead, device_reads
from longgen.kv.schedule import ALL_HEADS, Member, ReadSchedule
from longgen.kv.writers import ChunkWriter, DecodeWriter
from longgen.sparse.base import Phase, SparsePolicy


class Participant(Protocol):
    """State outside the store that becomes the slots' own only when the pass commits (recurrent states, say)."""

    def prepare(self, accepted: tuple[int, ...]) -> None:
        """Raises LongGenError if it cannot accept the first `accepted` tokens of each slot; changes nothing."""

    def commit(self, accepted: tuple[int, ...]) -> None: ...

    def abort(self) -> None: ...


class Pass:
    """A forward pass of n new tokens of one slot, or of one token of several slots.

    Made by KVStore.begin. `attend` is called once per attention layer, in order; then `commit` or `abort` ends it.
    As a context manager it aborts unless it was ended. Nothing it writes is part of a slot before `commit`.
    """

    def __init__(
        self,
        parts: StoreParts,
        policy: SparsePolicy,
        phase: Phase,
        members: tuple[Member, ...],
        on_end: Callable[[tuple[int, ...] | None], None],
    ) -> None:
        """`on_end` is told the accepted tokens of each slot: all 0 after an abort, None if a commit failed halfway."""
        self._parts, self._members, self._on_end = parts, members, on_end
        self._windows = {layer.index: layer.window for layer in parts.layout.window_layers}
        self._order = tuple(layer.index for layer in parts.layout.layers)
        self._attended = 0
        self._ended = False
        self._participants: list[Participant] = []
        is_chunk = members[0].tokens > parts.sizes.decode_tokens
        self._writer = ChunkWriter(parts) if is_chunk else DecodeWriter(parts)
        self._schedule = ReadSchedule(
            policy,
            phase,
            parts.layout.full_layers,
            members,
            block_size=parts.layout.block_size,
            resident_blocks=parts.resident.blocks,
            run_blocks=parts.sizes.run_blocks,
        )
        self._prefetcher = Prefetcher(parts, self._schedule)
        self._prefetcher.run_ahead()

    @property
    def slots(self) -> tuple[int, ...]:
        """Ids of the slots served, in batch order."""
        return tuple(member.slot_id for member in self._members)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each slot before this pass."""
        return tuple(member.length for member in self._members)

    @property
    def tokens(self) -> tuple[int, ...]:
        """New tokens of each slot."""
        return tuple(member.tokens for member in self._members)

    def enlist(self, participant: Participant) -> None:
        """Adds state that commits and aborts with this pass."""
        self._participants.append(participant)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Stages k, v and returns the attention of q over the slot's past and the pass's own tokens (causal).

        Args:
            layer: layer index in the model.
            q: [batch, q_heads, n, head_dim] with rotary applied; batch is one row a slot, in the order of `slots`.
            k, v: [batch, kv_heads, n, head_dim].
            scale: factor of the dot products.

        Returns:
            [batch, n, q_heads, head_dim] in q's dtype.

        Raises:
            LongGenError: the layer is out of order, or the shape is not that of the pass.
        """
        self._expect(layer, q)
        with self._parts.label(f"attention of layer {layer}"):
            rows = [
                self._attend_window(layer, member, q[i], k[i], v[i], scale)
                if layer in self._windows
                else self._attend_full(layer, member, q[i], k[i], v[i], scale)
                for i, member in enumerate(self._members)
            ]
        return rows[0][None] if len(rows) == 1 else torch.stack(rows)

    def commit(self, accepted: int | Sequence[int] | None = None) -> None:
        """Makes the tokens, or the first `accepted` of each slot, part of the slots, and ends the pass."""
        counts = self._accepted(accepted)
        self._check_open()
        if self._attended != len(self._order):
            raise LongGenError(f"pass committed after {self._attended} of {len(self._order)} attention layers")
        for participant in self._participants:
            participant.prepare(counts)
        self._end()
        try:
            for member, count in zip(self._members, counts, strict=True):
                self._writer.settle(member, member.length + count)
            for participant in self._participants:
                participant.commit(counts)
        except BaseException:  # an interrupt too: half of the commit may be done
            self._on_end(None)
            raise
        self._on_end(counts)

    def abort(self) -> None:
        """Ends the pass as if it had not been; the slots keep their lengths."""
        self._end()
        try:
            for participant in self._participants:
                participant.abort()
        finally:
            self._on_end((0,) * len(self._members))

    def __enter__(self) -> Pass:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ended:
            self.abort()

    def _end(self) -> None:
        self._check_open()
        self._ended = True

    def _check_open(self) -> None:
        if self._ended:
            raise LongGenError("this pass has ended already")

    def _expect(self, layer: int, q: torch.Tensor) -> None:
        self._check_open()
        expected = self._order[self._attended] if self._attended < len(self._order) else None
        if layer != expected:
            raise LongGenError(f"attend on layer {layer}, but this pass expects layer {expected}")
        shape, planned = (q.shape[0], q.shape[2]), (len(self._members), self._members[0].tokens)
        if shape != planned:
            raise LongGenError(f"attend on slots x tokens {shape}, but this pass was begun for {planned}")
        self._attended += 1

    def _accepted(self, accepted: int | Sequence[int] | None) -> tuple[int, ...]:
        if accepted is None:
            return self.tokens
        counts = (accepted,) * len(self._members) if isinstance(accepted, int) else tuple(accepted)
        if len(counts) != len(self._members):
            raise SlotError(f"accepted names {len(counts)} slots, the pass serves {len(self._members)}")
        for count, member in zip(counts, self._members, strict=True):
            if not 0 <= count <= member.tokens:
                raise SlotError(f"cannot accept {count} of {member.tokens} tokens in slot {member.slot_id}")
        return counts

    def _attend_window(
        self, layer: int, member: Member, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[n, q_heads, head_dim]: the window and the own tokens, in one call."""
        windows = self._parts.windows
        windows.put(member.slot_id, layer, member.length, k, v)
        staged = k.nbytes
        k, v = windows.view(member.slot_id, layer, member.length, member.length + member.tokens)
        self._parts.counters[member.slot_id].kept(2 * (staged + k.nbytes), 4)
        out, _ = self._parts.kernels(AttentionCall(q, k, v, scale, causal=True, window=self._windows[layer]))
        return out.to(q.dtype).transpose(0, 1)

    def _attend_full(
        self, layer: int, member: Member, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[n, q_heads, head_dim]: own tokens, the open block, resident runs and loaded runs, merged."""
        written = self._writer.write(layer, member, k, v)
        runs = self._schedule.runs(layer, member, q)
        self._prefetcher.run_ahead()
        own, reads = device_reads(self._parts, layer, member, runs, written)
        kernels = self._parts.kernels
        merged = kernels.merges.begin(kernels(AttentionCall(q, own.k, own.v, scale, causal=True)))
        for read in reads:
            self._add(merged, q, read, scale)
        for run in runs.loaded:
            entry = self._prefetcher.take(layer, member, run)
            tokens = slice(0, run.stop - run.start)
            self._add(merged, q, KVRead(entry.k[run.heads, tokens], entry.v[run.heads, tokens], run.heads), scale)
            self._prefetcher.give_back(entry)
        with self._parts.label("merge"):
            return merged.finish(q.dtype)

    def _add(self, merged: MergedAttention, q: torch.Tensor, read: KVRead, scale: float) -> None:
        """Attends to `read` with the query heads of its KV heads."""
        heads = read.heads
        if heads != ALL_HEADS:
            groups = q.shape[0] // self._parts.layout.kv_heads
            heads = slice(heads.start * groups, heads.stop * groups)
        with self._parts.label("merge"):
            merged.make_room()
        merged.add(self._parts.kernels(AttentionCall(q[heads], read.k, read.v, scale)), heads)
