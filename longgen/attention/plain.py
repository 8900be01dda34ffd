"""Attention in plain torch operations: any device, dtype and head size; the last resort."""

from __future__ import annotations

from dataclasses import replace

import torch

from longgen.attention.call import AttentionCall, Partial, visible

SCORES_AT_ONCE = 1 << 26  # entries of the score matrix held at a time (256 MiB in fp32)


class PlainTorch:
    """Scores, softmax and product in fp32, a few query rows at a time."""

    name = "plain-torch"

    def refuses(self, call: AttentionCall) -> str | None:
        """Never refuses."""
        return None

    def __call__(self, call: AttentionCall) -> Partial:
        n, m = call.q.shape[1], call.k.shape[1]
        rows = max(1, SCORES_AT_ONCE // (call.q.shape[0] * m))
        k, v = (x.float().repeat_interleave(call.groups, 0) for x in (call.k, call.v))
        outs, lses = [], []
        for start in range(0, n, rows):
            stop = min(n, start + rows)
            end = m - n + stop if call.causal else m  # of the keys that any of these rows sees
            piece = replace(call, q=call.q[:, start:stop], k=call.k[:, :end])
            scores = piece.q.float() @ k[:, :end].transpose(1, 2) * call.scale
            seen = visible(piece)  # not of all rows at once: with a past, that would be as large as the keys
            if seen is not None:
                scores = scores.masked_fill(~seen, -torch.inf)
            lse = scores.logsumexp(-1)
            outs.append((scores - lse[..., None]).exp() @ v[:, :end])
            lses.append(lse)
        return torch.cat(outs, 1), torch.cat(lses, 1)
