"""Rotary embedding with angles in float64, exact at positions of millions.

transformers multiplies float32 positions by float32 frequencies: the angle is off by 0.1 rad at 4 million tokens, and
above 2**24 neighbouring positions share one float. Here both factors are float64 and only cos and sin are rounded.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from longgen.errors import CheckpointError
from longgen.model.text_config import HYBRID_TYPES, head_dim

SUPPORTED_ROPE_TYPES = ("default", "linear", "yarn")
_WINDOW = "original_max_position_embeddings"


def check_rope(config: Any) -> None:
    """Raises CheckpointError if the rotary settings of `config` (a transformers text config) are not supported."""
    parameters = config.rope_parameters
    if parameters.get("rope_theta") is None:
        raise CheckpointError(f"rope_parameters without one rope_theta for all layers are not supported: {parameters}")
    kind = parameters.get("rope_type", "default")
    if kind == "dynamic":
        raise CheckpointError(
            "rope type 'dynamic' changes every angle as the sequence grows, so keys already cached would be wrong; "
            "set rope_scaling to null, or to yarn, in config.json"
        )
    if kind not in SUPPORTED_ROPE_TYPES:
        raise CheckpointError(f"rope type {kind!r} is not supported; supported are {', '.join(SUPPORTED_ROPE_TYPES)}")
    if kind in ("linear", "yarn") and parameters.get("factor") is None:
        raise CheckpointError(f"rope type {kind!r} needs a factor in config.json's rope_scaling")
    _check_numbers(config)
    if kind == "yarn":
        _check_yarn(parameters)


def _check_numbers(config: Any) -> None:
    """transformers takes these numbers as they come, strings too."""
    parameters = config.rope_parameters
    _check_number(parameters, "rope_theta", 1, 1e30)
    for name in ("factor", "attention_factor", "partial_rotary_factor"):
        _check_number(parameters, name, 1e-6, 1e6)
    for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        if parameters.get(name) != 0:  # which means the default
            _check_number(parameters, name, 1e-6, 1e6)
    _check_number(parameters, _WINDOW, 0, 1e15)
    size, dim = head_dim(config), _rotary_dim(config)
    if not 2 <= dim <= size or dim % 2:
        raise CheckpointError(f"rotary angles for {dim} of a head's {size} numbers are not possible: it must be even")
    if dim != size and config.model_type not in HYBRID_TYPES:
        raise CheckpointError(
            f"partial_rotary_factor is {parameters['partial_rotary_factor']} in config.json's rotary settings, but "
            f"models of type {config.model_type} turn whole heads; remove it"
        )
    section = parameters.get("mrope_section")
    if section is not None and not (
        isinstance(section, list) and len(section) == 3 and all(isinstance(pairs, int) for pairs in section)
    ):
        raise CheckpointError(f"mrope_section is {section!r} in config.json; it must be a list of three whole numbers")


def _check_yarn(parameters: dict[str, Any]) -> None:
    """What YaRN asks of numbers that are numbers."""
    factor, truncate = parameters["factor"], parameters.get("truncate", True)
    fast, slow = parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1
    if factor < 1:
        raise CheckpointError(f"factor is {factor!r} in config.json's rotary settings; YaRN's must be 1 or more")
    if fast <= slow:
        raise CheckpointError(
            f"beta_fast is {fast} in config.json's rotary settings; it must be above beta_slow, {slow}"
        )
    if not isinstance(truncate, bool):
        raise CheckpointError(f"truncate is {truncate!r} in config.json's rotary settings; it must be true or false")


def _check_number(parameters: dict[str, Any], name: str, above: float, below: float) -> None:
    value = parameters.get(name)
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not above < value < below:
        raise CheckpointError(
            f"{name} is {repr(value)[:80]} in config.json's rotary settings; it must be a number above {above:g} and "
            f"below {below:g}"
        )


def _rotary_dim(config: Any) -> int:
    return int(head_dim(config) * config.rope_parameters.get("partial_rotary_factor", 1.0))


def rotary_frequencies(config: Any) -> tuple[torch.Tensor, float]:
    """The inverse frequencies of `config` and the factor on cos and sin.

    Returns:
        inv_freq: float64 [rotary_dim / 2], radians per token; and the attention factor (1.0 but for YaRN).
    """
    parameters = config.rope_parameters
    dim = _rotary_dim(config)
    period_root = float(parameters["rope_theta"]) ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    kind = parameters.get("rope_type", "default")
    if kind == "linear":
        return 1.0 / (period_root * float(parameters["factor"])), 1.0
    if kind == "yarn":
        return _yarn_frequencies(config, period_root, dim)
    return 1.0 / period_root, 1.0


def yarn_factor(config: Any) -> float:
    """By how much YaRN stretches the window that the model was first trained with; 1 without YaRN."""
    parameters = config.rope_parameters
    return float(parameters["factor"]) if parameters.get("rope_type") == "yarn" else 1.0


def original_window(config: Any) -> int:
    """Tokens that the model was trained with before YaRN."""
    parameters = config.rope_parameters
    if parameters.get("rope_type") == "yarn":
        return int(parameters[_WINDOW])
    return int(config.max_position_embeddings)


def trained_window(config: Any) -> int:
    """Tokens that a text config's model was made for: its window, stretched by YaRN where the config says so."""
    return max(config.max_position_embeddings, int(original_window(config) * yarn_factor(config)))


def _yarn_frequencies(config: Any, period_root: torch.Tensor, dim: int) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv:2309.00071, section 3.2): slow pairs are interpolated, fast ones left alone."""
    parameters = config.rope_parameters
    factor = yarn_factor(config)
    window = parameters[_WINDOW]

    def pair_with(rotations: float) -> float:
        base = float(parameters["rope_theta"])
        return dim * math.log(window / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = pair_with(parameters.get("beta_fast") or 32)
    high = pair_with(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    inv_freq = (interpolated / factor + (1 - interpolated)) / period_root
    return inv_freq, _yarn_attention_factor(parameters, factor)


def _yarn_attention_factor(parameters: dict[str, Any], factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


class ExactRotary(nn.Module):
    """Takes the place of a model's `rotary_emb`: same call, same result at short positions, exact at any.

    Args:
        config: a transformers text config that check_rope() has accepted.
        device: where the model is; the module does not move with it.
    """

    inv_freq: torch.Tensor

    def __init__(self, config: Any, device: torch.device) -> None:
        super().__init__()
        inv_freq, self.attention_factor = rotary_frequencies(config)
        # A plain attribute, not a buffer: model.to(torch.bfloat16) would round a buffer.
        self.inv_freq = inv_freq.to(device)
        # Multimodal models rotate some pairs by height and width positions (interleaved: pair % 3 is 1 or 2).
        section = config.rope_parameters.get("mrope_section") or (11, 11, 10)
        self._axis_pairs = tuple((axis, slice(axis, section[axis] * 3, 3)) for axis in (1, 2))

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin for `position_ids`.

        Args:
            x: gives the dtype of the result.
            position_ids: integers [B, n], or [3, B, n] (time, height, width), or [4, B, n] (text first, ignored).

        Returns:
            cos, sin: [B, n, rotary_dim] in x's dtype, scaled by the attention factor.
        """
        angles = position_ids.to(torch.float64).unsqueeze(-1) * self.inv_freq
        if angles.ndim == 4:
            angles = self._merge_axes(angles[-3:])
        angles = torch.cat((angles, angles), dim=-1)
        return self._scaled(angles.cos(), x.dtype), self._scaled(angles.sin(), x.dtype)

    def _scaled(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (values * self.attention_factor).to(dtype)

    def _merge_axes(self, angles: torch.Tensor) -> torch.Tensor:
        merged = angles[0].clone()
        for axis, pairs in self._axis_pairs:
            merged[..., pairs] = angles[axis][..., pairs]
        return merged
