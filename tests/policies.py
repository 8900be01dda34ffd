"""Sparse policies that several tests use."""

from __future__ import annotations

import torch

from longgen.sparse.base import AvailableBlocks, BlockSelection, Phase, SparsePolicy


class WithoutBlock(SparsePolicy):
    """All blocks but one."""

    def __init__(self, block: int) -> None:
        self.block = block

    def select_blocks(
        self, layer: int, phase: Phase, query: torch.Tensor | None, available: AvailableBlocks
    ) -> BlockSelection:
        return BlockSelection(torch.tensor([b for b in range(available.count) if b != self.block], dtype=torch.int64))
