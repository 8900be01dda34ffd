"""Settings that a record of a batch brings along; they hold for that record in place of the run's."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from longgen.config import HALF_CHARACTER, MOST_WHOLE, Settings
from longgen.errors import UsageError

_LENGTHS = ("max_new_tokens", "max_tokens", "max_completion_tokens")  # the first that is given holds
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
NAMES = (*_LENGTHS, *_NUMBERS, "top_k", "seed", "stop", "chat_template_kwargs")

# What an OpenAI request may ask for and does not get here, with the JSON of the values that ask for nothing.
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "n": "[1]",
        "best_of": "[1]",
        "presence_penalty": "[0]",
        "frequency_penalty": "[0]",
        "logit_bias": "[{}]",
        "logprobs": "[false]",
        "top_logprobs": "[0]",
        "tools": "[[]]",
        "tool_choice": '["none", "auto"]',
        "functions": "[[]]",
        "response_format": '[{"type": "text"}]',
        "stream": "[false]",
    }
)
# What one may say that changes no answer here.
HARMLESS = (
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("parallel_tool_calls", "stream_options"),
)


def with_own(settings: Settings, own: Mapping[str, Any]) -> Settings:
    """The run's settings with a record's own in their place. Raises UsageError for one that is not allowed.

    A value of null is as good as none. Ranges of sampling settings are checked where they are used.
    """
    given = {name: value for name, value in own.items() if value is not None}
    for name, value in given.items():
        if name not in NAMES and value not in json.loads(REFUSED.get(name, "[]")):
            remedy = "give what it holds in body itself" if name == "extra_body" else "leave it out"
            raise UsageError(f"{name} is {_shown(value)}, which is not supported; {remedy}")
    values: dict[str, Any] = {}
    for name in reversed(_LENGTHS):
        if name in given:
            values["max_new_tokens"] = _whole(name, given[name], least=1)
    for name in ("seed", "top_k"):
        if name in given:
            values[name] = _whole(name, given[name], least=0)
    values |= {name: _number(name, given[name]) for name in _NUMBERS if name in given}
    if "stop" in given:
        values["stop"] = _stops(given["stop"])
    return replace(settings, **values)


def thinking(own: Mapping[str, Any]) -> bool | None:
    """What a record's chat_template_kwargs say of enable_thinking; None if nothing. Raises UsageError."""
    given = own.get("chat_template_kwargs")
    if given is None:
        return None
    if not isinstance(given, dict) or not given.keys() <= {"enable_thinking"}:
        raise UsageError(f"chat_template_kwargs is {_shown(given)}; it may hold enable_thinking and nothing else")
    value = given.get("enable_thinking")
    if value is None or isinstance(value, bool):
        return value
    raise UsageError(f"enable_thinking is {_shown(value)}; it must be true or false")


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and least <= value:
        if value <= MOST_WHOLE:
            return value
        raise UsageError(f"{name} is {_shown(value)}, more than {MOST_WHOLE:,}, the most that is allowed")
    raise UsageError(f"{name} is {_shown(value)}; it must be a whole number, {least} or more")


def _number(name: str, value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)
    raise UsageError(f"{name} is {_shown(value)}; it must be a number")


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops):
        if not any(map(HALF_CHARACTER.search, stops)):
            return tuple(stops)
        raise UsageError(f"stop is {_shown(value)}, which has half a character: nothing can match it")
    raise UsageError(f"stop is {_shown(value)}; it must be a string or a list of strings, none of them empty")


def _shown(value: Any) -> str:
    return repr(value)[:80]
