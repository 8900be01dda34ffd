"""Where the small operations of transformers' decoder layers can be exchanged for others: norms and rotations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn

ROTATION = "apply_rotary_pos_emb"


def is_norm(module: nn.Module) -> bool:
    """Whether a module is one of the kinds of RMSNorm."""
    return type(module).__name__.endswith("RMSNorm")


def forward_of(module: nn.Module) -> Any:
    """The function that a module's forward is, its own or its type's."""
    return getattr(module.forward, "__func__", module.forward)


def rotating_forward(module: nn.Module) -> FunctionType | None:
    """The undecorated forward of an attention module that applies rotary angles; else None."""
    forward = inspect.unwrap(forward_of(module))
    if isinstance(forward, FunctionType) and ROTATION in forward.__code__.co_names and ROTATION in forward.__globals__:
        return forward
    return None


def with_rotation(forward: FunctionType, rotate: Callable[..., Any]) -> FunctionType:
    """A copy of such a forward that applies rotary angles by `rotate`."""
    names = forward.__globals__ | {ROTATION: rotate}
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy
