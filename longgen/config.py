"""Settings of a run: built-in defaults, overridden by a YAML file, overridden by flags.

Every value, wherever it comes from, is taken as the text that was written and passes through the same parser, so that
`max_len: 4M` in a file and `--max-len 4M` mean the same and are refused alike. Nothing here loads torch.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml

from longgen.errors import UsageError
from longgen.units import parse_bytes, parse_bytes_or_fraction, write_bytes_or_fraction

if TYPE_CHECKING:
    from longgen.sampling import SamplingSettings

_UNITS = MappingProxyType({"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2})
_LENGTH = re.compile(r"([1-9][0-9]{0,17})([kKmM]?)")
_DECIMAL = re.compile(r"((?:0|[1-9][0-9]{0,17})\.[0-9]{1,18})([km])")
_WHOLE = re.compile(r"0|[1-9][0-9]*")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_SHARD = re.compile(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,8})")
MOST_WHOLE = 2**63 - 1
# A surrogate without its other half, as bytes that are no UTF-8 become in arguments.
HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_NULL = "tag:yaml.org,2002:null"
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
    progress: whether to draw a bar while prompts are encoded and prefilled; None draws it on a terminal.
    rope: "auto", "none", "yarn" or "yarn:FACTOR"; see longgen.model.window.
    truncate: where prompts that are too long are cut, "head", "middle" or "tail"; None refuses them.
    encoding_errors: "strict", or "replace" to read U+FFFD in place of bytes that are no text.
    stop: strings that end a text; None is none.
    stats: whether to print the figures of every request and of the run.
    scrub: whether to overwrite a request's KV in host memory when it ends.
    compile: whether norms, rotary angles and MLPs are compiled.
    trace: file for a Chrome trace of part of the run; None: no trace.
    trace_chunks: how many of a prompt's last chunks are in it.
    prompt_format: "auto" (JSONL where the name says so), "text" or "jsonl".
    output: path of a file for the results; None is standard output.
    output_format: "jsonl" or "openai", a result in a line; None is plain text for text prompts.
    resume: whether to go on with an output that is there; else it is refused.
    overwrite: whether to replace an output that is there.
    shard: "I/N", the I-th of N parts of the records; None is all of them.
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
    rope: str = "auto"
    truncate: str | None = None
    encoding_errors: str = "strict"
    stop: tuple[str, ...] | None = None
    stats: bool = False
    scrub: bool = False
    compile: bool = False
    trace: str | None = None
    trace_chunks: int = 2
    prompt_format: str = "auto"
    output: str | None = None
    output_format: str | None = None
    resume: bool = True
    overwrite: bool = False
    shard: str | None = None


def load_settings(
    config: Path | None,
    flags: Mapping[str, str | bool | Sequence[str] | None],
    defaults: Mapping[str, Any] | None = None,
) -> Settings:
    """Settings from the defaults, the YAML file `config` (None: no file) and flags (None or no values: not given).

    defaults: values that stand in for the built-in ones of the same names.
    Raises UsageError for a file that cannot be read, an unknown name or a value that is not allowed.
    """
    values: dict[str, Any] = {}
    if config is not None:
        for name, text in _read_yaml(config):
            if name in values:
                raise UsageError(f"the configuration {config} sets {name} more than once")
            values[name] = _parse(name, text, f"{config}: ")
    for name, value in flags.items():
        if isinstance(value, bool):
            values[name] = _parse(name, str(value).lower(), "")
        elif value is not None and not (isinstance(value, list) and not value):
            values[name] = _parse(name, value, "")
    return Settings(**{**(defaults or {}), **values})


def show_settings(settings: Settings) -> str:
    """The settings as a YAML file that `load_settings` reads back to the same."""
    values: dict[str, Any] = {field.name: getattr(settings, field.name) for field in fields(Settings)}
    for name in ("gpu_memory", "cpu_memory"):
        if values[name] is not None:
            values[name] = write_bytes_or_fraction(values[name])
    for name in ("output", "trace"):
        if values[name] is not None:
            values[name] = _quoted(values[name])
    return "".join(f"{name}: {_written(value)}\n" for name, value in values.items())


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_quoted, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _quoted(text: str) -> str:
    plain = (c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text)
    return f'"{"".join(plain)}"'


def sampling_settings(settings: Settings, checkpoint: Mapping[str, Any]) -> SamplingSettings:
    """How tokens are chosen: the checkpoint's generation settings if asked for, then what the user gave.

    checkpoint: what generation_config.json sets of the sampling settings and do_sample.
    What it does not set is off. Raises UsageError for a value out of range or a filter that greedy decoding ignores.
    """
    from longgen.sampling import SamplingSettings

    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values: dict[str, Any] = {}
    if settings.sampling == "checkpoint":
        values = {name: _checkpoint_value(name, checkpoint[name]) for name in names if checkpoint.get(name) is not None}
        samples = _checkpoint_value("do_sample", checkpoint.get("do_sample") or False)
        values["temperature"] = values.get("temperature", 1.0) if samples else 0.0
    given = {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}
    chosen, off = SamplingSettings(**{**values, **given}), SamplingSettings()
    idle = [name for name in ("top_k", "top_p", "min_p") if name in given and given[name] != getattr(off, name)]
    if chosen.greedy and idle and settings.temperature is None:
        raise UsageError(f"{idle[0]} has no effect on greedy decoding; give a temperature above 0 too, such as 0.7")
    return chosen


def _checkpoint_value(name: str, value: Any) -> Any:
    """A value of generation_config.json, which may be of any type; SamplingSettings checks its range."""
    if name == "do_sample":
        allowed = isinstance(value, bool)
    elif isinstance(value, bool) or not isinstance(value, int if name == "top_k" else (int, float)):
        allowed = False
    else:
        allowed = abs(value) <= sys.float_info.max
    if allowed:
        return value
    raise UsageError(f"{name} is {repr(value)[:80]} in the checkpoint's generation_config.json, which is not allowed")


def parse_length(text: str) -> int:
    """Tokens from "4096", "4k" (4,000), "4K" (4,096), "25.6k", "4m" or "4M" (4,194,304).

    A decimal goes with k and m only, and must come out whole. Raises UsageError for anything else.
    """
    if match := _LENGTH.fullmatch(text):
        return int(match[1]) * _UNITS[match[2]]
    if match := _DECIMAL.fullmatch(text):
        tokens = Decimal(match[1]) * _UNITS[match[2]]
        if tokens > 0 and tokens == int(tokens):
            return int(tokens)
    raise UsageError(f"{text!r} is not a length; {_LENGTH_HELP}")


def parse_lengths(name: str, text: str) -> tuple[int, ...]:
    """Tokens from lengths with commas between them. Raises UsageError, which begins with the setting's name."""
    try:
        return tuple(parse_length(part) for part in text.split(","))
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def _whole(text: str) -> int:
    if _WHOLE.fullmatch(text):
        if len(text) <= len(str(MOST_WHOLE)) and int(text) <= MOST_WHOLE:
            return int(text)
        raise UsageError(f"{text[:80]} is more than {MOST_WHOLE:,}, the most that is allowed")
    raise UsageError(f"{text!r} is not allowed; it must be a whole number, 0 or more")


def _at_least_one(text: str) -> int:
    if (value := _whole(text)) > 0:
        return value
    raise UsageError("0 is not allowed; it must be 1 or more")


def _number(text: str) -> float:
    if _NUMBER.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    raise UsageError(f"{text!r} is not a number")


def _switch(text: str) -> bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    raise UsageError(f"{text!r} is not allowed; it must be true or false")


def _rope(text: str) -> str:
    kind, _, factor = text.partition(":")
    if text in ("auto", "none", "yarn") or (kind == "yarn" and _NUMBER.fullmatch(factor) and 1 <= float(factor) < 1e6):
        return text
    raise UsageError(
        f"{text!r} is not allowed; it must be one of auto, none, yarn, yarn:FACTOR (1 or more, such as yarn:4)"
    )


def _stop_strings(texts: str | Sequence[str]) -> tuple[str, ...]:
    stops = (texts,) if isinstance(texts, str) else tuple(texts)
    if not all(stops):
        raise UsageError("a stop string must have at least one character")
    if wrong := next(filter(HALF_CHARACTER.search, stops), None):
        raise UsageError(f"{wrong!r} is no text, so nothing can match; give stop strings in UTF-8")
    return stops


def _path(text: str) -> str:
    if not text:
        raise UsageError("the name of a file is empty")
    if text == "-":
        raise UsageError("'-' is no file; leave it out, or write ./- for a file of that name")
    return text


def parse_shard(text: str) -> tuple[int, int]:
    """(2, 8) from "2/8". Raises UsageError."""
    match = _SHARD.fullmatch(text)
    if match and int(match[1]) <= int(match[2]):
        return int(match[1]), int(match[2])
    raise UsageError(f"{text!r} is not a shard; write I/N, from 1/N to N/N, such as 2/8")


def _shard(text: str) -> str:
    parse_shard(text)
    return text


def _word(*words: str, pattern: str = "", hint: str = "") -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text in words or (pattern and re.fullmatch(pattern, text)):
            return text
        raise UsageError(f"{text!r} is not allowed; it must be one of {', '.join(words)}{hint}")

    return parse


_PARSERS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "max_len": parse_length,
        "max_new_tokens": parse_length,
        "chat": _switch,
        "device": _word("auto", "cpu", "cuda", pattern="cuda:[0-9]{1,3}", hint=", cuda:N"),
        "dtype": _word("auto", "bfloat16", "float16", "float32"),
        "block_size": parse_length,
        "chunk_size": parse_length,
        "resident_blocks": _whole,
        "gpu_memory": parse_bytes_or_fraction,
        "cpu_memory": parse_bytes,
        "seed": _whole,
        "sampling": _word("greedy", "checkpoint"),
        "temperature": _number,
        "top_k": _whole,
        "top_p": _number,
        "min_p": _number,
        "repetition_penalty": _number,
        "progress": _switch,
        "rope": _rope,
        "truncate": _word("head", "middle", "tail"),
        "encoding_errors": _word("strict", "replace"),
        "stop": _stop_strings,
        "stats": _switch,
        "scrub": _switch,
        "compile": _switch,
        "trace": _path,
        "trace_chunks": _at_least_one,
        "prompt_format": _word("auto", "text", "jsonl"),
        "output": _path,
        "output_format": _word("jsonl", "openai"),
        "resume": _switch,
        "overwrite": _switch,
        "shard": _shard,
    }
)


# Flags that are no settings, with what to write.
_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "raw": "did you mean chat? (raw: true is chat: false)",
        "model": "the nearest is the flag --model; give it on the command line",
        "prompt": "the nearest is the flag --prompt; give it on the command line",
        "config": "the nearest is the flag --config; a file cannot name another",
        "show_config": "the nearest is the flag --show-config; give it on the command line",
    }
)


def _parse(name: str, text: str | Sequence[str] | None, source: str) -> Any:
    """One setting's value, from its text, its texts or a file's null, which is a value where the default is None.

    `source` begins the message of the UsageError that a wrong name or value raises.
    """
    defaults = {field.name: field.default for field in fields(Settings)}
    if name not in defaults:
        nearest = difflib.get_close_matches(name.casefold(), defaults, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(defaults)}"
        hint = _ELSEWHERE.get(name, hint)
        raise UsageError(f"{source}there is no setting {name!r}; {hint}")
    if text is None and defaults[name] is None:
        return None
    if not isinstance(text, (str, type(None))) and name != "stop":
        raise UsageError(f"{source}{name}: a sequence is not allowed; give one value")
    try:
        return _PARSERS[name]("null" if text is None else text)
    except UsageError as error:
        raise UsageError(f"{source}{name}: {error}") from None


def _read_yaml(path: Path) -> Iterator[tuple[str, str | Sequence[str] | None]]:
    """The names of a YAML file and the text written for each, or the texts of a sequence; None for null.

    Texts, because what YAML makes of them is not what the flags mean: it takes 010 for 8 and 1e-1 for a word.
    """
    try:
        tree = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise UsageError(f"the configuration {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"the configuration {path} is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise UsageError(f"the configuration {path} is nested too deep; it must hold lines of 'name: value'") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise UsageError(f"the configuration {path} is not YAML{where}: {problem}") from None
    if tree is None or tree.tag == _NULL:
        return
    if not isinstance(tree, yaml.MappingNode):
        raise UsageError(f"the configuration {path} must hold lines of 'name: value', not a {_kind(tree)}")
    for key, value in tree.value:
        if not isinstance(key, yaml.ScalarNode):
            raise UsageError(
                f"the configuration {path} has a {_kind(key)} for a name at line {key.start_mark.line + 1}"
            )
        if isinstance(value, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in value.value):
            yield key.value, [item.value for item in value.value]
            continue
        if not isinstance(value, yaml.ScalarNode):
            raise UsageError(f"{path}: {key.value}: a {_kind(value)} is not allowed; give one value")
        yield key.value, None if value.tag == _NULL else value.value


def _kind(node: yaml.Node) -> str:
    """What YAML calls a node: scalar, sequence or mapping."""
    return type(node).__name__.removesuffix("Node").lower()
