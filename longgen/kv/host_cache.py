"""The host's part of the KV cache: blocks in extents that grow with the request.

An extent holds a run of consecutive blocks of every layer, K and V apart. Inside, the order is layer, KV head, token,
head size, so that one layer of one extent is one contiguous copy. Blocks that a layer keeps in the resident tier have
no place here, and the last extent of a request is as small as the request needs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from longgen.errors import CapacityError
from longgen.kv.layout import KVLayout


@dataclass(frozen=True, slots=True)
class Extent:
    """Blocks [first, stop) of one slot, of all full-attention layers.

    Attributes:
        memory: the uint8 memory that everything below is a view of.
        keys, values: by layer, [kv_heads, tokens, head_dim]; a layer's first token is that of block
            max(first, its resident blocks), and layers without a block here have no entry.
    """

    first: int
    stop: int
    memory: torch.Tensor
    keys: Mapping[int, torch.Tensor]
    values: Mapping[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class HostPiece:
    """Tokens [start, stop) of one layer of one slot, within one extent: k, v [kv_heads, stop - start, head_dim]."""

    start: int
    stop: int
    k: torch.Tensor
    v: torch.Tensor


class HostCache:
    """Extents per slot, and a pool of returned ones."""

    def __init__(
        self,
        layout: KVLayout,
        *,
        slots: int,
        extent_blocks: int,
        resident: Mapping[int, int],
        allocate: Callable[[int], torch.Tensor],
    ) -> None:
        """
        Args:
            extent_blocks: blocks in a full extent.
            resident: blocks of each full-attention layer that live on the device instead.
            allocate: gives uint8 host memory of exactly so many bytes.
        """
        self._layout = layout
        self._extent_blocks = extent_blocks
        self._resident = resident
        self._allocate = allocate
        self._extents: tuple[list[Extent], ...] = tuple([] for _ in range(slots))
        self._pool: list[torch.Tensor] = []

    def grow(self, slot_id: int, tokens: int, planned: int) -> None:
        """Makes sure that blocks for `tokens` tokens exist.

        The last extent is cut so that `planned` tokens fit exactly; beyond the plan, full extents are added.
        Raises CapacityError if there is no such memory.
        """
        extents = self._extents[slot_id]
        needed, planned_blocks = self._layout.blocks_for(tokens), self._layout.blocks_for(planned)
        first = extents[-1].stop if extents else 0
        while first < needed:
            stop = first + self._extent_blocks
            if first < planned_blocks:
                stop = min(stop, planned_blocks)
            extents.append(self._make(first, stop))
            first = stop

    def pieces(self, slot_id: int, layer: int, start: int, stop: int) -> Iterator[HostPiece]:
        """The host places of tokens [start, stop) of one layer, one piece an extent. All must be beyond the
        resident tier and grown."""
        extents = self._extents[slot_id]
        size = self._layout.block_size
        index = bisect_right(extents, start // size, key=lambda extent: extent.first) - 1
        while start < stop:
            extent = extents[index]
            base = max(extent.first, self._resident[layer]) * size
            end = min(stop, extent.stop * size)
            span = slice(start - base, end - base)
            yield HostPiece(start, end, extent.keys[layer][:, span], extent.values[layer][:, span])
            start, index = end, index + 1

    def release(self, slot_id: int) -> None:
        """Returns a slot's extents to the pool. No queue may still use them."""
        self._pool += [extent.memory for extent in self._extents[slot_id] if extent.memory.numel()]
        self._extents[slot_id].clear()

    def scrub(self, slot_id: int) -> None:
        """Overwrites a slot's extents with zeros. No queue may still use them."""
        for extent in self._extents[slot_id]:
            extent.memory.zero_()

    def poison_pool(self, value: float) -> None:
        """Fills the memory of returned extents with `value`, so that a stale read shows."""
        for memory in self._pool:
            memory.view(self._layout.dtype).fill_(value)

    @property
    def nbytes(self) -> int:
        """Host memory held now, the pool included."""
        used = sum(extent.memory.numel() for extents in self._extents for extent in extents)
        return used + sum(memory.numel() for memory in self._pool)

    def _make(self, first: int, stop: int) -> Extent:
        layout = self._layout
        blocks = {layer: stop - max(first, self._resident[layer]) for layer in layout.full_layers}
        blocks = {layer: count for layer, count in blocks.items() if count > 0}
        nbytes = sum(blocks.values()) * layout.block_bytes
        memory = self._take(nbytes)
        flat = memory.view(layout.dtype)
        keys, values, offset = {}, {}, 0
        for layer, count in blocks.items():
            shape = (layout.kv_heads, count * layout.block_size, layout.head_dim)
            size = shape[0] * shape[1] * shape[2]
            keys[layer] = flat[offset : offset + size].view(shape)
            values[layer] = flat[offset + size : offset + 2 * size].view(shape)
            offset += 2 * size
        return Extent(first, stop, memory, keys, values)

    def _take(self, nbytes: int) -> torch.Tensor:
        """The smallest returned piece that is large enough, or new memory.

        Pieces that are too small are let go first, so that requests of different lengths together hold no more than
        the longest of them.
        """
        enough = [index for index, memory in enumerate(self._pool) if memory.numel() >= nbytes > 0]
        if enough:
            return self._pool.pop(min(enough, key=lambda index: self._pool[index].numel()))
        try:
            if nbytes:
                self._pool.clear()
            return self._allocate(nbytes)
        except (RuntimeError, OSError, OverflowError) as error:
            raise CapacityError(
                f"the KV cache holds {self.nbytes:,} bytes of host memory and needs {nbytes:,} more, which cannot be "
                "had: shorten the prompt"
            ) from error
