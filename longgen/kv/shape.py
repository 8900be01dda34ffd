"""The arithmetic of a KV cache's shape, without torch: the planner and the store count the same bytes."""

from __future__ import annotations

from dataclasses import dataclass

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
class KVShape:
    """What one token's K and V take, and how tokens are grouped into blocks.

    Attributes:
        layers: the attention layers, in model order.
        kv_heads, head_dim: shape of one token's K (and V) in one layer.
        element_bytes: bytes of one number of K or V.
        block_size: tokens of one layer in a block, the unit of placement and selection.
    """

    layers: tuple[AttentionLayer, ...]
    kv_heads: int
    head_dim: int
    element_bytes: int
    block_size: int

    def __post_init__(self) -> None:
        check_block(self.block_size)

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
        return 2 * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def cached_token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers that keep every token: what a longer prompt costs."""
        return len(self.full_layers) * self.token_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of one block of one layer."""
        return self.block_size * self.token_bytes

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)


def check_block(block_size: int) -> None:
    """Raises UsageError for a block that holds no token."""
    if block_size < 1:
        raise UsageError(f"block size {block_size} is not a positive number of tokens")
