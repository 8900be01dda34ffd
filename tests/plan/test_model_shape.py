"""Shapes read from configs, against the models that transformers builds of them, and what their passes take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longgen.costs import estimate_activations
from longgen.engine import Engine, EngineOptions
from longgen.model.checkpoint import SUPPORTED_TYPES, random_model, read_config
from longgen.model.provider import Provider
from longgen.model.rope import trained_window
from longgen.model.shape import model_shape
from tests.checkpoints import Build
from tests.plan.live import LiveBytes


@pytest.mark.parametrize("model_type", SUPPORTED_TYPES)
@pytest.mark.parametrize("options", [{}, {"tied": True, "attention_bias": True}])
def test_weights_are_counted_exactly(build: Build, model_type: str, options: dict[str, Any]) -> None:
    config = read_config(build(model_type, **options))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = model_shape(config, "tiny")
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_next", "qwen3_5"])
@pytest.mark.parametrize("slots", [1, 3])
def test_layers_and_states_are_those_of_the_provider(build: Build, model_type: str, slots: int) -> None:
    folder = build(model_type)
    provider = Provider.load(folder, dtype=torch.bfloat16, device=torch.device("cpu"), slots=slots)
    shape = model_shape(read_config(folder), "tiny", "bfloat16")
    assert shape.layers == provider.layer_specs()
    assert (shape.kv_heads, shape.head_dim, shape.vocab) == (provider.kv_heads, provider.head_dim, provider.vocab_size)
    assert shape.trained_window == trained_window(provider.config)
    states = provider._states
    held = 0 if states is None else states.conv.nbytes + states.recurrent.nbytes
    assert shape.state_bytes(slots) == held


def test_sliding_windows_and_yarn_are_read(build: Build) -> None:
    shape = model_shape(read_config(build("qwen2", sliding=True)), "tiny")
    assert shape.kinds == ("window", "full", "window")
    assert shape.window == 48
    assert model_shape(read_config(build("qwen3", yarn=True)), "tiny").trained_window == 32768


# Shapes in which one phase of a layer is much larger than the others: (model type, settings).
PHASES = {
    "norm": ("qwen3", {"hidden_size": 512}),
    "attention": ("qwen3", {"head_dim": 256}),
    "gated attention": ("qwen3_5_text", {"head_dim": 256, "linear_num_value_heads": 2}),
    "mlp": ("qwen3", {"intermediate_size": 1024}),
    "wide experts": ("qwen3_moe", {"moe_intermediate_size": 512}),
    "many experts": ("qwen3_moe", {"hidden_size": 256, "num_experts_per_tok": 8}),
    "shared expert": ("qwen2_moe", {"shared_expert_intermediate_size": 1024}),
    "delta rule": ("qwen3_5_text", {"linear_num_value_heads": 16, "linear_num_key_heads": 8}),
}
TOKENS = 512


@pytest.mark.parametrize("phase", PHASES)
def test_activations_are_estimated_as_they_are(phase: str) -> None:
    kind, settings = PHASES[phase]
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    delta = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"],
    }
    config = AutoConfig.for_model(
        kind,
        **{
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            **(experts if "moe" in kind else {}),
            **(delta if kind.startswith("qwen3_5") else {}),
            **settings,
        },
    )
    model = random_model(config, torch.bfloat16, torch.device("cpu"))
    engine = Engine.over(Provider(model, config), EngineOptions(device="cpu", block_size=64, chunk_size=TOKENS))
    engine.close()  # so that no other thread, whose tensors are not counted, makes a part of the host cache
    with LiveBytes() as live:
        engine.prefill([token % 128 for token in range(2 * TOKENS)])
    taken = live.peak - engine.store.host_bytes  # on the CPU the host cache is made of such tensors too
    # Releases of transformers differ by some tensors; too little is worse than too much.
    assert 0.9 * taken <= estimate_activations(model_shape(config, phase, "bfloat16")).bytes(TOKENS) <= 1.2 * taken
