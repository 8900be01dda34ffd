"""Slots filled without a model: random K and V of a seeded generator, put where a prefill would put them."""

from __future__ import annotations

import torch

from longgen.kv.parts import StoreParts
from longgen.kv.schedule import Member
from longgen.kv.writers import ChunkWriter


def random_kv(parts: StoreParts, tokens: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of `tokens` tokens of one layer, standard normal: [kv_heads, tokens, head_dim] each, on the device."""
    layout, device = parts.layout, parts.transfer.device
    shape = (layout.kv_heads, tokens, layout.head_dim)
    k, v = (torch.randn(shape, generator=generator, dtype=layout.dtype, device=device) for _ in range(2))
    return k, v


def write_random_chunk(parts: StoreParts, member: Member, generator: torch.Generator) -> None:
    """Gives a slot `member.tokens` random tokens after its `member.length`, in every layer.

    The writer of a prefill's chunks takes them to the host blocks, the resident blocks and the open block.
    """
    writer = ChunkWriter(parts)
    windows = {layer.index for layer in parts.layout.window_layers}
    for layer in parts.layout.layers:
        k, v = random_kv(parts, member.tokens, generator)
        if layer.index in windows:
            parts.windows.put(member.slot_id, layer.index, member.length, k, v)
        else:
            writer.write(layer.index, member, k, v)
    writer.settle(member, member.length + member.tokens)
