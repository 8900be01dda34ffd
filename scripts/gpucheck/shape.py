"""The models the figures are for: shapes of Qwen3-0.6B and Qwen2.5-7B with random weights. What their work costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig

from gpucheck.report import Settings
from longgen.engine import Engine, EngineOptions
from longgen.model.checkpoint import random_model
from longgen.model.provider import Provider

NEW_TOKENS = 16


def model_config(small: bool) -> Any:
    """Of Qwen3-0.6B: 28 layers, 16 query and 8 KV heads of 128, head and embedding tied."""
    return AutoConfig.for_model(
        "qwen3",
        vocab_size=320 if small else 151_936,
        hidden_size=64 if small else 1024,
        intermediate_size=96 if small else 3072,
        num_hidden_layers=2 if small else 28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=16 if small else 128,
        max_position_embeddings=1 << 20,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    )


def larger_config(small: bool) -> Any:
    """Of Qwen2.5-7B: 28 layers, 28 query and 4 KV heads of 128, head and embedding apart."""
    return AutoConfig.for_model(
        "qwen2",
        vocab_size=320 if small else 152_064,
        hidden_size=112 if small else 3584,
        intermediate_size=96 if small else 18_944,
        num_hidden_layers=2 if small else 28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=1 << 20,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        tie_word_embeddings=False,
    )


def make_provider(settings: Settings, config: Any = None) -> Provider:
    """A model in bf16, made on the device; `config` None is that of Qwen3-0.6B."""
    torch.manual_seed(0)
    model: Any = random_model(config or model_config(settings.small), torch.bfloat16, settings.device)
    return Provider(model, model.config)


def open_engine(provider: Provider, settings: Settings, *, resident_blocks: int = 0, slots: int = 1) -> Engine:
    """Chunks of 8192, blocks of 1024, four ring entries of 16 blocks (--small: chunks of 64, blocks of 16)."""
    return Engine.over(
        provider,
        EngineOptions(
            block_size=16 if settings.small else 1024,
            chunk_size=64 if settings.small else 8192,
            resident_blocks=resident_blocks,
            ring_entries=4,
            ring_blocks=2 if settings.small else 16,
            slots=slots,
        ),
    )


def random_prompt(count: int) -> list[int]:
    """Token ids that every vocabulary here has."""
    return torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(count)).tolist()


@dataclass(frozen=True, slots=True)
class Work:
    """What a prefill or a decode step must do at least.

    Attributes:
        attention_flop: 4 * q_heads * head_dim for each pair of a query and a key it sees, in every layer.
        linear_flop: 2 for each weight of the layers' matrices and each token, and of the head for each pass.
        loaded, offloaded: bytes of K and V over the wire. Every pass loads the complete blocks before it, those of the
            resident tier excepted; every new token beyond that tier is offloaded (decode: with its block, later).
        read: bytes of device memory that a decode step reads: K and V of the past, and the weights.
    """

    attention_flop: float
    linear_flop: float
    loaded: float
    offloaded: float
    read: float = 0.0


def _weights(config: Any) -> tuple[int, int]:
    """Weights in the matrices of all layers, and in the head."""
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)
    return layer * config.num_hidden_layers, config.hidden_size * config.vocab_size


def _outside(tokens: int, block: int, resident_blocks: int) -> int:
    """Tokens of the complete blocks beyond the resident tier."""
    return max(tokens // block - resident_blocks, 0) * block


def prefill_work(engine: Engine, tokens: int) -> Work:
    """Of `tokens` tokens in chunks: n * (n + 1) / 2 pairs."""
    config, layout, chunk = engine.provider.config, engine.store.layout, engine.chunk_tokens
    resident = engine.store.sizes.resident_by_layer(layout.shape)[0]
    layers, head = _weights(config)
    starts = range(0, tokens, chunk)
    token_bytes = layout.token_bytes * len(layout.full_layers)
    return Work(
        4.0 * config.num_attention_heads * config.head_dim * (tokens * (tokens + 1) / 2) * config.num_hidden_layers,
        2.0 * layers * tokens + 2.0 * head * len(starts),
        float(token_bytes * sum(_outside(start, layout.block_size, resident) for start in starts)),
        float(token_bytes * max(tokens - resident * layout.block_size, 0)),
    )


def decode_work(engine: Engine, tokens: int) -> Work:
    """Of one token after `tokens` others."""
    config, layout = engine.provider.config, engine.store.layout
    resident = engine.store.sizes.resident_by_layer(layout.shape)[0]
    layers, head = _weights(config)
    token_bytes = layout.token_bytes * len(layout.full_layers)
    return Work(
        4.0 * config.num_attention_heads * config.head_dim * (tokens + 1) * config.num_hidden_layers,
        2.0 * (layers + head),
        float(token_bytes * _outside(tokens, layout.block_size, resident)),
        0.0,
        float(token_bytes * tokens + 2 * (layers + head)),
    )
