"""Counts the bytes of tensors that are alive while something runs, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """While it is entered, `peak` is the most bytes of tensors made within it and alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            key = storage._cdata
            if key not in given and key not in self._alive:
                self._alive[key] = storage.nbytes()
                self._now += storage.nbytes()
                weakref.finalize(storage, self._free, key)
        self.peak = max(self.peak, self._now)
        return result

    def _free(self, key: int) -> None:
        self._now -= self._alive.pop(key, 0)


def _storages(tree: Any) -> Iterator[Any]:
    return (leaf.untyped_storage() for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor))
