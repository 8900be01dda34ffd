"""Model shapes written as YAML, in the form that configs/models.yaml explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from longgen.errors import UsageError
from longgen.model_shape import DTYPE_BYTES, FAMILIES, FULL, RECURRENT, WINDOW, DeltaRule, Experts, ModelShape

_GATED = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_SIZES = ("hidden", "vocab", "q_heads", "kv_heads", "head_dim", "trained_window")
_NEEDED = frozenset({"family", "layers", *_SIZES})
_OPTIONAL = (
    "hub aliases name full_attention_every mlp tied delta experts window window_layers dtype attention_bias "
    "kv_bytes_per_token"
)
_KNOWN = _NEEDED | frozenset(_OPTIONAL.split())
_MOST_LAYERS = 10_000
_BLOCK = 1  # bytes per token do not depend on the block
_Part = TypeVar("_Part", Experts, DeltaRule)


def read_shape(path: Path, dtype: str | None = None) -> ModelShape:
    """The model shape of a YAML file. dtype: of the weights, in place of the file's own.

    Raises UsageError for a file that cannot be read or does not describe a model.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the model shape {path} cannot be read: {getattr(error, 'strerror', error)}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none, a number of thousands of digits
        mark = getattr(error, "problem_mark", None)
        raise UsageError(f"the model shape {path} is not YAML{f' at line {mark.line + 1}' if mark else ''}") from None
    except RecursionError:
        raise UsageError(f"the model shape {path} is nested too deep") from None
    if not isinstance(content, dict):
        raise UsageError(f"the model shape {path} must hold lines of 'name: value'; see configs/models.yaml")
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
    except ValueError as error:
        raise UsageError(f"{source}: {name} does not describe a model: {error}") from None
    stated, counted = entry.get("kv_bytes_per_token"), replace(shape, dtype="bfloat16").kv(_BLOCK).cached_token_bytes
    if stated is not None and stated != counted:
        raise UsageError(f"{source}: {name} states {stated} KV bytes per token, but its shape takes {counted}")
    return shape


def _shape(entry: Mapping[str, Any], name: str) -> ModelShape:
    """Raises ValueError, in words, for what is wrong."""
    family = _one_of(str(entry["family"]).removesuffix("_text"), "family", FAMILIES)
    bias, kinds = _switch(entry, "attention_bias"), _kinds(entry)
    experts, delta = _part(entry, "experts", Experts), _part(entry, "delta", DeltaRule)
    sizes = {field: _whole(entry[field], field) for field in _SIZES}
    mlp = _whole(entry.get("mlp", 0), "mlp", least=0)
    if RECURRENT in kinds and delta is None:
        raise ValueError("recurrent layers need delta")
    if experts is None and not mlp:
        raise ValueError("either mlp or experts is needed")
    if sizes["q_heads"] % sizes["kv_heads"]:
        raise ValueError(f"q_heads is {sizes['q_heads']}; it must be a multiple of kv_heads, {sizes['kv_heads']}")
    if experts is not None and experts.active > experts.count:
        raise ValueError(f"{experts.active} experts are active of {experts.count}")
    return ModelShape(
        name=name,
        kinds=kinds,
        mlp=mlp,
        window=_whole(entry["window"], "window") if WINDOW in kinds else None,
        experts=experts,
        delta=delta,
        tied=_switch(entry, "tied"),
        gated=family in _GATED,
        query_norm=not family.startswith("qwen2"),
        qkv_bias=family.startswith("qwen2") or bias,
        output_bias=bias and not family.startswith("qwen2"),
        dtype=_one_of(entry.get("dtype", "bfloat16"), "dtype", tuple(dict(DTYPE_BYTES))),
        family=family,
        **sizes,
    )


def _kinds(entry: Mapping[str, Any]) -> tuple[str, ...]:
    layers = _whole(entry["layers"], "layers")
    if layers > _MOST_LAYERS:
        raise ValueError(f"layers is {layers}; more than {_MOST_LAYERS:,} are not looked at")
    every = _whole(entry.get("full_attention_every", 1), "full_attention_every")
    windows = _layer_numbers(entry.get("window_layers", []), "window_layers")
    if windows and max(windows) >= layers:
        raise ValueError(f"window_layers has {max(windows)}, and the last of {layers} layers is {layers - 1}")
    if windows and entry.get("window") is None:
        raise ValueError("window_layers need window")
    kinds = tuple(RECURRENT if (index + 1) % every else WINDOW if index in windows else FULL for index in range(layers))
    if set(kinds) == {RECURRENT}:
        raise ValueError(f"no layer attends: full_attention_every is {every}, and there are {layers} layers")
    return kinds


def _part(entry: Mapping[str, Any], name: str, kind: type[_Part]) -> _Part | None:
    """The experts or the delta rule of an entry; None where it has none."""
    values = entry.get(name)
    if values is None:
        return None
    known = {field.name: field.default for field in fields(kind)}
    needed = {field for field, default in known.items() if default is MISSING}
    if not isinstance(values, dict) or not needed <= values.keys() <= known.keys():
        raise ValueError(f"{name} must hold {', '.join(sorted(needed))}, and may hold nothing but {', '.join(known)}")
    numbers: dict[str, Any] = {
        field: _layer_numbers(value, field)
        if known[field] == ()
        else _whole(value, field, least=1 if known[field] is MISSING else 0)
        for field, value in values.items()
    }
    return kind(**numbers)


def _whole(value: Any, field: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{field} is {value!r}; it must be a whole number, {least} or more")
    return value


def _layer_numbers(value: Any, field: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{field} is {value!r}; it must be a list of layer numbers, of which the first is 0")
    return tuple(_whole(number, field, least=0) for number in value)


def _switch(entry: Mapping[str, Any], field: str) -> bool:
    value = entry.get(field, False)
    if not isinstance(value, bool):
        raise ValueError(f"{field} is {value!r}; it must be true or false")
    return value


def _one_of(value: Any, field: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"{field} is {value!r}; it must be one of {', '.join(known)}")
    return str(value)
