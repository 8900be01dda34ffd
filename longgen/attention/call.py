"""What one attention call is: the arguments every backend takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Attention of some query rows of one slot over one run of keys.

    Attributes:
        q: [q_heads, n, head_dim]; heads of one KV head lie next to each other (GQA).
        k, v: [kv_heads, m, head_dim], q's dtype; any strides as long as head_dim is contiguous.
        scale: factor of the dot products.
        causal: row i sees key j only if j <= i + m - n (aligned at the last row and the last key); else all keys.
        window: with causal, row i sees only the last `window` of those keys, itself included.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    causal: bool = False
    window: int | None = None

    @property
    def groups(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[0] // self.k.shape[0]

    def simplified(self) -> AttentionCall:
        """The same call without a mask that hides nothing, so that more backends take it."""
        n, m = self.q.shape[1], self.k.shape[1]
        window = None if self.window is None or self.window >= m else self.window
        return replace(self, causal=self.causal and (n > 1 or window is not None), window=window)

    @property
    def sees_past(self) -> bool:
        """Whether there are keys that a causal mask without a window hides from no row: those before the rows' own."""
        return self.causal and self.window is None and self.k.shape[1] > self.q.shape[1]

    def split(self) -> tuple[AttentionCall, AttentionCall]:
        """A call that `sees_past` as two over disjoint keys: the rows' own, causal and square; the past, unmasked."""
        past = self.k.shape[1] - self.q.shape[1]
        own = replace(self, k=self.k[:, past:], v=self.v[:, past:])
        return own, replace(self, k=self.k[:, :past], v=self.v[:, :past], causal=False)


# (out, lse): out [q_heads, n, head_dim] in q's dtype (backends may return fp32),
# lse [q_heads, n] fp32, the NATURAL logarithm of the sum of exponentials.
Partial = tuple[torch.Tensor, torch.Tensor]


def visible(call: AttentionCall) -> torch.Tensor | None:
    """Boolean [n, m] of the keys each row sees; None when it sees all."""
    if not call.causal:
        return None
    n, m = call.q.shape[1], call.k.shape[1]
    last = torch.arange(n, device=call.q.device)[:, None] + (m - n)
    key = torch.arange(m, device=call.q.device)[None, :]
    seen = key <= last
    if call.window is not None:
        seen &= key > last - call.window
    return seen


def reference(call: AttentionCall) -> Partial:
    """Attention in plain torch, in float64: the oracle every backend is checked against."""
    q, k, v = call.q.double(), call.k.double(), call.v.double()
    k, v = k.repeat_interleave(call.groups, 0), v.repeat_interleave(call.groups, 0)
    scores = q @ k.transpose(1, 2) * call.scale
    seen = visible(call)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse.float()
