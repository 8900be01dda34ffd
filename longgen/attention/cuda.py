"""Attention on CUDA: FlashAttention 2, 3 and 4 where they are installed, and torch's own cuDNN and flash kernels.

All take K and V head-major, by strides, and return the natural-log LSE. Causal masks are aligned at the last row and
key; a window is the (left, right) pair of the FlashAttention papers' code, left not counting the row's own key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from longgen.attention.call import AttentionCall, Partial
from longgen.attention.merges import Merges

HALF = (torch.bfloat16, torch.float16)


def _common_objection(call: AttentionCall, *, largest_head: int = 256) -> str | None:
    """What none of the fused CUDA kernels takes."""
    if call.q.device.type != "cuda":
        return f"tensors are on {call.q.device.type}"
    if call.q.dtype not in HALF:
        return f"dtype {call.q.dtype} is not bfloat16 or float16"
    head_dim = call.q.shape[2]
    if head_dim % 8 or head_dim > largest_head:
        return f"head size {head_dim} is not a multiple of 8 up to {largest_head}"
    return None


def _token_major(x: torch.Tensor) -> torch.Tensor:
    """[heads, tokens, head_dim] as [1, tokens, heads, head_dim], a view."""
    return x.transpose(0, 1)[None]


def _window(call: AttentionCall) -> tuple[int, int]:
    return (-1, -1) if call.window is None else (call.window - 1, 0)


class TorchFlash:
    """FlashAttention-2 as built into torch; splits the keys of a few rows over the whole GPU."""

    name = "torch-flash"

    def refuses(self, call: AttentionCall) -> str | None:
        """Why this backend cannot take the call, or None."""
        reason = _common_objection(call)
        if reason is None and torch.cuda.get_device_capability(call.q.device) < (8, 0):
            reason = "the GPU is older than compute capability 8.0"
        return reason

    def __call__(self, call: AttentionCall) -> Partial:
        window = {} if call.window is None else {"window_size_left": call.window - 1, "window_size_right": 0}
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(_token_major(x) for x in (call.q, call.k, call.v)),
            None,
            None,
            call.q.shape[1],
            call.k.shape[1],
            0.0,
            call.causal,
            False,
            scale=call.scale,
            **window,
        )
        return out[0].transpose(0, 1), lse[0]


class TorchCudnn:
    """cuDNN's fused attention through torch.

    It builds a plan for every new shape. So only multiples of 256 keys are taken, and without a mask they are split
    into powers of two, whose parts are merged: a few plans serve every length.
    """

    name = "torch-cudnn"
    key_multiple = 256

    def __init__(self, merges: Merges | None = None) -> None:
        """`merges`: of its own parts; None: in plain torch."""
        self._merges = merges or Merges()

    def refuses(self, call: AttentionCall) -> str | None:
        """Why this backend cannot take the call, or None."""
        n, m = call.q.shape[1], call.k.shape[1]
        reason = _common_objection(call)
        if reason is None and not torch.backends.cudnn.is_available():
            reason = "torch was built without cuDNN"
        if reason is None and call.window is not None:
            reason = "no sliding window through torch"
        if reason is None and call.causal and n != m:
            reason = "its causal mask is aligned at the first key"
        if reason is None and m % self.key_multiple:
            reason = f"{m} keys are not a multiple of {self.key_multiple}: every new length costs a plan"
        return reason

    def __call__(self, call: AttentionCall) -> Partial:
        if call.causal:
            return self._attend(call)
        parts = [
            self._attend(replace(call, k=call.k[:, start:stop], v=call.v[:, start:stop]))
            for start, stop in powers_of_two(call.k.shape[1])
        ]
        if len(parts) == 1:
            return parts[0]
        merged = self._merges.begin(parts[0])
        for part in parts[1:]:
            merged.add(part)
        return merged.partial()

    def _attend(self, call: AttentionCall) -> Partial:
        # Without grouped heads: a KV head's query heads become rows (no mask), or share its keys by stride (causal).
        (q_heads, n, head_dim), kv_heads = call.q.shape, call.k.shape[0]
        if call.causal:
            q = call.q.view(kv_heads, call.groups, n, head_dim).transpose(0, 1)
            k, v = (x.expand(call.groups, -1, -1, -1) for x in (call.k, call.v))
        else:
            q, k, v = call.q.reshape(1, kv_heads, call.groups * n, head_dim), call.k[None], call.v[None]
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, call.causal, False, scale=call.scale
        )
        lse = lse.reshape(lse.shape[:3])
        if call.causal:
            out, lse = out.transpose(0, 1), lse.transpose(0, 1)
        return out.reshape(q_heads, n, head_dim), lse.reshape(q_heads, n)


def powers_of_two(count: int) -> Iterator[tuple[int, int]]:
    """Splits range(count) into pieces [start, stop) whose lengths are different powers of two, longest first."""
    start = 0
    while start < count:
        stop = start + (1 << ((count - start).bit_length() - 1))
        yield start, stop
        start = stop


class FlashPackage:
    """A `flash_attn_func` of one of the FlashAttention packages."""

    def __init__(self, name: str, function: Callable[..., Any], least: tuple[int, int], lse_flag: str) -> None:
        """
        Args:
            least: compute capability needed.
            lse_flag: the keyword that makes it return the LSE.
        """
        self.name = name
        self._function, self._least, self._lse_flag = function, least, lse_flag

    def refuses(self, call: AttentionCall) -> str | None:
        """Why this backend cannot take the call, or None."""
        reason = _common_objection(call)
        if reason is None:
            capability = torch.cuda.get_device_capability(call.q.device)
            if capability < self._least:
                reason = f"the GPU's compute capability {capability} is below {self._least}"
        return reason

    def __call__(self, call: AttentionCall) -> Partial:
        result = self._function(
            *(_token_major(x) for x in (call.q, call.k, call.v)),
            softmax_scale=call.scale,
            causal=call.causal,
            window_size=_window(call),
            **{self._lse_flag: True},
        )
        out, lse = result[0], result[1]
        return out[0].transpose(0, 1), lse[0]


class Missing:
    """A backend whose package cannot be imported; kept in the list so that its absence is explained."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self._reason = name, reason

    def refuses(self, call: AttentionCall) -> str | None:
        """Always: why it could not be imported."""
        return self._reason

    def __call__(self, call: AttentionCall) -> Partial:
        raise RuntimeError(self._reason)


def flash_package(
    name: str, modules: tuple[str, ...], least: tuple[int, int], lse_flag: str = "return_attn_probs"
) -> FlashPackage | Missing:
    """The first of `modules` that can be imported, as a backend."""
    reasons = []
    for module in modules:
        try:
            return FlashPackage(name, import_module(module).flash_attn_func, least, lse_flag)
        except Exception as error:  # a broken binary package raises more than ImportError
            reasons.append(f"{module}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
    return Missing(name, "not importable (" + "; ".join(reasons) + ")")
