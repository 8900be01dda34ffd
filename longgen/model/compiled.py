"""Norms, rotary angles and dense MLPs compiled by torch.compile, for full chunks.

Each is a few small operations over all tokens, so eager ones are bound by device memory in prefill. Code is compiled
for a full chunk, of one shape. Everything else, such as the last chunk of a prompt or a batch, runs the same code
eager; so does a single token, whose bound is the host: calling what was compiled takes it longer than starting the
operations. Inductor keeps what it compiled on disk.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any

import torch
from torch import nn

from longgen.errors import LongGenError
from longgen.model.exchange import ROTATION, exchange, exchanged, is_norm, rotating_forward, with_names

_MLP_PARTS = ("gate_proj", "up_proj", "down_proj")


def compile_layers(model: nn.Module, sizes: Collection[int], backend: str | Callable[..., Any] = "inductor") -> int:
    """Makes the decoder layers of `model` run on compiled code in passes of one slot whose tokens are in `sizes`.

    The modules of one role (all `input_layernorm`, say) share their compiled code. Only this model is changed.

    Args:
        backend: of torch.compile.

    Returns:
        How many modules were changed. What cannot be compiled is a LongGenError of the first pass that needs it.
    """
    compiler = _Compiler(frozenset(sizes), backend)
    return exchange(model, lambda name, module: compiler.kind(module, role=name.rpartition(".")[2]))


class _Compiler:
    """Kinds of modules that run on compiled code, one for each role."""

    def __init__(self, sizes: frozenset[int], backend: str | Callable[..., Any]) -> None:
        self._sizes, self._backend = sizes, backend
        self._kinds: dict[tuple[Any, str], Any] = {}

    def kind(self, module: nn.Module, role: str) -> Any:
        """What modules of this kind and role become; None: what they are."""
        key = type(module), role
        if key not in self._kinds:
            forward = self._forward(module, role)
            self._kinds[key] = None if forward is None else exchanged(type(module), forward)
        return self._kinds[key]

    def _forward(self, module: nn.Module, role: str) -> Callable[..., Any] | None:
        kind: Any = type(module)
        if is_norm(kind) or _is_mlp(module):
            return self._method(role, inspect.unwrap(kind.forward))
        forward = rotating_forward(kind)
        return None if forward is None else with_names(forward, {ROTATION: self._rotation(forward)})

    def _method(self, role: str, forward: Any) -> Callable[..., Any]:
        """A `forward(self, x)` of x [1, tokens, ...]."""
        return self._sized(role, forward, tokens=lambda module, x: x.shape[1] if x.ndim > 2 and len(x) == 1 else None)

    def _rotation(self, forward: FunctionType) -> Callable[..., Any]:
        """Of q, k [1, heads, tokens, head_dim], as an attention module's forward applies it."""
        rotate = inspect.unwrap(forward.__globals__[ROTATION])
        return self._sized(ROTATION, rotate, tokens=lambda q, *_: q.shape[2] if len(q) == 1 else None)

    def _sized(self, role: str, function: Any, *, tokens: Callable[..., int | None]) -> Callable[..., Any]:
        # Code of its own, since torch counts the versions it compiles of each code and gives up after a few.
        code = function.__code__.replace(co_name=f"{role}_compiled")
        copy = FunctionType(code, function.__globals__, role, function.__defaults__, function.__closure__)
        copy.__kwdefaults__ = function.__kwdefaults__
        compiled, sizes = torch.compile(copy, dynamic=False, fullgraph=True, backend=self._backend), self._sizes

        def chosen(*arguments: Any) -> Any:
            if tokens(*arguments) not in sizes:
                return function(*arguments)
            try:
                return compiled(*arguments)
            except torch._dynamo.exc.TorchDynamoException as error:
                what = " ".join(str(error).split())[:200]
                raise LongGenError(f"{role} cannot be compiled, leave --compile out: {what}") from error

        chosen.__wrapped__ = function  # type: ignore[attr-defined]
        return chosen


def _is_mlp(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, part, None), nn.Linear) for part in _MLP_PARTS)
