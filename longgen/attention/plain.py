"""Attention in plain torch operations: any device, dtype and head size; the last resort."""

from __future__ import annotations

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
        seen = visible(call)
        outs, lses = [], []
        for start in range(0, n, rows):
            part = slice(start, min(n, start + rows))
            scores = call.q[:, part].float() @ k.transpose(1, 2) * call.scale
            if seen is not None:
                scores = scores.masked_fill(~seen[part], -torch.inf)
            lse = scores.logsumexp(-1)
            outs.append((scores - lse[..., None]).exp() @ v)
            lses.append(lse)
        return torch.cat(outs, 1), torch.cat(lses, 1)
