"""Settings of a run: built-in defaults, overridden by a YAML file, overridden by flags.

Every value, wherever it comes from, passes through the same parser, so that `max_len: 4M` in a file and `--max-len 4M`
mean the same and are refused alike. Nothing here loads torch.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml

from longgen.errors import UsageError
from longgen.units import parse_bytes, parse_bytes_or_fraction

if TYPE_CHECKING:
    from longgen.sampling import SamplingSettings

_UNITS = MappingProxyType({"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2})
_WHOLE = re.compile(r"([1-9][0-9]{0,17})([kKmM]?)")
_DECIMAL = re.compile(r"((?:0|[1-9][0-9]{0,17})\.[0-9]{1,18})([km])")
_LENGTH_HELP = (
    "write a whole number of tokens above 0, such as 4096, 4k (4,000), 4K (4,096), 25.6k, 2m or 4M (4,194,304)"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a run can be told besides its checkpoint and its prompts.

    max_len: cap on prompt + generated tokens of a request; None is the window that the checkpoint was trained with.
    max_new_tokens: most tokens generated for a request.
    chat: whether the prompt is wrapped in the checkpoint's chat template; None wraps it where there is one.
    device: "auto", "cpu", "cuda" or "cuda:N".   dtype: "auto", "bfloat16", "float16" or "float32".
    block_size: tokens of one layer in a block of the KV cache.
    chunk_size: tokens prefilled in one pass, a multiple of block_size; None leaves the choice to the memory plan.
    resident_blocks: blocks of each layer that stay on the device; None leaves the choice to the memory plan.
    gpu_memory: device memory for the whole process, in bytes or as a fraction (a float) of the card; None is all that
        is free.
    cpu_memory: host memory for the run, in bytes; None is what the machine has to give.
    seed: start of the random numbers; each request has its own, made from this and its id.
    sampling: "greedy", or "checkpoint" for the settings in the checkpoint's generation_config.json.
    temperature, top_k, top_p, min_p, repetition_penalty: see longgen.sampling; None leaves it to `sampling`.
    progress: whether to draw a bar during prefill; None draws it on a terminal.

    Raises UsageError for a chunk that is not a multiple of the block.
    """

    max_len: int | None = None
    max_new_tokens: int = 256
    chat: bool | None = None
    device: str = "auto"
    dtype: str = "auto"
    block_size: int = 1024
    chunk_size: int | None = None
    resident_blocks: int | None = None
    gpu_memory: int | float | None = None
    cpu_memory: int | None = None
    seed: int = 0
    sampling: str = "greedy"
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.chunk_size is not None and self.chunk_size % self.block_size:
            raise UsageError(
                f"chunk_size is {self.chunk_size:,} tokens; it must be a multiple of block_size, {self.block_size:,}"
            )


def load_settings(config: Path | None, flags: Mapping[str, object]) -> Settings:
    """Settings from the defaults, the YAML file `config` (None: no file) and flags (a value of None: not given).

    Raises UsageError for a file that cannot be read, an unknown name or a value that is not allowed.
    """
    values: dict[str, Any] = {}
    if config is not None:
        for name, value in _read_yaml(config).items():
            values[name] = _parse(name, value, f"{config}: ")
    for name, value in flags.items():
        if value is not None:
            values[name] = _parse(name, value, "")
    return Settings(**values)


def sampling_settings(settings: Settings, checkpoint: Mapping[str, Any]) -> SamplingSettings:
    """How tokens are chosen: the checkpoint's generation settings if asked for, then what the user gave.

    checkpoint: what generation_config.json sets of the sampling settings and do_sample.
    What it does not set is off. Raises UsageError for a value out of range or a filter that greedy decoding ignores.
    """
    from longgen.sampling import SamplingSettings

    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values: dict[str, Any] = {}
    if settings.sampling == "checkpoint":
        values = {name: checkpoint[name] for name in names if checkpoint.get(name) is not None}
        values["temperature"] = values.get("temperature", 1.0) if checkpoint.get("do_sample") else 0.0
    given = {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}
    chosen = SamplingSettings(**{**values, **given})
    idle = [name for name in ("top_k", "top_p", "min_p") if name in given]
    if chosen.greedy and idle and settings.temperature is None:
        raise UsageError(f"{idle[0]} has no effect on greedy decoding; give a temperature above 0 too, such as 0.7")
    return chosen


def parse_length(value: object) -> int:
    """Tokens from 4096, "4096", "4k" (4,000), "4K" (4,096), "25.6k", "4m" or "4M" (4,194,304).

    A decimal goes with k and m only, and must come out whole. Raises UsageError for anything else.
    """
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str):
        if match := _WHOLE.fullmatch(text):
            return int(match[1]) * _UNITS[match[2]]
        if match := _DECIMAL.fullmatch(text):
            tokens = Decimal(match[1]) * _UNITS[match[2]]
            if tokens > 0 and tokens == int(tokens):
                return int(tokens)
    raise UsageError(f"{value!r} is not a length; {_LENGTH_HELP}")


def _whole(least: int, most: int = 2**63 - 1) -> Callable[[object], int]:
    def parse(value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        raise UsageError(f"{value!r} is not allowed; it must be a whole number, {least} or more")

    return parse


def _number(value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise UsageError(f"{value!r} is not a number")


def _switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise UsageError(f"{value!r} is not allowed; it must be true or false")


def _word(*words: str, pattern: str = "", hint: str = "") -> Callable[[object], str]:
    def parse(value: object) -> str:
        if isinstance(value, str) and (value in words or (pattern and re.fullmatch(pattern, value))):
            return value
        raise UsageError(f"{value!r} is not allowed; it must be one of {', '.join(words)}{hint}")

    return parse


def _or_none(parse: Callable[[object], Any]) -> Callable[[object], Any]:
    return lambda value: None if value is None else parse(value)


_PARSERS: Mapping[str, Callable[[object], Any]] = MappingProxyType(
    {
        "max_len": _or_none(parse_length),
        "max_new_tokens": parse_length,
        "chat": _or_none(_switch),
        "device": _word("auto", "cpu", "cuda", pattern="cuda:[0-9]{1,3}", hint=", cuda:N"),
        "dtype": _word("auto", "bfloat16", "float16", "float32"),
        "block_size": parse_length,
        "chunk_size": _or_none(parse_length),
        "resident_blocks": _or_none(_whole(0)),
        "gpu_memory": _or_none(parse_bytes_or_fraction),
        "cpu_memory": _or_none(parse_bytes),
        "seed": _whole(0),
        "sampling": _word("greedy", "checkpoint"),
        "temperature": _or_none(_number),
        "top_k": _or_none(_whole(0)),
        "top_p": _or_none(_number),
        "min_p": _or_none(_number),
        "repetition_penalty": _or_none(_number),
        "progress": _or_none(_switch),
    }
)


def _parse(name: str, value: object, source: str) -> Any:
    """One setting's value; `source` begins the message of the UsageError that a wrong name or value raises."""
    if name not in _PARSERS:
        known = [field.name for field in fields(Settings)]
        nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(known)}"
        raise UsageError(f"{source}there is no setting {name!r}; {hint}")
    try:
        return _PARSERS[name](value)
    except UsageError as error:
        raise UsageError(f"{source}{name}: {error}") from None


def _read_yaml(path: Path) -> Mapping[Any, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        loaded, tree = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise UsageError(f"the configuration {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"the configuration {path} is not UTF-8 at byte {error.start}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise UsageError(f"the configuration {path} is not YAML{where}: {getattr(error, 'problem', error)}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise UsageError(f"the configuration {path} must hold lines of 'name: value', not a {type(loaded).__name__}")
    # The loader keeps the last of two equal names without a word.
    names = [key.value for key, _ in tree.value] if isinstance(tree, yaml.MappingNode) else []
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"the configuration {path} sets {repeated[0]} more than once")
    return loaded
