"""Norms and rotations in fewer operations than transformers' own modules take, for every pass that is not compiled.

An eager operation reads and writes all tokens once, and a norm is eight of them, a rotation five for q and five for k.
torch has a norm of one kernel; a rotation here is three operations. Both round once or twice where the modules round
after each operation. A module is exchanged only if its own code, tried on random rows, gives the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from longgen.model.exchange import ROTATION, is_norm, rotating_forward, with_rotation

Rotated = tuple[torch.Tensor, torch.Tensor]

_SAMPLE_ROWS, _SAMPLE_DIM = 3, 8


def fuse_layers(model: nn.Module) -> int:
    """Exchanges the norms and rotations of `model`, but for those that were exchanged already.

    Returns:
        How many modules were changed.
    """
    fused_norm, is_rotate = cache(_fused_norm), cache(_is_rotate)
    changed = 0
    for module in model.modules():
        forward: Callable[..., Any] | None = None
        kind: Any = type(module)
        if is_norm(module):
            forward = fused_norm(kind)
        elif (rotating := rotating_forward(module)) is not None and is_rotate(rotating.__globals__[ROTATION]):
            forward = with_rotation(rotating, rotate)
        if forward is not None and "forward" not in vars(module):
            module.forward = MethodType(forward, module)
            changed += 1
    return changed


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Rotated:
    """Rotary position embedding (Su et al., RoFormer, 2021) in the order of GPT-NeoX: channel i turns with i + width/2.

    Args:
        q, k: [B, heads, n, head_dim].
        cos, sin: [B, n, width] of the positions, both halves alike; channels from `width` on do not turn.
        unsqueeze_dim: where cos and sin lack the heads.

    Returns:
        q and k, turned.
    """
    half = cos.shape[-1] // 2
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    angles = (cos, -sin[..., :half], sin[..., half:])
    return _turned(q, *angles), _turned(k, *angles)


def _turned(x: torch.Tensor, cos: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """`first` and `second` are what each half of the channels takes of the other."""
    width, half = cos.shape[-1], first.shape[-1]
    turned = x[..., :width] * cos
    turned[..., :half].addcmul_(x[..., half:width], first)
    turned[..., half:].addcmul_(x[..., :half], second)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


def _scaling_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The forward of an RMSNorm (Zhang and Sennrich, 2019) over the last dimension, times its weight."""
    return F.rms_norm(x, module.weight.shape, module.weight, _epsilon(module))


def _shifted_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The same times 1 + weight, a sum that has no room in the model's own type."""
    return F.rms_norm(x.float(), module.weight.shape, 1 + module.weight.float(), _epsilon(module)).type_as(x)


def _epsilon(module: Any) -> float:
    return module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps


@torch.no_grad()
def _fused_norm(kind: Any) -> Callable[..., torch.Tensor] | None:
    """Which of these is what a kind of norm does; None for another, as one with a gate."""
    if len(inspect.signature(kind.forward).parameters) != 2:
        return None
    module, x = kind(_SAMPLE_DIM, eps=0.1), _sample(_SAMPLE_ROWS, _SAMPLE_DIM)
    module.weight.copy_(torch.linspace(0.5, 2, _SAMPLE_DIM))
    expected = module(x)
    return next((norm for norm in (_scaling_norm, _shifted_norm) if _alike(norm(module, x), expected)), None)


@torch.no_grad()
def _is_rotate(rotation: Callable[..., Rotated]) -> bool:
    """Whether a function turns q and k as `rotate` does: all channels, and the first ones alone if it can do that."""
    q, k = _sample(1, 2, _SAMPLE_ROWS, _SAMPLE_DIM), _sample(1, 1, _SAMPLE_ROWS, _SAMPLE_DIM)
    for width in (_SAMPLE_DIM, _SAMPLE_DIM // 2):
        cos, sin = (_sample(1, _SAMPLE_ROWS, width // 2).repeat(1, 1, 2) for _ in range(2))
        try:
            expected = rotation(q, k, cos, sin)
        except RuntimeError:  # of shapes that do not match: it turns all channels
            if width == _SAMPLE_DIM:
                return False
            continue
        if not all(_alike(one, other) for one, other in zip(expected, rotate(q, k, cos, sin), strict=True)):
            return False
    return True


def _sample(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-6)
