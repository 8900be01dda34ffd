"""Past the trained window: by how much YaRN stretches the rotary angles, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longgen.errors import UsageError
from longgen.model.rope import original_window, trained_window, yarn_factor


@dataclass(frozen=True, slots=True)
class Stretch:
    """How a run's rotary angles are made.

    factor: of YaRN over the window that the model was first trained with; None leaves the checkpoint's own settings.
    notice: what to tell the user; None if there is nothing to tell.
    """

    factor: float | None
    notice: str | None


def choose_stretch(config: Any, rope: str, prompt: int, new_tokens: int, *, beyond: bool) -> Stretch:
    """What `--rope` means for a request.

    Args:
        config: a text config that check_rope() has accepted.
        rope: auto, none, yarn or yarn:FACTOR.
        prompt, new_tokens: of the longest request.
        beyond: whether the user allows lengths beyond the trained window.

    `none` and, where the request fits the trained window, `auto` leave the checkpoint's own settings. Otherwise YaRN
    stretches by the factor given, or by the one that the request needs, rounded up to a hundredth.

    Raises:
        UsageError: YaRN for a checkpoint whose angles are scaled in another way.
    """
    window, total = trained_window(config), prompt + new_tokens
    factor = _factor(config, rope, total)
    if factor is not None and config.rope_parameters.get("rope_type") == "linear":
        raise UsageError(
            f"the request takes {total:,} tokens, the checkpoint's window is {window:,} with linear scaling of "
            "positions, which YaRN cannot be added to; give --rope none"
        )
    if total <= window and factor is None and rope == "auto" and not beyond:
        return Stretch(None, None)
    size = f"the longest request takes {prompt:,} + {new_tokens:,} = {total:,} tokens"
    how = _how(config, factor, total)
    if total > window:
        return Stretch(factor, f"warning: {size}, beyond the trained window of {window:,}; rope: {how}")
    return Stretch(factor, f"{size}, within the trained window of {window:,}; rope: {how}")


def window_note(config: Any) -> str | None:
    """What to tell of a config whose window is more than its own YaRN reaches; None where it is not."""
    factor, original = yarn_factor(config), original_window(config)
    window, reach = config.max_position_embeddings, int(original * factor)
    if config.rope_parameters.get("rope_type") != "yarn" or window <= reach:
        return None
    return (
        f"note: max_position_embeddings is {window:,} in config.json, and its YaRN, factor {factor:.10g} of "
        f"{original:,}, reaches {reach:,}; {window:,} is taken for the trained window"
    )


def _factor(config: Any, rope: str, total: int) -> float | None:
    kind, _, given = rope.partition(":")
    if given:
        return float(given)
    own = yarn_factor(config)
    needed = max(own, -(-100 * total // original_window(config)) / 100)
    stretched = kind != "none" and needed > own and (kind == "yarn" or total > trained_window(config))
    return needed if stretched else None


def _how(config: Any, factor: float | None, total: int) -> str:
    original = original_window(config)
    if factor is None:
        own = yarn_factor(config)
        return f"the checkpoint's own YaRN, factor {own:.10g} of {original:,}" if own > 1 else "none, as trained"
    reach = int(original * factor)
    short = "" if reach >= total else ", which is less than the request"
    return f"YaRN, factor {factor:.10g} of {original:,}, up to {reach:,}{short}"


def stretch_config(config: Any, factor: float) -> None:
    """Sets YaRN with this factor in a text config; its other rotary settings, YaRN's too, stay as they are."""
    config.rope_parameters = {
        **config.rope_parameters,
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original_window(config),
    }
