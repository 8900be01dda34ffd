"""Exact merge of attention over disjoint sets of keys, by their log-sum-exp.

Source: FlashAttention (Dao et al. 2022, section 3.1) and the split-KV form of Flash-Decoding (2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from longgen.attention.call import Partial

ALL_HEADS = slice(None)


@dataclass(frozen=True, slots=True)
class Part:
    """Partial attention of all query heads or of some that follow each other.

    Attributes:
        out: [heads of the part, n, head_dim], any strides and float dtype.
        lse: [heads of the part, n] fp32, natural logarithm; -inf in a row that saw no key, whose `out` is finite.
        first_head: the query head that `out[0]` is of.
    """

    out: torch.Tensor
    lse: torch.Tensor
    first_head: int = 0

    @property
    def heads(self) -> slice:
        """Its query heads."""
        return slice(self.first_head, self.first_head + len(self.out))


class MergeKernel(Protocol):
    """One implementation of the merge.

    Attributes:
        name: for people.
        most_parts: parts it takes in one call, two at least. More of them move fewer bytes and hold more memory.
        in_place: whether it takes least memory when the first part is fp32 and its `out` is where the result goes.
    """

    @property
    def name(self) -> str: ...

    @property
    def most_parts(self) -> int: ...

    @property
    def in_place(self) -> bool: ...

    def refuses(self, part: Part) -> str | None:
        """Why this kernel cannot merge parts like this one, or None."""

    def __call__(self, parts: Sequence[Part], out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Merges `parts`, two to `most_parts`, in fp32.

        Args:
            parts: of which the first covers all heads, and may be changed if its `out` is fp32.
            out: [q_heads, n, head_dim], any strides and float dtype; may be the first part's own.
            lse: [q_heads, n] fp32, may be the first part's own; None: not wanted.
        """


class TorchMerge:
    """The merge in plain torch operations: any device, dtype and strides. The fallback, and the oracle."""

    name = "torch"
    most_parts = 2
    in_place = True

    def refuses(self, part: Part) -> str | None:
        """Never refuses."""
        return None

    def __call__(self, parts: Sequence[Part], out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """See MergeKernel."""
        first, second = parts
        merged = first.out.float()  # the same memory if it is fp32
        heads = second.heads
        old = first.lse[heads]
        new = torch.logaddexp(old, second.lse)
        base = new.masked_fill(new == -torch.inf, 0.0)  # no key seen by either: weights of zero, not NaN
        kept = merged[heads]
        kept *= (old - base).exp()[..., None]
        kept += second.out * (second.lse - base).exp()[..., None]
        if lse is not None:
            lse.copy_(first.lse)
            lse[heads] = new
        out.copy_(merged)


class MergedAttention:
    """Accumulates partial attention of the same query rows over disjoint key sets, in fp32.

    The first part must cover all heads; later ones may cover some. Their order changes the result by rounding only.
    Parts wait until there are as many as the kernel takes at once, or until the result is asked for.
    """

    def __init__(self, first: Partial, kernel: MergeKernel | None = None) -> None:
        """Starts from one part: (out [q_heads, n, head_dim], lse [q_heads, n] fp32, natural logarithm).

        Its tensors are taken over and may be changed. `kernel`: None is TorchMerge.
        """
        self._kernel = kernel or TorchMerge()
        out, lse = first
        self._parts = [Part(out.float() if self._kernel.in_place else out, lse)]

    def add(self, part: Partial, heads: slice = ALL_HEADS) -> None:
        """Adds a part for the query heads `heads`."""
        self.make_room()
        self._parts.append(Part(*part, heads.start or 0))

    def make_room(self) -> None:
        """Merges the parts that wait if there is no place for another. Before the next part is computed, so that its
        memory is free by then."""
        if len(self._parts) == self._kernel.most_parts:
            self._merge()

    def partial(self) -> Partial:
        """What was merged, as one part: (out fp32, lse)."""
        self._merge()
        return self._parts[0].out.float(), self._parts[0].lse

    def result(self) -> torch.Tensor:
        """The merged output, [q_heads, n, head_dim] fp32."""
        return self.partial()[0]

    def finish(self, dtype: torch.dtype) -> torch.Tensor:
        """The merged output in `dtype`, token-major, [n, q_heads, head_dim]. Ends the merge."""
        if self._kernel.in_place:
            self._merge()
        first = self._parts[0].out
        if len(self._parts) == 1:
            return first.to(dtype).transpose(0, 1)
        q_heads, n, head_dim = first.shape
        out = torch.empty((n, q_heads, head_dim), dtype=dtype, device=first.device)
        self._kernel(self._parts, out.transpose(0, 1), None)
        return out

    def _merge(self) -> None:
        """Leaves one part of those there are."""
        if len(self._parts) == 1:
            return
        first = self._parts[0]
        out = first.out if first.out.dtype == torch.float32 else torch.empty_like(first.out, dtype=torch.float32)
        self._kernel(self._parts, out, first.lse)
        self._parts = [Part(out, first.lse)]
