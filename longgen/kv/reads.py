"""What attention reads without a load: the pass's own tokens, the resident tier and the open block, as views."""

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


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """Where a pass's new tokens of one layer lie.

    Attributes:
        k, v: [kv_heads, tokens, head_dim], a buffer that holds them one after another.
        base: position in the slot of the buffer's first token. The tokens from there to the new ones are in it too.
    """

    k: torch.Tensor
    v: torch.Tensor
    base: int


def device_reads(
    parts: StoreParts, layer: int, member: Member, runs: LayerRuns, own: OwnTokens
) -> tuple[KVRead, list[KVRead]]:
    """The pass's own tokens, to be read causally, and views of the open block and the selected resident runs.

    The open block, and a resident run that all heads read right before it, are read together with the own tokens where
    they lie before them in one buffer: an all-resident pass is one attention call. What of them does not comes first
    in the list, as one view where both are resident.
    """
    resident = list(runs.resident)
    tier = parts.resident.get(member.slot_id, layer)
    start = member.length - member.length % parts.layout.block_size
    in_tier = start < parts.resident.tokens(layer)
    if in_tier and resident and resident[-1].stop == start and resident[-1].heads == ALL_HEADS:
        start = resident.pop().start
    reads = []
    if own.base > start:
        source, base = (tier, 0) if in_tier else (parts.decode.get(member.slot_id, layer), start)
        span = slice(start - base, member.length - base)
        reads.append(KVRead(source.k[:, span], source.v[:, span], ALL_HEADS))
        start = member.length
    for run in resident:
        span = slice(run.start, run.stop)
        reads.append(KVRead(tier.k[run.heads, span], tier.v[run.heads, span], run.heads))
    span = slice(start - own.base, member.length + member.tokens - own.base)
    return KVRead(own.k[:, span], own.v[:, span], ALL_HEADS), reads
