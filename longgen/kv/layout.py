"""The shape of a model's KV cache: which layers, how large, in what units."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longgen.errors import UsageError


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention layer of the model.

    Attributes:
        index: layer index in the model (recurrent layers are counted, but have no entry here).
        window: keys a query sees, itself included (sliding-window attention); None: every earlier key.
    """

    index: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one token's KV looks like, and how tokens are grouped into blocks.

    Attributes:
        layers: the attention layers, in model order.
        kv_heads, head_dim: shape of one token's K (and V) in one layer.
        dtype: of K and V.
        block_size: tokens of one layer in a block, the unit of placement and selection.
    """

    layers: tuple[AttentionLayer, ...]
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise UsageError(f"block size {self.block_size} is not a positive number of tokens")

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Model indices of the layers that attend to every earlier token: the ones whose KV lives in blocks."""
        return tuple(layer.index for layer in self.layers if layer.window is None)

    @property
    def window_layers(self) -> tuple[AttentionLayer, ...]:
        """The sliding-window layers: their last tokens stay on the device."""
        return tuple(layer for layer in self.layers if layer.window is not None)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of one block of one layer."""
        return self.block_size * self.token_bytes

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)
