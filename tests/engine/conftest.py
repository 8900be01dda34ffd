from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoints import reference_logits

Reference = Callable[[Path, torch.Tensor], torch.Tensor]


@pytest.fixture(scope="session")
def reference() -> Reference:
    """`reference_logits`, computed once for each checkpoint and prompt."""
    known: dict[tuple[Path, tuple[int, ...]], torch.Tensor] = {}

    def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
        key = (folder, tuple(ids[0].tolist()))
        if key not in known:
            known[key] = reference_logits(folder, ids)
        return known[key]

    return logits
