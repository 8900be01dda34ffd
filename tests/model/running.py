"""Feeding a Provider in chunks through the plain store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from longgen.model.provider import Provider
from tests.plain_pass import PlainStore


def load(folder: Path, *, slots: int = 1) -> tuple[Provider, PlainStore]:
    provider = Provider.load(folder, dtype=torch.float32, device=torch.device("cpu"), slots=slots)
    return provider, PlainStore(provider.layer_specs())


def feed(
    provider: Provider, store: PlainStore, ids: torch.Tensor, chunks: Sequence[int], *, slot: int = 0
) -> torch.Tensor:
    """Runs ids [1, n] after what the slot holds, in chunks that add up to n, and commits: logits [1, n, vocab]."""
    logits = []
    for chunk in ids.split(list(chunks), dim=1):
        start, count = store.length.get(slot, 0), chunk.shape[1]
        pass_ = store.begin([(slot, count)])
        positions = torch.arange(start, start + count)[None]
        logits.append(provider.forward(pass_, chunk, positions, keep=count))
        pass_.commit()
    return torch.cat(logits, dim=1)
