"""Norms and rotations in fewer operations than transformers' own modules take.

An eager operation reads and writes all tokens once, and a norm is eight of them, twelve with a gate, and a rotation
five for q and five for k. On a GPU torch has a norm of one kernel, and a gate is two more; a rotation here is three
operations. None rounds more often than the modules, which round after each operation. A kind of module is exchanged
only if its own code, tried on random rows, gives the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from longgen.model.exchange import (
    ROTATION,
    Exchanged,
    exchange,
    exchanged,
    is_gated_norm,
    is_norm,
    rotating_forward,
    with_names,
)

Rotated = tuple[torch.Tensor, torch.Tensor]
Rotation = Callable[..., Rotated]
Trial = Callable[[Callable[..., Any]], bool]

_SAMPLE_ROWS, _SAMPLE_DIM = 3, 8


def fuse_layers(model: nn.Module) -> int:
    """Exchanges the norms and rotations of `model`, but for those that were exchanged already.

    Returns:
        How many modules were changed.
    """
    fused_kind: Callable[[Any], Any] = cache(_fused_kind)
    return exchange(model, lambda name, module: fused_kind(type(module)))


def _fused_kind(kind: Any) -> Any:
    """What modules of a kind become; None: what they are."""
    if issubclass(kind, Exchanged):
        return None
    if is_norm(kind):
        norm = _agreeing((_scaling_norm, _shifted_norm), partial(_try_norm, kind))
        return exchanged(kind, norm) if norm else None
    if is_gated_norm(kind):
        norm = _agreeing((_gated_norm,), partial(_try_gated_norm, kind))
        return exchanged(kind, norm) if norm else None
    forward = rotating_forward(kind)
    if forward is None:
        return None
    rotation = _agreeing((rotate_all, rotate_first), partial(_try_rotation, forward.__globals__[ROTATION]))
    return exchanged(kind, with_names(forward, {ROTATION: rotation})) if rotation else None


def rotate_all(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> Rotated:
    """Rotary position embedding (Su et al., RoFormer, 2021) in the order of GPT-NeoX: channel i turns with i + D/2.

    Args:
        q, k: [B, heads, n, D].
        cos, sin: [B, n, D] of the positions, both halves alike.
        unsqueeze_dim: where cos and sin lack the heads.

    Returns:
        q and k, turned.
    """
    half = cos.shape[-1] // 2
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    angles = (cos, -sin[..., :half], sin[..., half:])
    return _turned(q, *angles), _turned(k, *angles)


def rotate_first(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> Rotated:
    """The same of the first channels alone, as many as cos and sin have."""
    width = cos.shape[-1]
    turned = rotate_all(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim)
    if width == q.shape[-1]:
        return turned
    return torch.cat((turned[0], q[..., width:]), dim=-1), torch.cat((turned[1], k[..., width:]), dim=-1)


def _turned(x: torch.Tensor, cos: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """`first` and `second` are what each half of the channels takes of the other."""
    half = first.shape[-1]
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], first)
    turned[..., half:].addcmul_(x[..., :half], second)
    return turned


def _scaling_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The forward of an RMSNorm (Zhang and Sennrich, 2019) over the last dimension, times its weight."""
    return F.rms_norm(x, module.weight.shape, module.weight, _epsilon(module))


def _shifted_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The same times 1 + weight, a sum that has no room in the model's own type."""
    return F.rms_norm(x.float(), module.weight.shape, 1 + module.weight.float(), _epsilon(module)).type_as(x)


def _gated_norm(module: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """The forward of an RMSNorm of x [rows, channels], times its weight and SiLU of a gate like x."""
    return F.silu(gate).mul_(_scaling_norm(module, x))


def _epsilon(module: Any) -> float:
    return module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps


def _agreeing(candidates: Sequence[Callable[..., Any]], trial: Trial) -> Callable[..., Any] | None:
    """The first candidate that a trial finds to do the same; None too where a kind cannot be tried at all."""
    for candidate in candidates:
        # Whatever a kind that is not known yet raises means that it is left alone.
        with suppress(Exception), torch.no_grad(), torch.device("cpu"):
            if trial(candidate):
                return candidate
    return None


def _try_norm(kind: Any, norm: Callable[..., torch.Tensor]) -> bool:
    return _same_norm(kind, norm, _sample(_SAMPLE_ROWS, _SAMPLE_DIM))


def _try_gated_norm(kind: Any, norm: Callable[..., torch.Tensor]) -> bool:
    x, gate = _sample(2 * _SAMPLE_ROWS, _SAMPLE_DIM).chunk(2)
    return _same_norm(kind, norm, x, gate)


def _same_norm(kind: Any, norm: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> bool:
    """Not so where the forward of the kind takes more than these."""
    module = kind(_SAMPLE_DIM, eps=0.1).float()
    module.weight.copy_(torch.linspace(0.5, 2, _SAMPLE_DIM))
    takes = len(inspect.signature(module.forward).parameters)
    return takes == len(inputs) and _alike(norm(module, *inputs), module(*inputs))


def _try_rotation(own: Rotation, rotation: Rotation) -> bool:
    """Of all channels, and of the first ones alone where a function can do that."""
    q, k = _sample(1, 2, _SAMPLE_ROWS, _SAMPLE_DIM), _sample(1, 1, _SAMPLE_ROWS, _SAMPLE_DIM)
    whole, part = ((_angles(width), _angles(width)) for width in (_SAMPLE_DIM, _SAMPLE_DIM // 2))
    if not all(map(_alike, own(q, k, *whole), rotation(q, k, *whole))):
        return False
    try:
        expected = own(q, k, *part)
    except RuntimeError:  # of shapes that do not match
        return rotation is rotate_all
    return rotation is rotate_first and all(map(_alike, expected, rotation(q, k, *part)))


def _angles(width: int) -> torch.Tensor:
    """What cos or sin could be: both halves alike."""
    return _sample(1, _SAMPLE_ROWS, width // 2).repeat(1, 1, 2)


def _sample(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-6)
