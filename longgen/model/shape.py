"""A transformers text config as a ModelShape, for plans."""

from __future__ import annotations

from typing import Any

from longgen.model.rope import trained_window
from longgen.model.text_config import attention_layers, expert_count, head_dim
from longgen.model_shape import FULL, RECURRENT, WINDOW, DeltaRule, Experts, ModelShape


def model_shape(config: Any, name: str, dtype: str | None = None) -> ModelShape:
    """The shape of a text config that read_config accepted. dtype: of the weights as loaded; None: the config's own."""
    kind = config.model_type
    windows = {layer.index: layer.window for layer in attention_layers(config)}
    kinds = tuple(
        RECURRENT if index not in windows else FULL if windows[index] is None else WINDOW
        for index in range(config.num_hidden_layers)
    )
    bias = bool(getattr(config, "attention_bias", False))
    own = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")  # as the engine loads it
    return ModelShape(
        name=name,
        kinds=kinds,
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        mlp=getattr(config, "intermediate_size", 0),
        q_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim(config),
        trained_window=trained_window(config),
        window=next((window for window in windows.values() if window), None),
        experts=_experts(config),
        delta=_delta_rule(config) if RECURRENT in kinds else None,
        tied=bool(config.tie_word_embeddings),
        gated=kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        query_norm=not kind.startswith("qwen2"),
        qkv_bias=bool(getattr(config, "qkv_bias", True)) if kind.startswith("qwen2") else bias,
        output_bias=False if kind.startswith("qwen2") else bias,
        dtype=dtype or own,
        family=kind.removesuffix("_text"),
    )


def _experts(config: Any) -> Experts | None:
    count = expert_count(config)
    if not count:
        return None
    step, dense = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", None) or []
    return Experts(
        count=count,
        active=config.num_experts_per_tok,
        width=config.moe_intermediate_size,
        shared_width=getattr(config, "shared_expert_intermediate_size", 0) if config.model_type != "qwen3_moe" else 0,
        dense_layers=tuple(i for i in range(config.num_hidden_layers) if i in dense or (i + 1) % step),
    )


def _delta_rule(config: Any) -> DeltaRule:
    return DeltaRule(
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        kernel=config.linear_conv_kernel_dim,
    )
