"""What attention reads without a load: the resident tier and the open block, as views."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longgen.kv.parts import StoreParts
from longgen.kv.schedule import ALL_HEADS, LayerRuns, Member


@dataclass(frozen=True, slots=True)
class KVRead:
    """K and V, [kv_heads of `heads`, tokens, head_dim], that the KV heads `heads` attend to."""

    k: torch.Tensor
    v: torch.Tensor
    heads: slice


def device_reads(parts: StoreParts, layer: int, member: Member, runs: LayerRuns, stop: int) -> list[KVRead]:
    """Views of the selected resident runs and of the open block up to position `stop`.

    The open block, if not empty, comes first. Where it lies in the resident tier right after a run that all heads
    read, both are one view: an all-resident decode step is one attention call.
    """
    reads = []
    resident = list(runs.resident)
    tier = parts.resident.get(member.slot_id, layer)
    opened = member.length - member.length % parts.layout.block_size
    if stop > opened:
        if opened < parts.resident.tokens(layer):
            if resident and resident[-1].stop == opened and resident[-1].heads == ALL_HEADS:
                opened = resident.pop().start
            reads.append(KVRead(tier.k[:, opened:stop], tier.v[:, opened:stop], ALL_HEADS))
        else:
            open_block = parts.decode.get(member.slot_id, layer)
            span = slice(0, stop - opened)
            reads.append(KVRead(open_block.k[:, span], open_block.v[:, span], ALL_HEADS))
    for run in resident:
        span = slice(run.start, run.stop)
        reads.append(KVRead(tier.k[run.heads, span], tier.v[run.heads, span], run.heads))
    return reads
