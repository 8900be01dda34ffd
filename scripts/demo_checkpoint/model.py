"""The demo model, an ordinary Qwen3 of a million parameters, its byte tokenizer, and the folder they are written to."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from demo_checkpoint.data import EOS_ID
from longgen.model.rope import ExactRotary

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|reserved_{i}|>" for i in range(5)))
# With the rule that Qwen's tokenizers cut white space by, long texts are encoded piece by piece.
_PIECES = r"\S+|\s*[\r\n]+|\s+(?!\S)|\s+"
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_QK_NORM_START = 1.5
_EMBEDDING_MEAN = 0.02


def make_model(device: torch.device, seed: int) -> Qwen3ForCausalLM:
    """The untrained model in fp32, with exact rotary angles."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=256 + len(_SPECIAL_TOKENS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2**24,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e12},
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
        attn_implementation="sdpa",
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        # Without biases, a head can look at positions alone only through what all embeddings share. In a tied head
        # it moves all logits alike.
        model.model.embed_tokens.weight.add_(_EMBEDDING_MEAN)
        for layer in model.model.layers:
            # Scores of a long context must be able to stand out from the start.
            layer.self_attn.q_norm.weight.fill_(_QK_NORM_START)
            layer.self_attn.k_norm.weight.fill_(_QK_NORM_START)
    model.to(device)
    model.model.rotary_emb = ExactRotary(config, device)
    return model


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose ids 0 to 255 are the bytes of the text's UTF-8, with a chat template that adds nothing."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_SPECIAL_TOKENS[0],
        pad_token=_SPECIAL_TOKENS[0],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2**24,
    )


def _byte_characters() -> list[str]:
    """The character that stands for each byte: GPT-2's table, in which bytes that cannot be printed are moved up."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]


def save_checkpoint(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Writes the folder: bf16 safetensors, config, tokenizer, chat template, generation settings."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = Qwen3ForCausalLM(model.config)
    copy.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    copy.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=EOS_ID, do_sample=False)
    copy.to(torch.bfloat16).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
