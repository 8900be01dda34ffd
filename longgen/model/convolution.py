"""The causal convolution of recurrent layers on flash-linear-attention's kernel, where causal-conv1d is not there.

transformers runs it on torch code then, channel by channel, and turns its input and its output for that. The kernel
reads tokens as the projection before it writes them. Single tokens stay on torch code: they call another function.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from longgen.model.exchange import calling_forward, exchange, exchanged, with_names

CONVOLUTION = "causal_conv1d_fn"  # what a layer's forward calls it
_PLACES = ("fla.modules.causal_conv1d", "fla.modules.convolution")  # of the kernel, in newer versions first
# Tokens of a trial. The kernel is tuned on its first call, for all that follow (in 0.6.0 by the channels and the kernel
# size alone), so this one must be like those.
_TRIED = 4096


def use_kernel(model: nn.Module) -> bool:
    """Makes the recurrent layers of `model` convolve on the kernel, if it gives what torch gives.

    The first time on a machine Triton compiles some variants of the kernel for the model's width, and every time it
    times them, unless flash-linear-attention has kept the result.

    Returns:
        Whether they do. It is fast on an input whose channels of a token lie side by side.
    """
    layers = [module for module in model.modules() if calling_forward(type(module), CONVOLUTION)]
    if not layers:
        return False
    if _on_kernel(type(layers[0])):
        return True  # for another provider over the same weights
    kernel = None if _attribute("causal_conv1d", CONVOLUTION) else _kernel()
    if kernel is None or not _gives_the_same(kernel, layers[0]):
        return False
    become: Callable[[Any], Any] = cache(partial(_kind_on_kernel, kernel))
    return exchange(model, lambda name, module: become(type(module))) > 0


def convolve(
    kernel: Callable[..., Any],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Causal convolution of each channel on its own, and its activation, as transformers calls it.

    Args:
        kernel: of x [B, n, channels] in any layout, to what `convolve` returns, turned, and a state.
        x: [B, channels, n].
        weight, bias: [channels, kernel size] and [channels].

    Returns:
        [B, channels, n], the channels of a token side by side.
    """
    return kernel(x.transpose(1, 2), weight, bias, activation=activation)[0].transpose(1, 2)


def _kernel() -> Callable[..., Any] | None:
    return next(filter(None, (_attribute(place, "causal_conv1d") for place in _PLACES)), None)


def _attribute(module: str, name: str) -> Any:
    """None where there is none, or where the module cannot be imported, for whatever reason."""
    try:
        return getattr(import_module(module), name, None)
    except Exception:  # a package that was built for another torch raises more than ImportError
        return None


def _gives_the_same(kernel: Callable[..., Any], layer: Any) -> bool:
    """Whether the kernel gives what the layer's own function gives on random tokens; if not, a warning says why."""
    forward = calling_forward(type(layer), CONVOLUTION)
    assert forward is not None, "a layer that convolves"
    why = "it gives something else"
    try:
        with torch.no_grad():
            weight, bias, activation = layer.conv1d.weight.squeeze(1), layer.conv1d.bias, layer.activation
            generator = torch.Generator(weight.device).manual_seed(0)
            rows = torch.randn(1, _TRIED, len(weight), generator=generator, device=weight.device, dtype=weight.dtype)
            x, rounding = rows.transpose(1, 2), 4 * torch.finfo(weight.dtype).eps
            own = inspect.unwrap(forward.__globals__[CONVOLUTION])  # transformers' wrapper says to install another
            expected = own(x.contiguous(), weight, bias, activation=activation)
            if torch.allclose(convolve(kernel, x, weight, bias, activation), expected, rtol=rounding, atol=rounding):
                return True
    except Exception as error:  # whatever a version of either package raises
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    logging.getLogger("longgen").warning("convolutions run on torch code, not on flash-linear-attention's: %s", why)
    return False


def _kind_on_kernel(kernel: Callable[..., Any], kind: Any) -> Any:
    """What modules of a kind become; None: what they are."""
    forward = calling_forward(kind, CONVOLUTION)
    return exchanged(kind, with_names(forward, {CONVOLUTION: partial(convolve, kernel)})) if forward else None


def _on_kernel(kind: Any) -> bool:
    forward = calling_forward(kind, CONVOLUTION)
    return forward is not None and getattr(forward.__globals__[CONVOLUTION], "func", None) is convolve
