"""Tiny random checkpoints: ordinary folders of every supported model type, for trying the program and testing it.

The weights are larger than a training run would start from, so that attention matters: dropping a block of keys moves
the logits visibly, and a wrong cache cannot pass for rounding.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
)

from longgen.errors import UsageError
from longgen.model.boundaries import QWEN2_RULE
from longgen.model.checkpoint import SUPPORTED_TYPES, VISION_TYPES
from longgen.model.quiet import quiet_transformers
from longgen.model.text_config import HYBRID_TYPES

VOCAB_SIZE = 320  # a little more than the tokenizer's, as in the real checkpoints
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog, and the other dogs think that this is the end of the thing.\n"
    "There is nothing here that is not in the other thing; then they are in there.\n"
)


def make_checkpoint(
    folder: Path,
    model_type: str = "qwen3",
    *,
    head_dim: int = 16,
    layers: int | None = None,
    full_attention_interval: int = 2,
    seed: int = 0,
    sliding: bool = False,
    window: int = 48,
    yarn: bool = False,
    tied: bool = False,
    attention_bias: bool = False,
    max_position: int = 32768,
) -> Path:
    """Writes a random checkpoint with safetensors weights, config, tokenizer, chat template and generation settings.

    Args:
        folder: written to; made if it is not there.
        model_type: one of `longgen.model.checkpoint.SUPPORTED_TYPES`.
        head_dim: head size of the attention layers (hidden size 64, 4 query heads, 2 KV heads).
        layers: number of layers; 4 for hybrids, else 3.
        full_attention_interval: every how many layers a hybrid attends; the others are recurrent.
        seed: of the weights.
        sliding, window: sliding-window layers (where the model type has them), `window` keys wide.
        yarn: YaRN with factor 4 over a quarter of `max_position`.
        tied: the head shares the embedding's weights.
        attention_bias: biases in the attention projections (qwen2 types always have them).
        max_position: the config's max_position_embeddings.

    Returns:
        `folder`.

    Raises:
        UsageError: a model type, or sliding windows for a model type, that there is not.
    """
    if model_type not in SUPPORTED_TYPES:
        raise UsageError(f"model type {model_type!r} is not one of {', '.join(SUPPORTED_TYPES)}")
    text_type = VISION_TYPES.get(model_type, model_type)
    hybrid = text_type in HYBRID_TYPES
    if sliding and hybrid:
        raise UsageError(f"{model_type} has no sliding-window layers")
    settings = _common_settings(head_dim, layers or (4 if hybrid else 3), yarn, max_position)
    settings |= {"tie_word_embeddings": tied}
    if not text_type.startswith("qwen2"):
        settings |= {"attention_bias": attention_bias}
    if hybrid:
        settings |= _hybrid_settings(settings["num_hidden_layers"], full_attention_interval)
    if "moe" in text_type or text_type == "qwen3_next":
        settings |= _expert_settings()
    if sliding:
        settings |= _sliding_settings(text_type, settings["num_hidden_layers"], window)
    model = _build_model(model_type, settings, tied)
    _fill_weights(model, seed)
    folder.mkdir(parents=True, exist_ok=True)
    with quiet_transformers():
        model.save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def _common_settings(head_dim: int, layers: int, yarn: bool, max_position: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if yarn:
        rope |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": max_position // 4}
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": max_position,
        "rope_parameters": rope,
        "bos_token_id": None,
        "eos_token_id": _token_id("<|im_end|>"),
        "pad_token_id": _token_id("<|endoftext|>"),
    }


def _hybrid_settings(layers: int, interval: int) -> dict[str, Any]:
    kinds = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)]
    return {
        "layer_types": kinds,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    }


def _expert_settings() -> dict[str, Any]:
    return {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }


def _sliding_settings(text_type: str, layers: int, window: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"use_sliding_window": True, "sliding_window": window}
    if text_type != "qwen3_moe":  # which has a window on every layer
        settings["layer_types"] = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    return settings


def _build_model(model_type: str, settings: dict[str, Any], tied: bool) -> Any:
    if model_type not in VISION_TYPES:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
    }
    text = settings | {"model_type": VISION_TYPES[model_type]}
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=vision, tie_word_embeddings=tied)
    if model_type == "qwen3_5":
        return Qwen3_5ForConditionalGeneration(config)
    return Qwen3_5MoeForConditionalGeneration(config)


@torch.no_grad()
def _fill_weights(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.copy_(_random_weight(name, weight, noise))


def _random_weight(name: str, weight: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Standard normal `noise`, shaped into what a weight of this name should be."""
    if name.endswith("A_log"):
        # Slow decays, so that the state remembers more than a few tokens.
        return 0.5 * noise - 2.0
    if name.endswith("dt_bias"):
        return 0.5 * noise - 1.0
    if "norm" in name and weight.ndim == 1:
        # Some norms are stored around zero (applied as 1 + weight) and some around one; those of queries and keys are
        # larger, for attention that is not nearly uniform.
        larger = 0.5 if name.endswith(("q_norm.weight", "k_norm.weight")) else 0.0
        return weight.mean().round() + larger + 0.1 * noise
    if "embed_tokens" in name:
        # Tied models use it as the head too.
        return 0.1 * noise
    if "bias" in name:
        return 0.1 * noise
    if "conv1d" in name:
        return 0.5 * noise
    gain = 0.6 if "lm_head" in name else 2.5 if "self_attn.o_proj" in name else 1.4
    return noise * gain / math.sqrt(weight.shape[-1])


def _token_id(token: str) -> int:
    """Special tokens come first in the tiny vocabulary."""
    return _SPECIAL_TOKENS.index(token)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 300 tokens, split like Qwen's, with a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_RULE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[AddedToken(token, special=True) for token in _SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TRAINING_TEXT], trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=_CHAT_TEMPLATE
    )
    return wrapped


def _save_tokenizer(folder: Path) -> None:
    build_tokenizer().save_pretrained(folder)
    GenerationConfig(
        eos_token_id=[_token_id("<|im_end|>"), _token_id("<|endoftext|>")],
        pad_token_id=_token_id("<|endoftext|>"),
        do_sample=True,
        temperature=0.7,
        top_k=20,
        top_p=0.8,
    ).save_pretrained(folder)
