"""What is benched: a checkpoint with its weights, or a shape with random ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from longgen.config import Settings
from longgen.model.provider import Provider
from longgen.model_shape import ModelShape
from longgen.names import checkpoint_name
from longgen.planning.plans import find_shape


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that is found, but not loaded.

    Attributes:
        shape: of it.   load: gives the model on a device.   weights: where they come from, in words.
    """

    shape: ModelShape
    load: Callable[[torch.device], Provider]
    weights: str


def find_subject(model: str | None, shape: str | None, settings: Settings) -> Subject:
    """The model that is named as for `run`, or else the shape that is named as for `plan`.

    Raises UsageError or CheckpointError for one that is not there or is broken.
    """
    dtype = None if settings.dtype == "auto" else settings.dtype
    return _checkpoint(model, dtype) if model is not None else _shape(shape or "", dtype)


def _shape(name: str, dtype: str | None) -> Subject:
    from longgen.model.from_shape import random_provider, text_config

    found = find_shape(name, dtype)
    text_config(found)  # raises for a shape that no model has
    return Subject(found, lambda device: random_provider(found, device), "random weights")


def _checkpoint(name: str, dtype: str | None) -> Subject:
    from longgen.model.checkpoint import check_folder, resolve_checkpoint
    from longgen.model.shape import model_shape

    folder = check_folder(resolve_checkpoint(checkpoint_name(name)))
    found = model_shape(folder.config, Path(name).name or name, dtype)
    chosen = getattr(torch, dtype) if dtype else None
    return Subject(found, lambda device: Provider.load(folder, dtype=chosen, device=device), "the checkpoint's weights")
