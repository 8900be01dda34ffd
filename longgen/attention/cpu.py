"""Attention on the CPU through torch's own flash kernel, which returns the log-sum-exp."""

from __future__ import annotations

import torch

from longgen.attention.call import AttentionCall, Partial, visible
from longgen.attention.merge import MergedAttention

# Rows per call where a mask must be written out: bounds it at ROWS x (window + ROWS) entries.
MASKED_ROWS = 256


class CpuFlash:
    """torch's `_scaled_dot_product_flash_attention_for_cpu`: fp32, bf16 and fp16, any head size."""

    name = "torch-flash-cpu"

    def refuses(self, call: AttentionCall) -> str | None:
        """Why this backend cannot take the call, or None."""
        if call.q.device.type != "cpu":
            return f"tensors are on {call.q.device.type}"
        return None

    def __call__(self, call: AttentionCall) -> Partial:
        n, m = call.q.shape[1], call.k.shape[1]
        if not call.causal:
            return self._folded(call)
        if n == m and call.window is None:
            out, lse = _flash(call.q, call, is_causal=True)
            return out[0], lse[0]
        if call.sees_past:  # the kernel aligns its causal mask at the first key
            own, past = call.split()
            merged = MergedAttention(self(own))
            merged.add(self(past))
            return merged.partial()
        return self._masked(call)

    def _folded(self, call: AttentionCall) -> Partial:
        """All keys visible: the query heads of a KV head become rows, so each key is read once (3-4 times faster)."""
        (q_heads, n, head_dim), kv_heads = call.q.shape, call.k.shape[0]
        out, lse = _flash(call.q.reshape(kv_heads, call.groups * n, head_dim), call)
        return out.reshape(q_heads, n, head_dim), lse.reshape(q_heads, n)

    def _masked(self, call: AttentionCall) -> Partial:
        """Rows in pieces, each over the keys it can see, with the mask written out (the kernel knows no window)."""
        n, m = call.q.shape[1], call.k.shape[1]
        outs, lses = [], []
        for start in range(0, n, MASKED_ROWS):
            stop = min(n, start + MASKED_ROWS)
            end = m - n + stop
            begin = 0 if call.window is None else max(0, m - n + start + 1 - call.window)
            k, v = call.k[:, begin:end], call.v[:, begin:end]
            piece = AttentionCall(call.q[:, start:stop], k, v, call.scale, True, call.window)
            seen = visible(piece)
            bias = None
            if seen is not None:
                bias = torch.zeros(seen.shape, dtype=call.q.dtype).masked_fill_(~seen, -torch.inf)[None, None]
            out, lse = _flash(piece.q, piece, attn_mask=bias)
            outs.append(out[0])
            lses.append(lse[0])
        return torch.cat(outs, 1), torch.cat(lses, 1)


def _flash(
    q: torch.Tensor, call: AttentionCall, *, is_causal: bool = False, attn_mask: torch.Tensor | None = None
) -> Partial:
    """The kernel with a batch dimension: out [1, heads, rows, head_dim], lse [1, heads, rows]."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[None], call.k[None], call.v[None], 0.0, is_causal, attn_mask=attn_mask, scale=call.scale
    )
    return out, lse
