"""Rotary angles: transformers' at short positions, exact at long ones."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longgen.errors import CheckpointError
from longgen.model.rope import ExactRotary, check_rope

CPU = torch.device("cpu")
TWO_PI = 2 * Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")
LONG = (4_000_000, 16_777_216, 16_777_217)


def text_config(model_type: str = "qwen3", **rope: Any) -> Any:
    parameters = {"rope_type": "default", "rope_theta": 1_000_000.0} | rope
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    if model_type == "qwen3_next" or "moe" in model_type:
        sizes |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    return AutoConfig.for_model(model_type, head_dim=64, vocab_size=8, rope_parameters=parameters, **sizes)


def library_rotary(config: Any) -> torch.nn.Module:
    return AutoModelForCausalLM.from_config(config).get_submodule("model.rotary_emb")


def exact_angles(theta: int, dim: int, position: int) -> list[float]:
    """Angles of all pairs at a position, reduced to one turn, computed with 60 decimal digits."""
    with localcontext() as context:
        context.prec = 60
        return [float(position * Decimal(theta) ** (Decimal(-2 * i) / dim) % TWO_PI) for i in range(dim // 2)]


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe", "qwen3_next", "qwen3_5_text"])
@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "truncate": False},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512, "attention_factor": 1.25},
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
            "mscale": 0.7,
            "mscale_all_dim": 0.5,
            "beta_fast": 16,
            "beta_slow": 2,
        },
    ],
)
def test_equals_transformers_at_short_positions(model_type: str, rope: dict[str, Any]) -> None:
    config = text_config(model_type, **rope)
    positions = torch.arange(512)[None]
    library = library_rotary(config)
    asked = positions.expand(3, 1, -1) if model_type == "qwen3_5_text" else positions
    for mine, theirs in zip(ExactRotary(config, CPU)(torch.ones(1), asked), library(torch.ones(1), asked), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


def test_part_of_a_head_is_turned_only_by_models_that_can() -> None:
    with pytest.raises(
        CheckpointError, match=r"partial_rotary_factor is 0\.5 .* models of type qwen3 turn whole heads"
    ):
        check_rope(text_config("qwen3", partial_rotary_factor=0.5))


def test_partial_rotary_turns_only_a_part_of_the_head() -> None:
    config = text_config("qwen3_next", partial_rotary_factor=0.25)
    cos, _ = ExactRotary(config, CPU)(torch.ones(1), torch.arange(4)[None])
    assert cos.shape == (1, 4, 16)


@pytest.mark.parametrize("position", LONG)
def test_angles_are_exact_at_long_positions(position: int) -> None:
    cos, sin = ExactRotary(text_config(), CPU)(torch.ones(1, dtype=torch.float64), torch.tensor([[position]]))
    angles = exact_angles(1_000_000, 64, position) * 2
    torch.testing.assert_close(cos[0, 0], torch.tensor([math.cos(a) for a in angles]).double(), atol=5e-8, rtol=0)
    assert max(abs(s - math.sin(a)) for s, a in zip(sin[0, 0].tolist(), angles, strict=True)) < 1e-8


@pytest.mark.parametrize("position", LONG[:2])
def test_float32_angles_would_be_wrong_there(position: int) -> None:
    cos, _ = library_rotary(text_config())(torch.ones(1), torch.tensor([[position]]))
    angles = exact_angles(1_000_000, 64, position) * 2
    assert max(abs(c - math.cos(a)) for c, a in zip(cos[0, 0].tolist(), angles, strict=True)) > 0.02


def test_neighbours_above_two_to_the_24_are_told_apart() -> None:
    positions = torch.tensor([[2**24, 2**24 + 1]])
    mine, _ = ExactRotary(text_config(), CPU)(torch.ones(1), positions)
    theirs, _ = library_rotary(text_config())(torch.ones(1), positions)
    assert torch.equal(theirs[0, 0], theirs[0, 1])
    assert (mine[0, 0] - mine[0, 1]).abs().max() > 0.1


def test_casting_the_model_does_not_round_the_frequencies() -> None:
    rotary = ExactRotary(text_config(), CPU)
    rotary.to(torch.bfloat16)
    assert rotary.inv_freq.dtype == torch.float64
    cos, _ = rotary(torch.ones(1, dtype=torch.bfloat16), torch.tensor([[4_000_000]]))
    assert cos.dtype == torch.bfloat16


def test_multimodal_positions_turn_the_pairs_of_their_axis() -> None:
    config = text_config("qwen3_5_text", mrope_section=[4, 2, 2], partial_rotary_factor=0.25)
    positions = torch.stack([torch.full((1, 3), axis * 100) + torch.arange(3) for axis in (1, 2, 3)])
    mine = ExactRotary(config, CPU)(torch.ones(1), positions)
    with_text = ExactRotary(config, CPU)(torch.ones(1), torch.cat((positions[:1] * 0, positions)))
    for got, again, theirs in zip(mine, with_text, library_rotary(config)(torch.ones(1), positions), strict=True):
        torch.testing.assert_close(got, theirs, atol=1e-4, rtol=0)
        assert torch.equal(got, again)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "llama3", "something"])
def test_other_rope_types_are_refused_by_name(kind: str) -> None:
    config = text_config()
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(CheckpointError, match=kind):
        check_rope(config)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaling_without_a_factor_is_refused(kind: str) -> None:
    config = text_config()
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "original_max_position_embeddings": 1024}
    with pytest.raises(CheckpointError, match=f"rope type '{kind}' needs a factor"):
        check_rope(config)
