"""The fixed set of device buffers: ring, prefill, decode, resident and window buffers.

Nothing here grows with the prompt. Every K or V is [kv_heads, tokens, head_dim], head-major like the host cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from longgen.errors import CapacityError
from longgen.kv.layout import KVLayout
from longgen.kv.sizes import window_capacity, window_scratch
from longgen.kv.transfer import Event


@dataclass(slots=True)
class KVBuffer:
    """K and V of some tokens, with the events that guard their reuse.

    Attributes:
        k, v: [kv_heads, tokens, head_dim].
        filled: reached when the data is there to be read.
        free: reached when the last reader is done and the buffer may be overwritten.
    """

    k: torch.Tensor
    v: torch.Tensor
    filled: Event = None
    free: Event = None


def _kv_buffers(count: int, layout: KVLayout, tokens: int, device: torch.device) -> tuple[KVBuffer, ...]:
    """`count` buffers of `tokens` tokens. Raises CapacityError if the device has no room for them."""
    shape = (count, layout.kv_heads, tokens, layout.head_dim)
    try:
        k = torch.empty(shape, dtype=layout.dtype, device=device)
        v = torch.empty(shape, dtype=layout.dtype, device=device)
    except (RuntimeError, TypeError) as error:  # no memory; a size beyond 64 bits
        raise CapacityError(
            f"{count} buffers of {tokens:,} tokens, {count * tokens * layout.token_bytes:,} bytes, do not fit into the "
            f"memory of {device}: lower the block size, chunk size, ring or resident blocks"
        ) from error
    return tuple(KVBuffer(k[i], v[i]) for i in range(count))


class RingBuffer:
    """Entries that loads fill and attention reads, in turn; each holds a run of blocks of any one layer."""

    def __init__(self, layout: KVLayout, *, entries: int, run_blocks: int, device: torch.device) -> None:
        self.entries = _kv_buffers(entries, layout, run_blocks * layout.block_size, device)


class PrefillBuffers:
    """Staging of a chunk's K and V, one buffer a layer in turn, until it is offloaded."""

    def __init__(self, layout: KVLayout, *, depth: int, chunk_tokens: int, device: torch.device) -> None:
        self.chunk_tokens = chunk_tokens
        self._buffers = _kv_buffers(depth, layout, chunk_tokens, device)
        self._next = 0

    def take(self) -> KVBuffer:
        """The next buffer; write to it only after its `free` event."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        return buffer

    def all(self) -> tuple[KVBuffer, ...]:
        return self._buffers


class DecodeBuffers:
    """The open block of every slot and layer, with a margin so that a few tokens can run over its end.

    Token p of a slot whose open block is b lies at p - b * block_size.
    """

    def __init__(self, layout: KVLayout, *, slots: int, margin: int, device: torch.device) -> None:
        self.margin = margin
        layers = layout.full_layers
        tokens = layout.block_size + margin
        self._buffers = tuple(
            dict(zip(layers, _kv_buffers(len(layers), layout, tokens, device), strict=True)) for _ in range(slots)
        )

    def get(self, slot_id: int, layer: int) -> KVBuffer:
        return self._buffers[slot_id][layer]

    def of_slot(self, slot_id: int) -> Mapping[int, KVBuffer]:
        """By layer."""
        return self._buffers[slot_id]


class ResidentTier:
    """The first blocks of every slot, a number per layer, read where they lie."""

    def __init__(self, layout: KVLayout, *, slots: int, blocks: Mapping[int, int], device: torch.device) -> None:
        self.blocks = blocks
        self._block_size = layout.block_size
        self._buffers = tuple(
            {
                layer: _kv_buffers(1, layout, blocks[layer] * layout.block_size, device)[0]
                for layer in layout.full_layers
            }
            for _ in range(slots)
        )

    def tokens(self, layer: int) -> int:
        """Positions below this live here."""
        return self.blocks[layer] * self._block_size

    def get(self, slot_id: int, layer: int) -> KVBuffer:
        return self._buffers[slot_id][layer]

    def of_slot(self, slot_id: int) -> Mapping[int, KVBuffer]:
        """By layer."""
        return self._buffers[slot_id]


class WindowBuffers:
    """The last tokens of every sliding-window layer, circular: position p lies at p % window_capacity(...)."""

    def __init__(self, layout: KVLayout, *, slots: int, pass_tokens: int, keep: int, device: torch.device) -> None:
        self._windows = {layer.index: layer.window or 0 for layer in layout.window_layers}
        self._capacity = {index: window_capacity(window, pass_tokens, keep) for index, window in self._windows.items()}
        self._buffers = tuple(
            {index: _kv_buffers(1, layout, size, device)[0] for index, size in self._capacity.items()}
            for _ in range(slots)
        )
        longest = window_scratch(tuple(self._windows.values()), pass_tokens)
        self._scratch = _kv_buffers(1, layout, longest, device)[0]
        self._device = device

    def put(self, slot_id: int, layer: int, position: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes tokens [position, position + n): k, v [kv_heads, n, head_dim]."""
        buffer = self._buffers[slot_id][layer]
        where = self._places(layer, position, position + k.shape[1])
        buffer.k.index_copy_(1, where, k)
        buffer.v.index_copy_(1, where, v)

    def view(self, slot_id: int, layer: int, position: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V in order for queries at [position, stop): the window before them, and themselves.

        Both lie in one scratch buffer: use them before the next call.
        """
        buffer = self._buffers[slot_id][layer]
        start = max(0, position + 1 - self._windows[layer])
        where = self._places(layer, start, stop)
        k, v = self._scratch.k[:, : stop - start], self._scratch.v[:, : stop - start]
        k.copy_(buffer.k.index_select(1, where))
        v.copy_(buffer.v.index_select(1, where))
        return k, v

    def floor(self, written: int) -> int:
        """The smallest length a slot can be truncated to when positions up to `written` have been staged."""
        return max((written - (self._capacity[i] - self._windows[i] + 1) for i in self._windows), default=0)

    def of_slot(self, slot_id: int) -> Mapping[int, KVBuffer]:
        """By layer."""
        return self._buffers[slot_id]

    def scratch(self) -> KVBuffer:
        return self._scratch

    def _places(self, layer: int, start: int, stop: int) -> torch.Tensor:
        return torch.arange(start, stop, device=self._device) % self._capacity[layer]
