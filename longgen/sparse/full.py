"""Full attention: every block, always. The default, and exact."""

from __future__ import annotations

import torch

from longgen.sparse.base import AvailableBlocks, BlockSelection, Phase, SparsePolicy


class FullAttentionPolicy(SparsePolicy):
    """Selects all blocks; needs no query, so its loads run ahead across layers."""

    def select_blocks(
        self,
        layer: int,
        phase: Phase,
        query: torch.Tensor | None,
        available: AvailableBlocks,
    ) -> BlockSelection:
        return BlockSelection.everything(available)
