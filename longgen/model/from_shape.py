"""A ModelShape as a transformers text config, so that a model of random weights can be made without a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig

from longgen.errors import UsageError
from longgen.model.checkpoint import SUPPORTED_TYPES, TEXT_TYPES, VISION_TYPES, random_model
from longgen.model.provider import Provider
from longgen.model.shape import model_shape
from longgen.model.text_config import check_shape
from longgen.model_shape import FULL, RECURRENT, WINDOW, ModelShape

_KINDS = ((FULL, "full_attention"), (WINDOW, "sliding_attention"), (RECURRENT, "linear_attention"))


def random_provider(shape: ModelShape, device: torch.device) -> Provider:
    """A model of this shape whose weights are random, made on `device`. Raises UsageError as `text_config`."""
    config = text_config(shape)
    torch.manual_seed(0)
    return Provider(random_model(config, getattr(torch, shape.dtype), device), config)


def text_config(shape: ModelShape) -> Any:
    """The config of a model with this shape: `model_shape` reads the same shape back from it.

    Raises UsageError for a family that is not supported, and a shape that models of its family cannot have.
    """
    kind = _model_type(shape)
    try:
        config = AutoConfig.for_model(kind, **_common(shape), **_layers(shape), **_experts(shape), **_delta(shape))
        check_shape(config)
        made = model_shape(config, shape.name, shape.dtype)
    # Each library refuses what it does not like with errors of its own, some of them in several lines.
    except Exception as error:
        why = " ".join(str(error).split())
        raise UsageError(f"no {kind} model can be made of the shape {shape.name}: {why}") from None
    differing = [name for name in ModelShape.__slots__ if getattr(made, name) != getattr(shape, name)]
    if differing:
        was, wanted = getattr(made, differing[0]), getattr(shape, differing[0])
        raise UsageError(
            f"no {kind} model can be made of the shape {shape.name}: its {differing[0]} would be {was}, not {wanted}"
        )
    return config


def _model_type(shape: ModelShape) -> str:
    kind = VISION_TYPES.get(shape.family, shape.family)
    if kind in TEXT_TYPES:
        return kind
    supported = ", ".join(SUPPORTED_TYPES)
    raise UsageError(f"family {shape.family!r} of the shape {shape.name} is not supported; supported are {supported}")


def _common(shape: ModelShape) -> dict[str, Any]:
    own_bias = {} if shape.family.startswith("qwen2") else {"attention_bias": shape.output_bias}
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": len(shape.kinds),
        "num_attention_heads": shape.q_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.trained_window,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **own_bias,
    }


def _layers(shape: ModelShape) -> dict[str, Any]:
    names = dict(_KINDS)
    settings: dict[str, Any] = {"layer_types": [names[kind] for kind in shape.kinds]}
    if WINDOW in shape.kinds:
        settings |= {"use_sliding_window": True, "sliding_window": shape.window}
    return settings


def _experts(shape: ModelShape) -> dict[str, Any]:
    experts = shape.experts
    if experts is None:
        return {"num_experts": 0} if shape.family == "qwen3_next" else {}
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.active,
        "moe_intermediate_size": experts.width,
        "shared_expert_intermediate_size": experts.shared_width,
        "mlp_only_layers": list(experts.dense_layers),
        "decoder_sparse_step": 1,
    }


def _delta(shape: ModelShape) -> dict[str, Any]:
    delta = shape.delta
    if delta is None:
        return {}
    return {
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.kernel,
    }
