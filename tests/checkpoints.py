"""Tiny random checkpoints for tests, each built once, and transformers' own answer for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from longgen.model.checkpoint import TEXT_TYPES, VISION_TYPES
from longgen.model.tiny import make_checkpoint

DENSE_TYPES = tuple(kind for kind in TEXT_TYPES if not kind.startswith(("qwen3_next", "qwen3_5")))
HYBRID_TYPES = (*(kind for kind in TEXT_TYPES if kind not in DENSE_TYPES), *VISION_TYPES)
Build = Callable[..., Path]


def builder(root: Path) -> Build:
    """A function like `make_checkpoint` without the folder, which builds each checkpoint under `root` only once."""

    def build(model_type: str = "qwen3", **options: Any) -> Path:
        name = "-".join([model_type, *(f"{key}={value}" for key, value in sorted(options.items()))])
        folder = root / name
        return folder if folder.exists() else make_checkpoint(folder, model_type, **options)

    return build


def never_ending(checkpoint: Path, copy: Path) -> Path:
    """A copy of a checkpoint whose answers end at their longest alone: no token stops them."""
    shutil.copytree(checkpoint, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": []}), encoding="utf-8")
    return copy


def random_ids(count: int, *, seed: int = 0) -> torch.Tensor:
    """int64 [1, count] token ids that the tiny tokenizer knows, special ones left out."""
    return torch.randint(3, 300, (1, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def reference_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """float32 [1, n, vocab]: transformers' un-chunked eager logits of every position."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return model(ids).logits
