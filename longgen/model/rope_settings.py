"""The rotary settings as config.json has them, before transformers fills in what is missing.

It drops a misspelt YaRN setting with a warning at most: the model would run, and answer worse.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

from longgen.errors import CheckpointError

_PLACES = ("rope_scaling", "rope_parameters")  # older and newer configs; where both are, transformers takes the first
_TYPES = ("rope_type", "type")
_WINDOW = "original_max_position_embeddings"
_NUMBERS = ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_YARN = ("factor", _WINDOW, *_NUMBERS[1:], "truncate")
_SHARED = ("rope_theta", "partial_rotary_factor")  # may be given beside the settings too
_KNOWN = (*_TYPES, *_SHARED, "mrope_section", "mrope_interleaved", *_YARN)
_OTHERS = ("text_config", "vision_config", "dual_chunk_attention_config")  # objects that have such names for other ends


def check_rope_settings(raw: dict[str, Any], text: dict[str, Any]) -> None:
    """Raises CheckpointError for YaRN settings that are misspelt, incomplete, misplaced or contradict each other.

    raw: what config.json holds.   text: what it says of the text model; of a text checkpoint that is `raw` itself.
    """
    if text is not raw:
        for place in _PLACES:
            if raw.get(place):
                raise CheckpointError(f"{place} in config.json stands beside text_config; it belongs inside")
        _check_strays(raw)
    _check_strays(text)
    found = {place: settings for place in _PLACES if (settings := _settings(text, place))}
    for place, settings in found.items():
        _check(settings, place, text)
    if len(found) == 2 and _meaning(found[_PLACES[0]], text) != _meaning(found[_PLACES[1]], text):
        raise CheckpointError(f"{' and '.join(found)} in config.json differ; keep one of them")


def window_beside(text: dict[str, Any]) -> Any:
    """The window that YaRN stretches where it is given beside the settings, not among them; else None."""
    settings = next((settings for place in _PLACES if (settings := _settings(text, place))), {})
    return text.get(_WINDOW) if "yarn" in _kinds(settings) else None


def _settings(text: dict[str, Any], place: str) -> dict[str, Any]:
    settings = text.get(place)
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise CheckpointError(f"{place} is {str(settings)[:80]!r} in config.json; it must be an object of settings")
    return settings


def _check_strays(raw: dict[str, Any]) -> None:
    """Raises CheckpointError for what looks like rotary settings where none are looked for."""
    for name, value in raw.items():
        if name in (*_PLACES, *_OTHERS) or value is None or value is False or value == {}:
            continue
        if isinstance(value, dict):
            stray = _speaks_of_rope(name) or any(map(_asks_for_yarn, value, value.values())) or _WINDOW in value
            stray = stray or ("factor" in value and any(kind in value for kind in _TYPES))
        else:
            stray = name in _NUMBERS or _asks_for_yarn(name, value)
        nearest = _nearest(name, _PLACES, 0.8)
        if stray or nearest:
            hint = f"did you mean {nearest}?" if nearest else f"rotary settings go into {' or '.join(_PLACES)}"
            raise CheckpointError(f"{name} in config.json is not a setting; {hint}")


def _speaks_of_rope(name: str) -> bool:
    words = re.findall("[a-z]+", re.sub("(?<=[a-z])(?=[A-Z])", "_", name).casefold())
    return any(word.startswith("rope") or "yarn" in word for word in words)


def _asks_for_yarn(name: str, value: Any) -> bool:
    """Whether a name that is not known, or its value, can only mean YaRN."""
    if value is None or value is False:
        return False
    if "yarn" in name.casefold():
        return True
    word = value.strip().casefold() if isinstance(value, str) else ""
    return word == "yarn" or (name.casefold() in _TYPES and _nearest(word, ("yarn",), 0.75) is not None)


def _kinds(settings: dict[str, Any]) -> set[str]:
    """The types that settings name; "mrope" is what older configs call the default with positions on three axes."""
    given = {settings[name] for name in _TYPES if isinstance(settings.get(name), str)}
    return {"default" if kind == "mrope" else kind for kind in given}


def _meaning(settings: dict[str, Any], text: dict[str, Any]) -> tuple[set[str], dict[str, Any]]:
    """Equal for settings that mean the same."""
    shared = {name: text.get(name) for name in (*_SHARED, _WINDOW)}
    full = {name: value for name, value in (shared | settings).items() if name not in _TYPES and value is not None}
    return _kinds(settings) or {"default"}, full


def _check(settings: dict[str, Any], place: str, text: dict[str, Any]) -> None:
    for name in _TYPES:
        if not isinstance(settings.get(name), (str, type(None))):
            raise CheckpointError(f"{name} is {settings[name]!r} in config.json's {place}; it must be a string")
    kinds = _kinds(settings)
    yarn = "yarn" in kinds
    if len(kinds) > 1:
        raise CheckpointError(f"{place} in config.json names two types, {' and '.join(sorted(kinds))}; give one")
    for name, value in settings.items():
        if name in _KNOWN:
            continue
        nearest = _nearest(name, _KNOWN, 0.5 if yarn else 0.75)
        if yarn or nearest or _asks_for_yarn(name, value):
            hint = f"; did you mean {nearest}?" if nearest else f"; YaRN has {', '.join(_YARN)}"
            raise CheckpointError(f"{name} in config.json's {place} is not a setting{hint}")
    if yarn:
        _check_complete(settings, place, text)
    elif not kinds - {"default"} and (idle := [name for name in _YARN if settings.get(name) is not None]):
        raise CheckpointError(
            f"{place} in config.json sets {idle[0]} but no rope_type that uses it; add "
            f'"rope_type": "yarn", or leave {idle[0]} out'
        )


def _check_complete(settings: dict[str, Any], place: str, text: dict[str, Any]) -> None:
    # Some configs name the window beside the settings instead of among them.
    inside, beside = settings.get(_WINDOW), text.get(_WINDOW)
    given = {_WINDOW: beside if inside is None else inside, "factor": settings.get("factor")}
    missing = [name for name in ("factor", _WINDOW) if given[name] is None]
    if missing:
        raise CheckpointError(f"{place} in config.json asks for YaRN without {' and '.join(missing)}")
    window = given[_WINDOW]
    if not isinstance(window, (int, float)) or isinstance(window, bool) or not 1 <= window < 1e15 or window % 1:
        raise CheckpointError(
            f"{_WINDOW} is {repr(window)[:80]} in config.json; it must be a whole number of tokens, 1 or more"
        )
    if beside is not None and beside != window:
        raise CheckpointError(
            f"{_WINDOW} is {inside!r} in config.json's {place}, and {beside!r} beside it; keep one of them"
        )


def _nearest(name: str, known: tuple[str, ...], cutoff: float) -> str | None:
    return next(iter(difflib.get_close_matches(name.casefold(), known, n=1, cutoff=cutoff)), None)
