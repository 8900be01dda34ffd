"""How many attention calls and copies on the device a pass makes: as few as the places of its tokens allow."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from longgen.attention.backends import default_kernels
from longgen.attention.call import AttentionCall, Partial
from longgen.attention.kernels import Kernels
from longgen.kv.store import KVStore
from longgen.sparse.base import SparsePolicy
from tests.kv.mirror import run_pass
from tests.kv.test_store import HEAD_DIM, KV_HEADS, LAYERS, make_mirror, make_store
from tests.policies import WithoutBlock

FULL = 2  # full-attention layers; the third has a window and is left out of what is counted
TOKEN = 2 * KV_HEADS * HEAD_DIM * 4  # bytes of K and V of one layer


@dataclass
class Watched:
    """A store whose attention calls are taken down: (rows, keys) and whether causal, by layer."""

    store: KVStore
    calls: list[tuple[int, int, bool]] = field(default_factory=list)

    def take(self) -> list[tuple[int, int, bool]]:
        """The calls of one layer since the last time; all full-attention layers must have made the same."""
        calls, self.calls = self.calls, []
        assert len(calls) % FULL == 0
        layers = [calls[start : start + len(calls) // FULL] for start in range(0, len(calls), len(calls) // FULL)]
        assert layers == [layers[0]] * FULL
        return layers[0]


def watched(resident: int, policy: SparsePolicy | None = None) -> Watched:
    """Blocks of 4, runs of 2 blocks, chunks of up to 24 tokens, decode passes of up to 3."""
    store = make_store(resident_blocks=resident, policy=policy)
    result = Watched(store)

    class Recorded(Kernels):
        def __init__(self, real: Kernels) -> None:
            self.merges, self._real = real.merges, real

        def __call__(self, call: AttentionCall) -> Partial:
            if call.window is None:
                result.calls.append((call.q.shape[1], call.k.shape[1], call.causal))
            return self._real(call)

    store._parts.kernels = Recorded(default_kernels(torch.device("cpu")))
    return result


@pytest.mark.parametrize("start", [0, 3, 4, 7, 8])
def test_an_all_resident_chunk_is_one_causal_call_and_one_copy(start: int) -> None:
    w, mirror = watched(resident=20), make_mirror()
    if start:
        run_pass(w.store, mirror, [(0, start)], [start])
        assert w.take() == [(start, start, True)]
    for length in (start, start + 24):
        before = w.store.counters(0)
        run_pass(w.store, mirror, [(0, 24)], [24])
        assert w.take() == [(24, length + 24, True)]
        after = w.store.counters(0)
        window = 2 * TOKEN * 24 + TOKEN * min(8, length)  # the layer with a window: put in place, and put in order
        assert after.d2d_bytes - before.d2d_bytes == FULL * TOKEN * 24 + window
        assert (after.h2d_bytes, after.d2h_bytes) == (0, 0)
    for _ in range(6):
        length = w.store.length(0)
        run_pass(w.store, mirror, [(0, 1)], [1])
        assert w.take() == [(1, length + 1, True)]  # of which a single row sees every key


def test_an_aborted_or_cut_resident_chunk_is_written_again_in_its_place() -> None:
    w, mirror = watched(resident=20), make_mirror()
    run_pass(w.store, mirror, [(0, 10)], [10])
    w.take()
    for accepted in (None, [5], [0], [24]):
        length = w.store.length(0)
        run_pass(w.store, mirror, [(0, 24)], accepted)
        assert w.take() == [(24, length + 24, True)]


def test_without_resident_blocks_a_chunk_is_its_own_call_and_one_a_run() -> None:
    w, mirror = watched(resident=0), make_mirror()
    run_pass(w.store, mirror, [(0, 24)], [24])
    assert w.take() == [(24, 24, True)]
    run_pass(w.store, mirror, [(0, 6)], [6])
    assert w.take() == [(6, 6, True), (6, 8, False), (6, 8, False), (6, 8, False)]
    run_pass(w.store, mirror, [(0, 1)], [1])
    assert w.take() == [(1, 3, True), (1, 8, False), (1, 8, False), (1, 8, False), (1, 4, False)]


def test_tokens_of_a_decode_pass_are_read_with_the_open_block_before_them() -> None:
    w, mirror = watched(resident=0), make_mirror()
    run_pass(w.store, mirror, [(0, 10)], [10])
    w.take()
    run_pass(w.store, mirror, [(0, 3)], [3])  # the last of them lies in the margin
    assert w.take() == [(3, 5, True), (3, 8, False)]


def test_a_chunk_over_the_end_of_the_resident_tier_reads_what_is_resident_in_one_call() -> None:
    w, mirror = watched(resident=3), make_mirror()
    run_pass(w.store, mirror, [(0, 6)], [6])
    w.take()
    run_pass(w.store, mirror, [(0, 10)], [10])
    assert w.take() == [(10, 10, True), (10, 6, False)]
    run_pass(w.store, mirror, [(0, 5)], [5])
    assert w.take() == [(5, 5, True), (5, 12, False), (5, 4, False)]


def test_decoded_tokens_over_the_end_of_the_resident_tier_are_a_call_of_their_own() -> None:
    w, mirror = watched(resident=3), make_mirror()
    run_pass(w.store, mirror, [(0, 10)], [10])
    w.take()
    run_pass(w.store, mirror, [(0, 3)], [3])
    assert w.take() == [(3, 3, True), (3, 10, False)]


@pytest.mark.parametrize(
    ("block", "calls"),
    [(1, [(8, 16, True), (8, 4, False)]), (3, [(8, 8, True), (8, 12, False)]), (0, [(8, 20, True)])],
)
def test_only_blocks_right_before_the_chunk_are_read_with_it(block: int, calls: list[tuple[int, int, bool]]) -> None:
    w, mirror = watched(resident=20, policy=WithoutBlock(block)), make_mirror()
    mirror.on_attend = lambda _: None  # the list has every token, the policy leaves one block out
    run_pass(w.store, mirror, [(0, 16)], [16])
    w.take()
    run_pass(w.store, mirror, [(0, 8)], [8])
    assert w.take() == calls


class Watcher(WithoutBlock):
    """Selects everything and copies every block it is shown."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.seen: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def on_block_written(self, slot_id: int, layer: int, block: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.seen[layer, block] = (k.clone(), v.clone())


@pytest.mark.parametrize("resident", [0, 2, 20])
def test_a_policy_is_shown_the_same_blocks_wherever_they_lie(resident: int) -> None:
    policy = Watcher()
    w, mirror = watched(resident, policy), make_mirror()
    for n in (7, 24, 6, 9):
        run_pass(w.store, mirror, [(0, n)], [n])
    assert len(policy.seen) == FULL * (46 // 4)
    for layer in (LAYERS[0].index, LAYERS[2].index):
        keys, values = (torch.cat([piece[i] for piece in mirror._past(0, layer)], 1) for i in (0, 1))
        for block in range(46 // 4):
            k, v = policy.seen[layer, block]
            span = slice(4 * block, 4 * block + 4)
            assert torch.equal(k, keys[:, span]) and torch.equal(v, values[:, span])
