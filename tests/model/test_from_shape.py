"""Models made of a shape alone are models of exactly that shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longgen.engine import Engine, EngineOptions
from longgen.errors import UsageError
from longgen.model.from_shape import random_provider, text_config
from longgen.model.shape import model_shape
from longgen.model_shape import FULL, RECURRENT, WINDOW, DeltaRule, Experts, ModelShape
from longgen.names import known_models

TINY = ModelShape("tiny", (FULL,) * 2, 64, 320, 96, 4, 2, 16, 32768, dtype="float32")
DELTA = DeltaRule(2, 4, 16, 16, 4)
EXPERTS = Experts(4, 2, 32, 32)
HYBRID: dict[str, Any] = {"kinds": (RECURRENT, FULL), "delta": DELTA, "gated": True}
QWEN2: dict[str, Any] = {"query_norm": False, "qkv_bias": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {**QWEN2, "kinds": (FULL, WINDOW), "window": 48},
    "qwen2_moe": {**QWEN2, "experts": EXPERTS},
    "qwen3": {"tied": True, "qkv_bias": True, "output_bias": True},
    "qwen3_moe": {"experts": replace(EXPERTS, shared_width=0, dense_layers=(0,))},
    "qwen3_next": {**HYBRID, "experts": EXPERTS},
    "qwen3_5": HYBRID,
    "qwen3_5_moe": {**HYBRID, "experts": EXPERTS, "mlp": 0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_made_and_runs(family: str) -> None:
    shape = replace(TINY, family=family, **FAMILIES[family])
    assert model_shape(text_config(shape), "tiny", "float32") == shape
    provider = random_provider(shape, torch.device("cpu"))
    assert sum(weight.numel() for weight in provider.model.parameters()) == shape.parameters
    engine = Engine.over(provider, EngineOptions(block_size=16, chunk_size=64, ring_blocks=2))
    logits = engine.prefill(list(range(100)), new_tokens=1)
    assert bool(logits.isfinite().all()) and bool(engine.decode_step(3).isfinite().all())


@pytest.mark.parametrize("shape", [model.shape for model in known_models()], ids=lambda shape: shape.name)
def test_known_shapes_can_be_made(shape: ModelShape) -> None:
    assert model_shape(text_config(shape), shape.name, shape.dtype) == shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "llama"}, "family 'llama' of the shape tiny is not supported"),
        ({"kinds": (FULL, WINDOW), "window": 48, "family": "qwen3_moe", "experts": EXPERTS}, "no qwen3_moe model"),
        ({"query_norm": False}, "its query_norm would be True, not False"),
        ({"q_heads": 3}, "no qwen3 model can be made of the shape tiny: num_attention_heads is 3"),
    ],
)
def test_shapes_that_no_model_has_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        text_config(replace(TINY, **changes))
