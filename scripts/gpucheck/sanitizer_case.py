"""Chunks, decode steps, a truncation and a reset of a tiny store, compared with attention in one piece."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout, installed or not

import torch

from longgen.attention.backends import default_kernels
from longgen.attention.call import AttentionCall, reference
from longgen.kv.layout import AttentionLayer, KVLayout
from longgen.kv.parts import StoreSizes
from longgen.kv.store import KVStore
from longgen.kv.transfer import open_transfer

LAYERS = (AttentionLayer(0), AttentionLayer(1, window=40), AttentionLayer(2))
KV_HEADS, GROUPS, HEAD_DIM, BLOCK = 2, 2, 64, 16
SCALE = HEAD_DIM**-0.5
TOLERANCE = 1e-2


class Case:
    """A store, and all the tokens it should hold."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        layout = KVLayout(LAYERS, KV_HEADS, HEAD_DIM, torch.bfloat16, BLOCK)
        sizes = StoreSizes(chunk_tokens=200, ring_entries=2, run_blocks=3, decode_tokens=4, resident_blocks={0: 2})
        kernels, transfer = default_kernels(device), open_transfer(device)
        self.store = KVStore(layout, sizes, transfer=transfer, kernels=kernels)
        empty = torch.zeros(KV_HEADS, 0, HEAD_DIM, dtype=torch.bfloat16, device=device)
        self.past = {layer.index: (empty, empty) for layer in LAYERS}
        self.worst = 0.0

    def run(self, n: int) -> None:
        """A pass of n tokens, committed."""
        with self.store.begin([(0, n)]) as pass_:
            for layer in LAYERS:
                q, k, v = (self._normal(heads, n) for heads in (KV_HEADS * GROUPS, KV_HEADS, KV_HEADS))
                out = pass_.attend(layer.index, q[None], k[None], v[None], SCALE)[0].transpose(0, 1).double()
                past_k, past_v = self.past[layer.index]
                keys, values = torch.cat((past_k, k), 1), torch.cat((past_v, v), 1)
                self.past[layer.index] = (keys, values)
                expected = reference(AttentionCall(q, keys, values, SCALE, causal=True, window=layer.window))[0]
                self.worst = max(self.worst, float((out - expected).norm() / expected.norm()))
            pass_.commit()

    def cut(self, length: int) -> None:
        """A truncation."""
        self.store.truncate(0, length)
        self.past = {layer: (k[:, :length], v[:, :length]) for layer, (k, v) in self.past.items()}

    def reset(self) -> None:
        self.store.reset(0)
        self.cut(0)

    def _normal(self, heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(heads, tokens, HEAD_DIM, device=self.device).to(torch.bfloat16)


def main() -> int:
    torch.manual_seed(0)
    case = Case(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for n in (200, 200, 77, 1, 1, 4, 1):
        case.run(n)
    case.cut(450)
    for n in (1, 100):
        case.run(n)
    case.reset()
    for n in (33, 1):
        case.run(n)
    if not case.worst <= TOLERANCE:
        print(f"differs from the reference by {case.worst:.1e}")
        return 1
    print(f"agrees with the reference to {case.worst:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
