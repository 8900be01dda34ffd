"""Exact merge of attention over disjoint sets of keys, by their log-sum-exp.

Source: FlashAttention (Dao et al. 2022, section 3.1) and the split-KV form of Flash-Decoding (2023).
"""

from __future__ import annotations

import torch

from longgen.attention.call import Partial

ALL_HEADS = slice(None)


class MergedAttention:
    """Accumulates partial attention of the same query rows over disjoint key sets, in fp32.

    The first part must cover all heads; later ones may cover some. Their order changes the result by rounding only.
    """

    def __init__(self, first: Partial) -> None:
        """Starts from one part: (out [q_heads, n, head_dim], lse [q_heads, n] fp32, natural logarithm).

        The part's tensors are taken over and may be changed.
        """
        out, lse = first
        self._out, self._lse = out.float(), lse

    def add(self, part: Partial, heads: slice = ALL_HEADS) -> None:
        """Adds a part for the query heads `heads`, in place."""
        out, lse = part
        old = self._lse[heads]
        merged = torch.logaddexp(old, lse)
        self._out[heads] *= (old - merged).exp()[..., None]
        self._out[heads] += out * (lse - merged).exp()[..., None]
        self._lse[heads] = merged

    def partial(self) -> Partial:
        """What was merged, as one part: (out fp32, lse)."""
        return self._out, self._lse

    def result(self) -> torch.Tensor:
        """The merged output, [q_heads, n, head_dim] fp32."""
        return self._out
