"""The models the figures are for: shapes of Qwen3-0.6B and Qwen2.5-7B with random weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from gpucheck.report import Settings
from longgen.benchmarking import measuring
from longgen.engine import Engine, EngineOptions
from longgen.model.from_shape import random_provider
from longgen.model.provider import Provider
from longgen.model_shape import ModelShape
from longgen.names import find_known

NEW_TOKENS = 16
SMALL_VOCAB = 320


def usual_shape(small: bool) -> ModelShape:
    """Of Qwen3-0.6B: 28 layers, 16 query and 8 KV heads of 128, head and embedding tied."""
    return _shape("qwen3-0.6b", small, hidden=64, head_dim=16)


def larger_shape(small: bool) -> ModelShape:
    """Of Qwen2.5-7B: 28 layers, 28 query and 4 KV heads of 128, head and embedding apart."""
    return _shape("qwen2.5-7b-1m", small, hidden=112, head_dim=4)


def _shape(name: str, small: bool, *, hidden: int, head_dim: int) -> ModelShape:
    """The model's shape; small, one with its heads and little else."""
    known = find_known(name)
    assert known is not None
    shape = replace(known.shape, trained_window=1 << 20)
    if not small:
        return shape
    return replace(shape, kinds=shape.kinds[:2], hidden=hidden, head_dim=head_dim, mlp=96, vocab=SMALL_VOCAB)


def make_provider(settings: Settings, shape: ModelShape | None = None) -> Provider:
    """A model in bf16, made on the device; `shape` None is that of Qwen3-0.6B."""
    return random_provider(shape or usual_shape(settings.small), settings.device)


def open_engine(
    provider: Provider,
    settings: Settings,
    *,
    resident_blocks: int = 0,
    slots: int = 1,
    ring_blocks: int | None = None,
) -> Engine:
    """Chunks of 8192, blocks of 1024, four ring entries of `ring_blocks` blocks, None: 16 (--small: chunks of 64,
    blocks of 16, entries of 2)."""
    return Engine.over(
        provider,
        EngineOptions(
            block_size=16 if settings.small else 1024,
            chunk_size=64 if settings.small else 8192,
            resident_blocks=resident_blocks,
            ring_entries=4,
            ring_blocks=ring_blocks or (2 if settings.small else 16),
            slots=slots,
        ),
    )


def random_prompt(count: int) -> torch.Tensor:
    """Token ids that every vocabulary here has."""
    return measuring.random_prompt(count, SMALL_VOCAB)
