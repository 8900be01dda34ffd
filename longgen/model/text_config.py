"""What a text config says of a model's shape, checked before anything is built from it."""

from __future__ import annotations

from typing import Any

import torch

from longgen.errors import CheckpointError
from longgen.kv.layout import AttentionLayer

# Models that mix attention layers with recurrent ones.
HYBRID_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_SHARED_HEADS = (("num_attention_heads", "num_key_value_heads"), ("linear_num_value_heads", "linear_num_key_heads"))
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_shape(config: Any) -> None:
    """Raises CheckpointError if sizes, layer types or dtype of `config` (a transformers text config) cannot be used.

    transformers itself checks that most sizes are whole numbers, not that a model can be made of them.
    """
    for name in _SIZES:
        size = getattr(config, name, None)
        if size is not None:
            _check_size(name, size)
    _check_feed_forward(config)
    for many, few in _SHARED_HEADS:
        heads, groups = getattr(config, many, None), getattr(config, few, None)
        if heads and groups and heads % groups:
            raise CheckpointError(f"{many} is {heads} in config.json; it must be a multiple of {few}, {groups}")
    dtype = getattr(config, "dtype", None)
    if dtype is not None and dtype not in _DTYPES:
        raise CheckpointError(
            f"dtype {str(dtype).removeprefix('torch.')} of config.json is not supported; supported are "
            f"{', '.join(str(known).removeprefix('torch.') for known in _DTYPES)}"
        )
    if head_dim(config) % 2:
        raise CheckpointError(f"the head size is {head_dim(config)} in config.json; rotary angles need an even one")
    attention_layers(config)


def _check_size(name: str, size: Any) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise CheckpointError(f"{name} is {size!r} in config.json; it must be a whole number, 1 or more")


def _check_feed_forward(config: Any) -> None:
    """Raises CheckpointError unless an MLP, or a mixture of experts where there is one, can be made."""
    count = expert_count(config)
    names = ("num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step") if count else ("intermediate_size",)
    for name, size in (("num_experts", count or 1), *((name, getattr(config, name, 1)) for name in names)):
        _check_size(name, size)
    dense = getattr(config, "mlp_only_layers", None) or []
    if count and not (isinstance(dense, list) and all(type(layer) is int for layer in dense)):
        raise CheckpointError(f"mlp_only_layers is {dense!r} in config.json; it must be a list of layer numbers")
    if count and config.num_experts_per_tok > count:
        raise CheckpointError(
            f"num_experts_per_tok is {config.num_experts_per_tok} in config.json; there are {count} experts in a layer"
        )


def expert_count(config: Any) -> int:
    """Experts in a layer; 0 for a model without."""
    mixes = "moe" in config.model_type or config.model_type == "qwen3_next"
    return (config.num_experts or 0) if mixes else 0


def head_dim(config: Any) -> int:
    """Head size of the attention layers; qwen2 types do not name it."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def attention_layers(config: Any) -> tuple[AttentionLayer, ...]:
    """The attention layers of a text config with their windows, recurrent layers left out.

    Windows come from the config alone: some models hand theirs to the attention function and some do not.

    Raises:
        CheckpointError: a kind of layer that the model type does not have, no attention layer at all, or sliding
            windows without a width.
    """
    window = getattr(config, "sliding_window", None)
    # Without layer types (qwen3_moe) a window, where there is one, holds for every layer.
    default = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or default
    other = "linear_attention" if config.model_type in HYBRID_TYPES else "sliding_attention"
    for index, kind in enumerate(kinds):
        if kind not in ("full_attention", other):
            raise CheckpointError(
                f"layer {index} is of type {kind!r} in config.json; layers of {config.model_type} are full_attention "
                f"or {other}"
            )
    if "sliding_attention" in kinds and (window is None or window < 1):
        raise CheckpointError(f"sliding_window is {window} in config.json; its sliding_attention layers need 1 or more")
    layers = tuple(
        AttentionLayer(index, window if kind == "sliding_attention" else None)
        for index, kind in enumerate(kinds)
        if kind != "linear_attention"
    )
    if not layers:
        raise CheckpointError("config.json names no attention layer, so there is no KV cache to keep")
    return layers
