"""How the forward of transformers' modules is exchanged for another, and where norms and rotations are found.

A module becomes one of a subclass with another forward. A forward that is set on the module itself would refer to it,
and keep its weights alive until the garbage collector runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from torch import nn

ROTATION = "apply_rotary_pos_emb"


class Exchanged:
    """A kind of module whose forward is not that of transformers."""


def exchanged(kind: Any, forward: Any) -> Any:
    """A kind of module like `kind` but for its forward."""
    return type(kind.__name__, (kind, Exchanged), {"forward": forward, "__module__": kind.__module__})


def exchange(model: nn.Module, become: Callable[[str, nn.Module], Any]) -> int:
    """Makes each module of `model` one of the kind that `become` gives for its name and itself, where it gives one.

    Returns:
        How many modules were changed.
    """
    changed = 0
    for name, module in model.named_modules():
        kind = become(name, module)
        if kind is not None:
            module.__class__ = kind
            changed += 1
    return changed


def with_names(forward: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """A copy of a function that finds other things under some of its global names."""
    code, found = forward.__code__, forward.__globals__ | dict(names)
    copy = FunctionType(code, found, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def is_norm(kind: Any) -> bool:
    """Whether a kind of module is an RMSNorm of some sort, of x alone."""
    return kind.__name__.endswith("RMSNorm")


def is_gated_norm(kind: Any) -> bool:
    """Whether a kind of module is an RMSNorm whose result is multiplied by a gate, as recurrent layers have it."""
    return kind.__name__.endswith("RMSNormGated")


def rotating_forward(kind: Any) -> FunctionType | None:
    """The undecorated forward of a kind of attention that applies rotary angles; else None."""
    return calling_forward(kind, ROTATION)


def calling_forward(kind: Any, name: str) -> FunctionType | None:
    """The undecorated forward of a kind of module, if it calls a function of this name; else None."""
    forward: Any = inspect.unwrap(kind.forward)
    if isinstance(forward, FunctionType) and name in forward.__code__.co_names and name in forward.__globals__:
        return forward
    return None
