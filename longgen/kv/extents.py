"""How a request's host blocks are cut into extents, and extents into pieces of memory. Arithmetic, without torch.

An extent is a run of consecutive blocks of every full-attention layer. A piece is the memory of some whole layers of
one extent, K and V: it is registered with CUDA as one, so no copy, which is of one layer of one extent, spans two
registrations. Which layers share a piece is the same in every extent, so a piece of a full extent fits every other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from longgen.kv.shape import KVShape
from longgen.kv.sizes import StoreSizes

PIECE_BYTES = 128 << 20  # a registration holds locks of the driver, for about 30 ms at this size


@dataclass(frozen=True, slots=True)
class PieceShape:
    """One piece of an extent.

    Attributes:
        group: number of its layers' group: pieces of one group are alike but for their number of blocks.
        blocks: blocks of each of its layers, in model order.
        nbytes: of K and V of all of them.
    """

    group: int
    blocks: Mapping[int, int]
    nbytes: int


@dataclass(frozen=True, slots=True)
class ExtentShape:
    """Blocks [first, stop) of a slot. pieces: none where all of them are resident."""

    first: int
    stop: int
    pieces: tuple[PieceShape, ...]


class ExtentCutter:
    """Cuts the blocks of requests into extents."""

    def __init__(self, shape: KVShape, sizes: StoreSizes) -> None:
        self._shape = shape
        self._extent_blocks = sizes.run_blocks
        self._resident = sizes.resident_by_layer(shape)
        most = max(1, PIECE_BYTES // (sizes.run_blocks * shape.block_bytes))  # layers in a piece
        layers = shape.full_layers
        self.groups = tuple(layers[start : start + most] for start in range(0, len(layers), most))

    def extents(self, first: int, stop: int, planned: int) -> Iterator[ExtentShape]:
        """Extents from block `first` on, until all blocks before `stop` are in one.

        The last extent of a request announced with `planned` blocks ends with it; beyond it extents are full.
        """
        while first < stop:
            end = first + self._extent_blocks
            if first < planned:
                end = min(end, planned)
            yield ExtentShape(first, end, tuple(self._pieces(first, end)))
            first = end

    def piece_bytes(self, tokens: int) -> Iterator[int]:
        """Bytes of every piece of a request of `tokens` tokens, in the order in which it needs them."""
        blocks = self._shape.blocks_for(tokens)
        return (piece.nbytes for extent in self.extents(0, blocks, blocks) for piece in extent.pieces)

    def _pieces(self, first: int, stop: int) -> Iterator[PieceShape]:
        for group, layers in enumerate(self.groups):
            counts = {layer: stop - max(first, self._resident[layer]) for layer in layers}
            blocks = {layer: count for layer, count in counts.items() if count > 0}
            if blocks:
                yield PieceShape(group, blocks, sum(blocks.values()) * self._shape.block_bytes)
