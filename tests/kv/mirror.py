"""A plain list of every token that a store should hold, and random operations done to both."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from longgen.attention.call import AttentionCall, reference
from longgen.kv.layout import KVLayout
from longgen.kv.passes import Pass
from longgen.kv.store import KVStore

Pieces = tuple[tuple[torch.Tensor, torch.Tensor], ...]  # K and V of consecutive tokens, [kv_heads, n, head_dim] each
ROWS_AT_ONCE = 512  # of the reference, whose fp64 scores are large


@dataclass(frozen=True, slots=True)
class Attended:
    """One slot's part of one `Pass.attend`: what went in, every token it should have seen, and what came out.

    Attributes:
        q: [q_heads, n, head_dim].
        out: [n, q_heads, head_dim], from the store.
        seen: the slot's tokens before the pass and the pass's own.
    """

    layer: int
    q: torch.Tensor
    out: torch.Tensor
    seen: Pieces
    scale: float
    window: int | None

    def expected(self) -> torch.Tensor:
        """Attention over the whole list in one pass, float64 [n, q_heads, head_dim]."""
        keys, values = (torch.cat([piece[which] for piece in self.seen], 1) for which in (0, 1))
        call = AttentionCall(self.q, keys, values, self.scale, causal=True, window=self.window)
        n, m = self.q.shape[1], keys.shape[1]
        rows = []
        for start in range(0, n, ROWS_AT_ONCE):
            stop = min(n, start + ROWS_AT_ONCE)
            end = m - n + stop
            part = replace(call, q=call.q[:, start:stop], k=keys[:, :end], v=values[:, :end])
            rows.append(reference(part)[0])
        return torch.cat(rows, 1).transpose(0, 1)


class Mirror:
    """Every accepted token's K and V, by slot and layer.

    Args:
        layout: of the store it mirrors.
        groups: query heads per KV head.
        generator: of the random q, k and v; its device is the store's.
        on_attend: told of every attend of every slot.
        sharpness: factor of the usual 1/sqrt(head_dim): larger, and fewer keys decide a row.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        groups: int,
        generator: torch.Generator,
        on_attend: Callable[[Attended], None],
        sharpness: float = 1.0,
    ) -> None:
        self.layout, self.q_heads, self.generator = layout, groups * layout.kv_heads, generator
        self.on_attend = on_attend
        self.scale = sharpness * layout.head_dim**-0.5
        self._kv: dict[tuple[int, int], Pieces] = {}

    def length(self, slot: int) -> int:
        return sum(k.shape[1] for k, _ in self._past(slot, self.layout.layers[0].index))

    def attend_all(self, pass_: Pass) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Runs random q, k, v through every layer of a pass; returns the new k, v [batch, kv_heads, n, head_dim]."""
        new = {}
        batch, n = len(pass_.slots), pass_.tokens[0]
        for layer in self.layout.layers:
            q = self._normal(batch, self.q_heads, n)
            k, v = self._normal(batch, self.layout.kv_heads, n), self._normal(batch, self.layout.kv_heads, n)
            out = pass_.attend(layer.index, q, k, v, self.scale)
            for i, slot in enumerate(pass_.slots):
                seen = (*self._past(slot, layer.index), (k[i], v[i]))
                self.on_attend(Attended(layer.index, q[i], out[i], seen, self.scale, layer.window))
            new[layer.index] = (k, v)
        return new

    def accept(self, pass_: Pass, new: dict[int, tuple[torch.Tensor, torch.Tensor]], counts: Sequence[int]) -> None:
        for i, slot in enumerate(pass_.slots):
            for layer, (k, v) in new.items():
                self._kv[slot, layer] = (*self._past(slot, layer), (k[i, :, : counts[i]], v[i, :, : counts[i]]))

    def fill(self, slot: int, tokens: int, chunk: int, generator: torch.Generator) -> None:
        """What KVStore.fill_random puts into a slot, drawn again in the order that it documents."""
        for start in range(0, tokens, chunk):
            shape = (self.layout.kv_heads, min(chunk, tokens - start), self.layout.head_dim)
            for layer in self.layout.layers:
                k = torch.randn(shape, generator=generator, dtype=self.layout.dtype, device=generator.device)
                v = torch.randn(shape, generator=generator, dtype=self.layout.dtype, device=generator.device)
                self._kv[slot, layer.index] = (*self._past(slot, layer.index), (k, v))

    def truncate(self, slot: int, length: int) -> None:
        for layer in self.layout.layers:
            kept, left = [], length
            for k, v in self._past(slot, layer.index):
                kept.append((k[:, :left], v[:, :left]))
                left -= kept[-1][0].shape[1]
            self._kv[slot, layer.index] = tuple(piece for piece in kept if piece[0].shape[1])

    def _past(self, slot: int, layer: int) -> Pieces:
        return self._kv.get((slot, layer), ())

    def _normal(self, batch: int, heads: int, n: int) -> torch.Tensor:
        shape = (batch, heads, n, self.layout.head_dim)
        return torch.randn(shape, generator=self.generator, device=self.generator.device).to(self.layout.dtype)


def run_pass(store: KVStore, mirror: Mirror, requests: list[tuple[int, int]], accepted: list[int] | None) -> None:
    """One pass in both; `accepted` None aborts it."""
    pass_ = store.begin(requests)
    new = mirror.attend_all(pass_)
    if accepted is None:
        pass_.abort()
    else:
        pass_.commit(accepted)
        mirror.accept(pass_, new, accepted)


def random_step(store: KVStore, mirror: Mirror, rng: random.Random, *, counts: Sequence[int], longest_cut: int) -> bool:
    """One random operation: a chunk or a few tokens, a batch of single tokens, a truncation, or a reset with poison.

    Args:
        counts: sizes of a pass over one slot to choose from.
        longest_cut: most tokens a truncation takes away.

    Returns:
        Whether it was a pass.
    """
    slots = len(store.slots)
    slot = rng.randrange(slots)
    kind = rng.random()
    if kind < 0.45:
        n = rng.choice(counts)
        run_pass(store, mirror, [(slot, n)], rng.choice([None, [n], [n], [n], [n - 1], [rng.randint(0, n)]]))
    elif kind < 0.8:
        ids = rng.sample(range(slots), rng.randint(1, slots))
        run_pass(store, mirror, [(i, 1) for i in ids], [rng.choice([1, 1, 1, 0]) for _ in ids])
    elif kind < 0.93:
        length = max(0, store.length(slot) - rng.randint(0, longest_cut))
        store.truncate(slot, length)
        mirror.truncate(slot, length)
    else:
        store.reset(slot)
        mirror.truncate(slot, 0)
        store.poison()
    return kind < 0.8
