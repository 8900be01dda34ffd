"""The rotary settings as config.json has them, before transformers fills in what is missing.

It drops a misspelt YaRN setting with a warning at most: the model would run, and answer worse.
"""

from __future__ import annotations

import difflib
from typing import Any

from longgen.errors import CheckpointError

_PLACES = ("rope_scaling", "rope_parameters")  # older and newer configs
_WINDOW = "original_max_position_embeddings"
_YARN = (
    *("factor", _WINDOW, "attention_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "truncate"),
)
_KNOWN = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"),
    *_YARN,
)


def check_rope_settings(raw: dict[str, Any]) -> None:
    """Raises CheckpointError for YaRN settings of a text config (as in config.json) that are misspelt or incomplete."""
    for name, value in raw.items():
        if isinstance(value, dict) and name not in _PLACES and (nearest := _nearest(name, _PLACES, 0.8)):
            raise CheckpointError(f"{name} in config.json is not a setting; did you mean {nearest}?")
    for place in _PLACES:
        settings = raw.get(place)
        if settings is None:
            continue
        if not isinstance(settings, dict):
            raise CheckpointError(f"{place} is {str(settings)[:80]!r} in config.json; it must be an object of settings")
        _check(settings, place, raw)


def _check(settings: dict[str, Any], place: str, raw: dict[str, Any]) -> None:
    kinds = {settings[name] for name in ("rope_type", "type") if isinstance(settings.get(name), str)}
    yarn = "yarn" in kinds
    if yarn and len(kinds) > 1:
        raise CheckpointError(f"{place} in config.json names two types, {' and '.join(sorted(kinds))}; give one")
    for name in settings:
        if name in _KNOWN:
            continue
        nearest = _nearest(name, _KNOWN, 0.5 if yarn else 0.75)
        if yarn or nearest:
            hint = f"; did you mean {nearest}?" if nearest else f"; YaRN has {', '.join(_YARN)}"
            raise CheckpointError(f"{name} in config.json's {place} is not a setting{hint}")
    if yarn:
        # Some configs name the window beside the settings instead of among them.
        given = {_WINDOW: raw.get(_WINDOW), **settings}
        missing = [name for name in ("factor", _WINDOW) if given.get(name) is None]
        if missing:
            raise CheckpointError(f"{place} in config.json asks for YaRN without {' and '.join(missing)}")
    elif not kinds - {"default", "mrope"} and (idle := [name for name in _YARN if settings.get(name) is not None]):
        raise CheckpointError(
            f"{place} in config.json sets {idle[0]} but no rope_type that uses it; add "
            f'"rope_type": "yarn", or leave {idle[0]} out'
        )


def _nearest(name: str, known: tuple[str, ...], cutoff: float) -> str | None:
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), None)
