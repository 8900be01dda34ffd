"""A KV store in a few lines, for tests: every K and V in one tensor per slot and layer, eager attention in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longgen.kv.layout import AttentionLayer
from longgen.kv.passes import Participant

KV = tuple[torch.Tensor, torch.Tensor]  # each [Hkv, tokens, D]


class PlainStore:
    """Keeps what the passes committed: `length[slot]` tokens, `kv[slot, layer]`."""

    def __init__(self, layers: Sequence[AttentionLayer]) -> None:
        self.windows = {layer.index: layer.window for layer in layers}
        self.length: dict[int, int] = {}
        self.kv: dict[tuple[int, int], KV] = {}

    def begin(self, work: Sequence[tuple[int, int]]) -> PlainPass:
        """A pass of n new tokens of one slot, or of one token of each of several."""
        return PlainPass(self, tuple(slot for slot, _ in work), tuple(count for _, count in work))

    def reset(self, slot: int) -> None:
        self.length.pop(slot, None)
        for key in [key for key in self.kv if key[0] == slot]:
            del self.kv[key]


class PlainPass:
    def __init__(self, store: PlainStore, slots: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        self._store = store
        self.slots = slots
        self.tokens = tokens
        self.lengths = tuple(store.length.get(slot, 0) for slot in slots)
        self._staged: dict[tuple[int, int], KV] = {}
        self._participants: list[Participant] = []

    def enlist(self, participant: Participant) -> None:
        self._participants.append(participant)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """q [B, Hq, n, D], k and v [B, Hkv, n, D] -> [B, n, Hq, D]."""
        rows = [self._attend_slot(slot, layer, q[i], k[i], v[i], scale) for i, slot in enumerate(self.slots)]
        return torch.stack(rows).transpose(1, 2)

    def _attend_slot(
        self, slot: int, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if (slot, layer) in self._store.kv:
            past_k, past_v = self._store.kv[slot, layer]
            k, v = torch.cat((past_k, k), dim=1), torch.cat((past_v, v), dim=1)
        self._staged[slot, layer] = (k.clone(), v.clone())
        queries, keys = q.shape[1], k.shape[1]
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        window = self._store.windows[layer]
        hidden = (distance < 0) | (distance >= (window or keys + 1))
        group = q.shape[0] // k.shape[0]
        scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
        return weights @ v.repeat_interleave(group, 0)

    def commit(self, accepted: Sequence[int] | None = None) -> None:
        kept = tuple(accepted) if accepted is not None else self.tokens
        for participant in self._participants:
            participant.prepare(kept)
        for (slot, layer), (k, v) in self._staged.items():
            end = self.lengths[self.slots.index(slot)] + kept[self.slots.index(slot)]
            self._store.kv[slot, layer] = (k[:, :end], v[:, :end])
        for slot, length, count in zip(self.slots, self.lengths, kept, strict=True):
            self._store.length[slot] = length + count
        for participant in self._participants:
            participant.commit(kept)

    def abort(self) -> None:
        for participant in self._participants:
            participant.abort()
