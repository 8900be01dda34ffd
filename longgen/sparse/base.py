"""The interface of sparse attention: a policy selects blocks, the store moves and reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

import torch


class Phase(Enum):
    """What a pass does: PREFILL takes a chunk of the prompt, DECODE a token (or a few) of each slot."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class AvailableBlocks:
    """The complete blocks of one slot's past that a layer could read: block 0 to `count` - 1.

    The open block (the incomplete last one) and the pass's own tokens are always read and never offered.
    """

    slot_id: int
    count: int


@dataclass(frozen=True, slots=True)
class BlockSelection:
    """Blocks to read, each at most once, in any order.

    Attributes:
        blocks: block indices. A range or int64 tensor [n]: the same for every KV head; an int64 tensor
            [kv_heads, n]: each KV head its own.
    """

    blocks: range | torch.Tensor

    @classmethod
    def everything(cls, available: AvailableBlocks) -> BlockSelection:
        """All available blocks, in order."""
        return cls(range(available.count))


class SparsePolicy(ABC):
    """Chooses the blocks that each full-attention layer reads. Sliding-window layers read their window and never ask.

    A policy that keeps data about blocks fills it in `on_block_written`, by (slot, layer, block), and forgets a slot in
    `reset`.
    """

    supports_prefill: bool = True
    supports_decode: bool = True

    @property
    def watches_blocks(self) -> bool:
        """Whether the policy has an `on_block_written` of its own; blocks are not prepared for one that has not."""
        return type(self).on_block_written is not SparsePolicy.on_block_written

    def needs_query(self, layer: int, phase: Phase) -> bool:
        """Whether select_blocks wants the layer's queries. If not, loads are planned before the layer runs."""
        return False

    def on_block_written(  # noqa: B027
        self, slot_id: int, layer: int, block: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Sees every complete block once its K and V, [kv_heads, block_size, head_dim], are known.

        Called for offloaded, resident and decoded blocks alike, on the compute queue; the tensors are views that are
        valid during the call only. A block rewritten after an aborted pass or a truncation is seen again: the last
        call counts.
        """

    @abstractmethod
    def select_blocks(
        self, layer: int, phase: Phase, query: torch.Tensor | None, available: AvailableBlocks
    ) -> BlockSelection:
        """The blocks that `layer` reads in this pass.

        Args:
            query: [q_heads, n, head_dim] with rotary applied where needs_query says so, else None.
        """

    def reset(self, slot_id: int) -> None:  # noqa: B027
        """Forgets everything about a slot."""
