"""The host's part of the KV cache: blocks in extents that grow with the request.

An extent holds a run of consecutive blocks of every layer, K and V apart, in pieces of some whole layers each
(`extents.py`). Inside a piece the order is layer, KV head, token, head size, so that one layer of one extent is one
contiguous copy. Blocks that a layer keeps in the resident tier have no place here, and the last extent of a request is
as small as the request needs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from longgen.errors import CapacityError
from longgen.kv.extents import ExtentCutter, ExtentShape, PieceShape
from longgen.kv.layout import KVLayout
from longgen.kv.sizes import StoreSizes
from longgen.kv.supply import HostSupply, Piece


@dataclass(frozen=True, slots=True)
class Extent:
    """Blocks of one slot, of all full-attention layers.

    Attributes:
        shape: which blocks, and in which pieces.
        memories: uint8 memory of each piece, which everything below is a view of.
        keys, values: by layer, [kv_heads, tokens, head_dim]; a layer's first token is that of block
            max(first, its resident blocks), and layers without a block here have no entry.
    """

    shape: ExtentShape
    memories: tuple[torch.Tensor, ...]
    keys: Mapping[int, torch.Tensor]
    values: Mapping[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ComingExtent:
    """An extent that a request will need, and its pieces on their way."""

    shape: ExtentShape
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class HostPiece:
    """Tokens [start, stop) of one layer of one slot, within one extent: k, v [kv_heads, stop - start, head_dim]."""

    start: int
    stop: int
    k: torch.Tensor
    v: torch.Tensor


class HostCache:
    """Extents per slot, those on their way, and a pool of returned pieces by group of layers.

    Requests of different lengths, one after another, together hold no more than the longest of them: a request takes
    from the pool first, and what is too small for it is let go before more is made.
    """

    def __init__(self, layout: KVLayout, sizes: StoreSizes, supply: HostSupply) -> None:
        self._layout, self._supply = layout, supply
        self._resident = sizes.resident_by_layer(layout.shape)
        self._cutter = ExtentCutter(layout.shape, sizes)
        self._extents: tuple[list[Extent], ...] = tuple([] for _ in range(sizes.slots))
        self._coming: tuple[deque[ComingExtent], ...] = tuple(deque() for _ in range(sizes.slots))
        self._planned = [0] * sizes.slots  # blocks that each slot's request was announced with
        self._pool: tuple[list[torch.Tensor], ...] = tuple([] for _ in self._cutter.groups)

    def announce(self, slot_id: int, tokens: int) -> None:
        """Says how many tokens a slot's request will have in all, and has the memory for them made in the background.

        The last extent is cut so that they fit exactly.
        """
        self._recall(slot_id)
        self._planned[slot_id] = self._layout.blocks_for(tokens)
        self._order(slot_id, self._planned[slot_id])

    def grow(self, slot_id: int, tokens: int) -> None:
        """Makes sure that blocks for `tokens` tokens exist; waits only for pieces that are not ready.

        Beyond what was announced, full extents are added. Raises CapacityError if there is no such memory, also where
        it is only needed later in the request.
        """
        coming, needed = self._coming[slot_id], self._layout.blocks_for(tokens)
        try:
            self._supply.collect([piece for piece in self._pieces_ahead(slot_id) if piece.error is not None])
            while self._end(slot_id) < needed:
                if not coming:
                    self._order(slot_id, needed)
                memories = self._supply.collect(coming[0].pieces)
                self._extents[slot_id].append(self._make(coming.popleft().shape, memories))
        except (RuntimeError, OSError, OverflowError, MemoryError) as error:
            raise self._shortage(slot_id) from error

    def pieces(self, slot_id: int, layer: int, start: int, stop: int) -> Iterator[HostPiece]:
        """The host places of tokens [start, stop) of one layer, one piece an extent. All must be beyond the
        resident tier and grown."""
        extents = self._extents[slot_id]
        size = self._layout.block_size
        index = bisect_right(extents, start // size, key=lambda extent: extent.shape.first) - 1
        while start < stop:
            extent = extents[index]
            base = max(extent.shape.first, self._resident[layer]) * size
            end = min(stop, extent.shape.stop * size)
            span = slice(start - base, end - base)
            yield HostPiece(start, end, extent.keys[layer][:, span], extent.values[layer][:, span])
            start, index = end, index + 1

    def release(self, slot_id: int, *, scrub: bool = False) -> None:
        """Returns a slot's extents to the pool, and those on their way. No queue may still use them.

        scrub: as zeros. What is only on its way was never written.
        """
        self._planned[slot_id] = 0
        self._recall(slot_id)
        extents = self._extents[slot_id]
        while extents:
            extent = extents.pop()  # first of all: memory must not come to the pool twice, whatever interrupts this
            if scrub:
                for memory in extent.memories:
                    memory.zero_()
            self._return(extent.shape.pieces, extent.memories)

    def poison_pool(self, value: float) -> None:
        """Fills the memory of returned extents with `value`, so that a stale read shows."""
        for memory in self.pool():
            memory.view(self._layout.dtype).fill_(value)

    def pool(self) -> list[torch.Tensor]:
        """The memory of returned extents, uint8."""
        return [memory for memories in self._pool for memory in memories]

    @property
    def nbytes(self) -> int:
        """Host memory held now: in use, made ahead, and in the pool."""
        slots = sum(self.slot_bytes(slot_id) for slot_id in range(len(self._extents)))
        return slots + sum(memory.numel() for memory in self.pool()) + self._supply.prepared_bytes

    def slot_bytes(self, slot_id: int) -> int:
        """Host memory of one slot: its extents, and what is made ahead for it."""
        used = [memory for extent in self._extents[slot_id] for memory in extent.memories]
        ahead = [piece.memory for piece in self._pieces_ahead(slot_id)]
        return sum(memory.numel() for memory in (*used, *ahead) if memory is not None)

    def _end(self, slot_id: int) -> int:
        """The first block that no extent of the slot holds."""
        extents = self._extents[slot_id]
        return extents[-1].shape.stop if extents else 0

    def _order(self, slot_id: int, stop: int) -> None:
        """Finds memory for the slot's blocks up to `stop`: of the pool, else to be made. Nothing may be coming yet."""
        shapes = list(self._cutter.extents(self._end(slot_id), stop, self._planned[slot_id]))
        wanted = [piece for shape in shapes for piece in shape.pieces]
        found = [self._from_pool(piece) for piece in wanted]
        missing = [piece for piece, memory in zip(wanted, found, strict=True) if memory is None]
        for group in {piece.group for piece in missing}:
            self._pool[group].clear()
        made = iter(self._supply.order([piece.nbytes for piece in missing]))
        pieces = iter([next(made) if memory is None else Piece(memory.numel(), memory) for memory in found])
        self._coming[slot_id].extend(ComingExtent(shape, tuple(next(pieces) for _ in shape.pieces)) for shape in shapes)

    def _from_pool(self, piece: PieceShape) -> torch.Tensor | None:
        """The smallest returned piece of the group that is large enough."""
        pool = self._pool[piece.group]
        enough = [index for index, memory in enumerate(pool) if memory.numel() >= piece.nbytes]
        return pool.pop(min(enough, key=lambda index: pool[index].numel())) if enough else None

    def _recall(self, slot_id: int) -> None:
        """Ends what is being made for a slot; what is made already goes to the pool."""
        made = set(self._supply.cancel(self._pieces_ahead(slot_id)))
        while self._coming[slot_id]:
            coming = self._coming[slot_id].popleft()
            for shape, piece in zip(coming.shape.pieces, coming.pieces, strict=True):
                if piece in made and piece.memory is not None:
                    self._return([shape], [piece.memory])

    def _return(self, shapes: Sequence[PieceShape], memories: Sequence[torch.Tensor]) -> None:
        for shape, memory in zip(shapes, memories, strict=True):
            self._pool[shape.group].append(memory)

    def _pieces_ahead(self, slot_id: int) -> list[Piece]:
        # A copy, made in one step: whoever reads figures may do so while another thread grows the slot.
        return [piece for coming in tuple(self._coming[slot_id]) for piece in coming.pieces]

    def _shortage(self, slot_id: int) -> CapacityError:
        """What to raise where some piece could not be made; nothing is on its way to the slot after it."""
        pieces = self._pieces_ahead(slot_id)
        self._supply.cancel(pieces)
        held, needed = self.nbytes, sum(piece.nbytes for piece in pieces if piece.memory is None)
        self._recall(slot_id)
        return CapacityError(
            f"the KV cache holds {held:,} bytes of host memory and needs {needed:,} more, which cannot be had: shorten "
            "the prompt"
        )

    def _make(self, shape: ExtentShape, memories: Sequence[torch.Tensor]) -> Extent:
        layout = self._layout
        keys, values = {}, {}
        for piece, memory in zip(shape.pieces, memories, strict=True):
            flat, offset = memory.view(layout.dtype), 0
            for layer, count in piece.blocks.items():
                view = (layout.kv_heads, count * layout.block_size, layout.head_dim)
                size = view[0] * view[1] * view[2]
                keys[layer] = flat[offset : offset + size].view(view)
                values[layer] = flat[offset + size : offset + 2 * size].view(view)
                offset += 2 * size
        return Extent(shape, tuple(memories), keys, values)
