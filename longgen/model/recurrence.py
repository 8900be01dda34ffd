"""Which code the recurrent layers of a hybrid model run: the kernels of other packages, or transformers' torch code."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from longgen.errors import UsageError
from longgen.model.convolution import CONVOLUTION, use_kernel
from longgen.model.exchange import Exchanged, calling_forward, exchange, exchanged, with_names
from longgen.model.text_config import HYBRID_TYPES

# What a gated-delta layer's forward calls, and the packages whose kernels transformers puts in their place.
_FUNCTIONS = (
    CONVOLUTION,
    "causal_conv1d_update",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
)
_PACKAGES = ("fla", "causal_conv1d")


def slow_recurrence_note(config: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """What to tell the user if recurrent layers run on slower code than there is for `device`; else None."""
    if config.model_type not in HYBRID_TYPES or device.type != "cuda":
        return None
    if find_spec("fla") is None:
        return "flash-linear-attention is not installed: recurrent layers run on slower torch code"
    if _is_exact(dtype):
        return "in float32 recurrent layers run on slower torch code, which is exact; --dtype bfloat16 uses kernels"
    return None


def choose_recurrence(model: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Makes the recurrent layers of `model` run on torch code where the kernels fail or are not exact.

    On a CPU they fail. In fp32 they multiply in TF32, one of them whatever Triton is told: the logits of a hybrid are
    off by 1e-3 of the largest then, by 4e-6 on torch code. Elsewhere convolutions run on a kernel where there is one.

    Returns:
        token_major: whether convolutions want the channels of a token side by side, see `use_kernel`.

    Raises:
        UsageError: kernels are installed and this version of transformers does not let them be avoided.
    """
    if device.type == "cpu":
        _use_torch_code(model, "on the CPU", "need a GPU; use --device cuda")
    elif _is_exact(dtype):
        _use_torch_code(model, "in fp32", "round it to TF32; use --dtype bfloat16")
    else:
        return use_kernel(model)
    return False


def _is_exact(dtype: torch.dtype) -> bool:
    return torch.finfo(dtype).bits >= torch.finfo(torch.float32).bits


def _use_torch_code(model: nn.Module, where: str, why_not: str) -> None:
    """Makes the recurrent layers of `model` run on torch code, and refuses with the reason if that cannot be.

    Where flash-linear-attention or causal-conv1d can be imported, transformers calls their kernels on any device and
    any tensor. It keeps the torch function of each as `__wrapped__`. A layer's forward finds the functions among the
    names of its module, so the layers of this model get a forward with names of its own; other models of the process
    are left as they are.
    """
    kind_on_torch: Callable[[Any], Any] = cache(_kind_on_torch)
    changed = exchange(model, lambda name, module: kind_on_torch(type(module)))
    installed = [package for package in _PACKAGES if find_spec(package) is not None]
    if installed and not changed:
        raise UsageError(
            f"recurrent layers cannot run {where} while {', '.join(installed)} is installed, whose kernels {why_not}, "
            "or an environment without it"
        )


def _kind_on_torch(kind: Any) -> Any:
    """What modules of a kind that calls any of _FUNCTIONS become, to call their torch code; None: what they are."""
    forwards = {name: forward for name in _FUNCTIONS if (forward := calling_forward(kind, name))}
    if forwards and issubclass(kind, Exchanged):
        return kind  # exchanged for another provider over the same weights
    called = {name: forward.__globals__[name] for name, forward in forwards.items()}
    torch_functions = {name: function.__wrapped__ for name, function in called.items() if _is_wrapped(function)}
    if not called or len(torch_functions) < len(called):
        return None
    return exchanged(kind, with_names(inspect.unwrap(kind.forward), torch_functions))


def _is_wrapped(function: Any) -> bool:
    return callable(getattr(function, "__wrapped__", None))
