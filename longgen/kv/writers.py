"""Where a pass puts its new tokens: a chunk goes to its places at once, decoded tokens to the open block.

Everything written is beyond the slot's length until the pass commits, so an abort has nothing to undo.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from longgen.kv.device_buffers import KVBuffer
from longgen.kv.parts import StoreParts
from longgen.kv.reads import OwnTokens
from longgen.kv.schedule import Member
from longgen.kv.transfer import Queue


class TokenWriter(ABC):
    """Writes the K and V of a pass's new tokens, and settles a slot at commit."""

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts

    @abstractmethod
    def write(self, layer: int, member: Member, k: torch.Tensor, v: torch.Tensor) -> OwnTokens:
        """Stages k, v [kv_heads, n, head_dim]; says where attention should read them."""

    @abstractmethod
    def settle(self, member: Member, length: int) -> None:
        """The slot is about to have `length` tokens: makes its open block the one at that length."""

    def _write_resident(self, layer: int, member: Member, k: torch.Tensor, v: torch.Tensor) -> int:
        """Writes the tokens whose place is in the resident tier; returns how many there were."""
        start = member.length
        count = min(max(self._parts.resident.tokens(layer) - start, 0), member.tokens)
        if count:
            buffer = self._parts.resident.get(member.slot_id, layer)
            self._parts.keep(member.slot_id, buffer, start, k[:, :count], v[:, :count])
        return count

    def _in_resident(self, layer: int, member: Member) -> OwnTokens:
        """New tokens that were all written to the resident tier, where everything before them lies too."""
        tier = self._parts.resident.get(member.slot_id, layer)
        return OwnTokens(tier.k, tier.v, 0)

    def _open_start(self, member: Member) -> int:
        """Position of the first token of the slot's open block."""
        return member.length - member.length % self._parts.layout.block_size


class DecodeWriter(TokenWriter):
    """A few tokens: they stay in the open block, which is flushed when accepted tokens fill it."""

    def write(self, layer: int, member: Member, k: torch.Tensor, v: torch.Tensor) -> OwnTokens:
        done = self._write_resident(layer, member, k, v)
        if done == member.tokens:
            return self._in_resident(layer, member)
        buffer, opened = self._writable(member.slot_id, layer), self._open_start(member)
        self._parts.keep(member.slot_id, buffer, member.length + done - opened, k[:, done:], v[:, done:])
        return OwnTokens(k, v, member.length) if done else OwnTokens(buffer.k, buffer.v, opened)

    def settle(self, member: Member, length: int) -> None:
        size = self._parts.layout.block_size
        block = member.length // size
        spill = length - (block + 1) * size
        if spill < 0:
            return
        self._watch(member.slot_id, block)
        self._flush(member.slot_id, block)
        if spill:
            for layer in self._parts.layout.full_layers:
                if block + 1 >= self._parts.resident.blocks[layer]:
                    buffer = self._writable(member.slot_id, layer)
                    k, v = (tensor[:, size : size + spill].clone() for tensor in (buffer.k, buffer.v))
                    self._parts.keep(member.slot_id, buffer, 0, k, v)

    def _writable(self, slot_id: int, layer: int) -> KVBuffer:
        """The decode buffer, once a flush that still reads it is done."""
        buffer = self._parts.decode.get(slot_id, layer)
        self._parts.transfer.wait(Queue.COMPUTE, buffer.free)
        buffer.free = None
        return buffer

    def _flush(self, slot_id: int, block: int) -> None:
        parts, size = self._parts, self._parts.layout.block_size
        layers = [layer for layer in parts.layout.full_layers if block >= parts.resident.blocks[layer]]
        parts.transfer.wait(Queue.OFFLOAD, parts.transfer.record(Queue.COMPUTE))
        for layer in layers:
            buffer = parts.decode.get(slot_id, layer)
            parts.offload_tokens(slot_id, layer, block * size, (block + 1) * size, buffer, block * size)
        flushed = parts.transfer.record(Queue.OFFLOAD)
        for layer in layers:
            parts.offloaded[slot_id, layer] = parts.decode.get(slot_id, layer).free = flushed

    def _watch(self, slot_id: int, block: int) -> None:
        parts, size = self._parts, self._parts.layout.block_size
        if not parts.policy.watches_blocks:
            return
        for layer in parts.layout.full_layers:
            if block < parts.resident.blocks[layer]:
                buffer, start = parts.resident.get(slot_id, layer), block * size
            else:
                buffer, start = parts.decode.get(slot_id, layer), 0
            span = slice(start, start + size)
            parts.policy.on_block_written(slot_id, layer, block, buffer.k[:, span], buffer.v[:, span])


class ChunkWriter(TokenWriter):
    """A chunk: written to the resident tier where all of it belongs there; else staged layer by layer and sent to its
    places while attention runs."""

    def write(self, layer: int, member: Member, k: torch.Tensor, v: torch.Tensor) -> OwnTokens:
        parts = self._parts
        resident = self._write_resident(layer, member, k, v)
        if resident == member.tokens:
            own = self._in_resident(layer, member)
            self._watch(layer, member, own)
            return own
        staged = parts.prefill.take()
        parts.transfer.wait(Queue.COMPUTE, staged.free)
        parts.keep(member.slot_id, staged, 0, k, v)
        own = OwnTokens(staged.k, staged.v, member.length)
        self._watch(layer, member, own)
        self._offload(layer, member, staged, member.length + resident)
        return own

    def settle(self, member: Member, length: int) -> None:
        self._parts.restore_open_block(member.slot_id, length)

    def _offload(self, layer: int, member: Member, staged: KVBuffer, start: int) -> None:
        """Sends the tokens from `start` on, and those of the open block before the chunk, so that the host has it
        whole."""
        parts = self._parts
        opened = self._open_start(member)
        parts.transfer.wait(Queue.OFFLOAD, parts.transfer.record(Queue.COMPUTE))
        stop = member.length + member.tokens
        parts.offload_tokens(member.slot_id, layer, start, stop, staged, member.length)
        decode = parts.decode.get(member.slot_id, layer)
        if opened < member.length and opened >= parts.resident.tokens(layer):
            parts.offload_tokens(member.slot_id, layer, opened, member.length, decode, opened)
        done = parts.transfer.record(Queue.OFFLOAD)
        parts.offloaded[member.slot_id, layer] = staged.free = decode.free = done

    def _watch(self, layer: int, member: Member, own: OwnTokens) -> None:
        """Shows the policy every block that the chunk completes."""
        parts, size = self._parts, self._parts.layout.block_size
        if not parts.policy.watches_blocks:
            return
        for block in range(member.length // size, (member.length + member.tokens) // size):
            k, v = (self._whole_block(block, layer, member, own, which) for which in ("k", "v"))
            parts.policy.on_block_written(member.slot_id, layer, block, k, v)

    def _whole_block(self, block: int, layer: int, member: Member, own: OwnTokens, which: str) -> torch.Tensor:
        parts, size = self._parts, self._parts.layout.block_size
        first = block * size - own.base
        inside: torch.Tensor = getattr(own, which)[:, max(first, 0) : first + size]
        if first >= 0:
            return inside
        if block < parts.resident.blocks[layer]:
            earlier = getattr(parts.resident.get(member.slot_id, layer), which)[:, block * size : member.length]
        else:
            earlier = getattr(parts.decode.get(member.slot_id, layer), which)[:, :-first]
        return torch.cat((earlier, inside), 1)
