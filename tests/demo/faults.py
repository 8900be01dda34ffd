"""Faults of a KV cache, put into a store's host blocks: each does to a block what a bug would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from longgen.engine import Engine
from longgen.kv.host_cache import HostPiece

SLOT = 0


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """K and V of one block in several layers, by layer: [kv_heads, block_size, head_dim] each."""

    keys: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]


def places(engine: Engine, block: int, layers: tuple[int, ...] | None = None) -> dict[int, HostPiece]:
    """Where the host keeps a complete block, by layer: views, so that what is written to them is read by attention.

    `layers` None: every layer. No load or offload may be under way.
    """
    store = engine.store
    store.transfer.drain()
    size = store.layout.block_size
    if not 0 <= block < store.length(SLOT) // size:
        raise ValueError(f"block {block} is not a complete one of {store.length(SLOT)} tokens")
    found = {}
    for layer in layers or store.layout.full_layers:
        (found[layer],) = store._parts.host.pieces(SLOT, layer, block * size, (block + 1) * size)
    return found


def copy_of(engine: Engine, block: int) -> BlockCopy:
    """The block as it is now, in every layer."""
    pieces = places(engine, block)
    return BlockCopy(
        {layer: piece.k.clone() for layer, piece in pieces.items()},
        {layer: piece.v.clone() for layer, piece in pieces.items()},
    )


def put(engine: Engine, block: int, copy: BlockCopy) -> None:
    """Writes a copy over a block, in the copy's layers."""
    for layer, piece in places(engine, block, tuple(copy.keys)).items():
        piece.k.copy_(copy.keys[layer])
        piece.v.copy_(copy.values[layer])


@contextmanager
def undone(engine: Engine, *blocks: int) -> Iterator[None]:
    """Takes back on leaving whatever was done to the blocks."""
    before = {block: copy_of(engine, block) for block in blocks}
    try:
        yield
    finally:
        for block, copy in before.items():
            put(engine, block, copy)


def zero(engine: Engine, block: int, layers: tuple[int, ...] | None = None) -> None:
    """The block never arrived."""
    for piece in places(engine, block, layers).values():
        piece.k.zero_()
        piece.v.zero_()


def overwrite(engine: Engine, block: int, other: int) -> None:
    """Another block stands in its place."""
    put(engine, block, copy_of(engine, other))


def exchange_values(engine: Engine, block: int, other: int) -> None:
    """The V of two blocks are exchanged, their K are not."""
    mine, others = copy_of(engine, block), copy_of(engine, other)
    put(engine, block, BlockCopy(mine.keys, others.values))
    put(engine, other, BlockCopy(others.keys, mine.values))


def shift_keys(engine: Engine, block: int, layers: tuple[int, ...] | None = None) -> None:
    """Every key stands one token too late; the last one comes first."""
    for piece in places(engine, block, layers).values():
        piece.k.copy_(piece.k.roll(1, dims=1))


def rotate_keys(engine: Engine, block: int, layers: tuple[int, ...] | None = None) -> None:
    """Every key is rotated as if it stood one position later."""
    for piece in places(engine, block, layers).values():
        one = torch.ones(1, 1, dtype=torch.int64)
        cos, sin = engine.provider.model.model.rotary_emb(piece.k.float(), one)
        half = piece.k.shape[-1] // 2
        keys = piece.k.float()
        turned = torch.cat((-keys[..., half:], keys[..., :half]), dim=-1)
        piece.k.copy_(keys * cos[0] + turned * sin[0])
