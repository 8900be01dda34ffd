"""The shape of a model's KV cache: which layers, how large, of what type, in what units."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from longgen.kv.shape import AttentionLayer, KVShape

__all__ = ["AttentionLayer", "KVLayout"]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one token's KV looks like, and how tokens are grouped into blocks: a KVShape whose numbers have a type.

    Attributes:
        layers: the attention layers, in model order.
        kv_heads, head_dim: shape of one token's K (and V) in one layer.
        dtype: of K and V.
        block_size: tokens of one layer in a block, the unit of placement and selection.
        shape: the same without torch, for arithmetic.
    """

    layers: tuple[AttentionLayer, ...]
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int
    shape: KVShape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shape = KVShape(self.layers, self.kv_heads, self.head_dim, self.dtype.itemsize, self.block_size)
        object.__setattr__(self, "shape", shape)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """See KVShape.full_layers."""
        return self.shape.full_layers

    @property
    def window_layers(self) -> tuple[AttentionLayer, ...]:
        """See KVShape.window_layers."""
        return self.shape.window_layers

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return self.shape.token_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of one block of one layer."""
        return self.shape.block_bytes

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that hold `tokens` tokens."""
        return self.shape.blocks_for(tokens)
