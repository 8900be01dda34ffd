"""Short names of known models, and model shapes written as YAML."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from longgen.errors import UsageError
from longgen.model_shape import FULL, RECURRENT, WINDOW, DeltaRule, Experts, ModelShape

_GATED = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_NEEDED = frozenset({"family", "hidden", "layers", "q_heads", "kv_heads", "head_dim", "vocab", "trained_window"})
_OPTIONAL = (
    "hub aliases name full_attention_every mlp tied delta experts window window_layers dtype attention_bias "
    "kv_bytes_per_token"
)
_KNOWN = _NEEDED | frozenset(_OPTIONAL.split())
_BLOCK = 1  # bytes per token do not depend on the block


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model with a short name. aliases: other short names; hub: its hub id."""

    name: str
    aliases: tuple[str, ...]
    hub: str
    shape: ModelShape


def known_models() -> tuple[KnownModel, ...]:
    """All models of longgen/data/models.yaml, in its order."""
    text = files("longgen").joinpath("data/models.yaml").read_text(encoding="utf-8")
    models = []
    # libyaml's loader where it is there: every run looks its model up, and Python takes 50 ms to parse the table.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for name, entry in yaml.load(text, Loader=loader).items():
        aliases = tuple(entry.get("aliases", ()))
        models.append(KnownModel(name, aliases, entry["hub"], shape_from_mapping(entry, name, "models.yaml")))
    return tuple(models)


def find_known(name: str) -> KnownModel | None:
    """The known model of a short name, an alias or a hub id, in any case; None if there is none."""
    wanted = name.lower()
    for model in known_models():
        if wanted in (model.name, model.hub.lower(), *model.aliases):
            return model
    return None


def checkpoint_name(name: str) -> str:
    """The hub id that a short name stands for; what exists as a path, and any other name, as it is."""
    if "/" in name or os.path.exists(name):
        return name
    known = find_known(name)
    return known.hub if known else name


def read_shape(path: Path, dtype: str | None = None) -> ModelShape:
    """The model shape of a YAML file. dtype: of the weights, in place of the file's own.

    Raises UsageError for a file that cannot be read or does not describe a model.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the model shape {path} cannot be read: {getattr(error, 'strerror', error)}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise UsageError(f"the model shape {path} is not YAML{f' at line {mark.line + 1}' if mark else ''}") from None
    if not isinstance(content, dict):
        raise UsageError(f"the model shape {path} must hold lines of 'name: value'")
    shape = shape_from_mapping(content, str(content.get("name", path.stem)), str(path))
    return replace(shape, dtype=dtype) if dtype else shape


def shape_from_mapping(entry: Mapping[str, Any], name: str, source: str) -> ModelShape:
    """A model shape from the fields that models.yaml explains. `source` begins the messages.

    Raises UsageError for a field that is missing, unknown or wrong, and for KV bytes that do not come out as stated.
    """
    missing, unknown = sorted(_NEEDED - entry.keys()), sorted(map(str, entry.keys() - _KNOWN))
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"has no use for {', '.join(unknown)}"
        raise UsageError(f"{source}: {name} {what}; see configs/models.yaml")
    try:
        shape = _shape(entry, name)
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{source}: {name} does not describe a model: {error}") from None
    stated, counted = entry.get("kv_bytes_per_token"), replace(shape, dtype="bfloat16").kv(_BLOCK).cached_token_bytes
    if stated is not None and stated != counted:
        raise UsageError(f"{source}: {name} states {stated} KV bytes per token, but its shape takes {counted}")
    return shape


def _shape(entry: Mapping[str, Any], name: str) -> ModelShape:
    family = str(entry["family"]).removesuffix("_text")
    bias = bool(entry.get("attention_bias", False))
    experts, delta = entry.get("experts"), entry.get("delta")
    kinds = _kinds(entry)
    if RECURRENT in kinds and not delta:
        raise ValueError("recurrent layers need delta")
    if WINDOW in kinds and not entry.get("window"):
        raise ValueError("window_layers need window")
    if not experts and not entry.get("mlp"):
        raise ValueError("either mlp or experts is needed")
    numbers = {field: int(entry[field]) for field in ("hidden", "vocab", "q_heads", "kv_heads", "head_dim")}
    if min(numbers.values()) < 1:
        raise ValueError("sizes must be 1 or more")
    return ModelShape(
        name=name,
        kinds=kinds,
        mlp=int(entry.get("mlp", 0)),
        trained_window=int(entry["trained_window"]),
        window=entry.get("window"),
        experts=Experts(**{key: _numbers(value) for key, value in experts.items()}) if experts else None,
        delta=DeltaRule(**{key: int(value) for key, value in delta.items()}) if delta else None,
        tied=bool(entry.get("tied", False)),
        gated=family in _GATED,
        query_norm=not family.startswith("qwen2"),
        qkv_bias=family.startswith("qwen2") or bias,
        output_bias=bias and not family.startswith("qwen2"),
        dtype=str(entry.get("dtype", "bfloat16")),
        family=family,
        **numbers,
    )


def _numbers(value: Any) -> Any:
    return tuple(map(int, value)) if isinstance(value, list) else int(value)


def _kinds(entry: Mapping[str, Any]) -> tuple[str, ...]:
    every, windows = int(entry.get("full_attention_every", 1)), frozenset(entry.get("window_layers", ()))
    return tuple(
        RECURRENT if (index + 1) % every else WINDOW if index in windows else FULL
        for index in range(int(entry["layers"]))
    )
