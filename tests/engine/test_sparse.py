"""Every pass goes through the policy: dropping a block changes the result, another order of all blocks does not."""

from __future__ import annotations

import pytest
import torch

from longgen.sparse.base import AvailableBlocks, BlockSelection, Phase, SparsePolicy
from longgen.sparse.full import FullAttentionPolicy
from tests.checkpoints import Build, random_ids
from tests.engine.running import BLOCK, feed, open_engine
from tests.policies import WithoutBlock

IDS = random_ids(150)
SIZES = [64, 64, 10] + [1] * 12
QUERY_LAYERS = frozenset({1})


class Reordered(SparsePolicy):
    """All blocks, last first."""

    def select_blocks(
        self, layer: int, phase: Phase, query: torch.Tensor | None, available: AvailableBlocks
    ) -> BlockSelection:
        return BlockSelection(torch.arange(available.count).flip(0))


class ReorderedByHead(Reordered):
    """All blocks, each KV head in an order of its own; one layer asks for its query first."""

    def needs_query(self, layer: int, phase: Phase) -> bool:
        return layer in QUERY_LAYERS

    def select_blocks(
        self, layer: int, phase: Phase, query: torch.Tensor | None, available: AvailableBlocks
    ) -> BlockSelection:
        assert (query is not None) == self.needs_query(layer, phase)
        ascending = torch.arange(available.count)
        even_first = torch.cat((ascending[::2], ascending[1::2]))
        return BlockSelection(torch.stack((ascending.flip(0), even_first)))


class PrefillOnly(WithoutBlock):
    supports_decode = False


class Watcher(FullAttentionPolicy):
    """Keeps a copy of every block it is shown."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def on_block_written(self, slot_id: int, layer: int, block: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.seen[slot_id, layer, block] = (k.clone(), v.clone())

    def reset(self, slot_id: int) -> None:
        self.seen = {key: value for key, value in self.seen.items() if key[0] != slot_id}


def logits(build: Build, policy: SparsePolicy | None, resident: int) -> torch.Tensor:
    return feed(open_engine(build("qwen3"), resident=resident, policy=policy), IDS, SIZES)


@pytest.mark.parametrize("resident", [0, 3, 32])
@pytest.mark.parametrize("policy", [Reordered(), ReorderedByHead()], ids=["reordered", "by-head"])
def test_all_blocks_in_another_order_change_nothing(build: Build, policy: SparsePolicy, resident: int) -> None:
    full = logits(build, None, resident)
    torch.testing.assert_close(logits(build, policy, resident), full, atol=1e-5, rtol=0)


@pytest.mark.parametrize("resident", [0, 3, 32])
@pytest.mark.parametrize("block", [0, 3, 7])
def test_a_dropped_block_changes_the_result(build: Build, block: int, resident: int) -> None:
    difference = (logits(build, WithoutBlock(block), resident) - logits(build, None, resident)).abs().amax(-1)[0]
    # While the block is open, and in the pass that writes it, it is read all the same.
    untouched = next(end for end in (64, 128, 138) if end >= (block + 1) * BLOCK)
    assert difference[:untouched].max() < 1e-5
    assert difference[untouched:].min() > 1e-3


def test_a_policy_that_does_not_support_a_phase_is_not_asked_in_it(build: Build) -> None:
    assert torch.equal(logits(build, PrefillOnly(1), 0)[:, :128], logits(build, WithoutBlock(1), 0)[:, :128])
    engine = open_engine(build("qwen3"), policy=PrefillOnly(1))
    feed(engine, IDS[:, :64], [64])
    full = open_engine(build("qwen3"))
    feed(full, IDS[:, :64], [64])
    assert torch.equal(feed(engine, IDS[:, 64:70], [1] * 6), feed(full, IDS[:, 64:70], [1] * 6))


@pytest.mark.parametrize("resident", [0, 3, 32])
def test_a_policy_sees_every_block_whatever_its_place(build: Build, resident: int) -> None:
    """Blocks filled by chunks, by decode, and by a chunk that begins inside a block, all with the same content."""
    whole, pieces = Watcher(), Watcher()
    feed(open_engine(build("qwen3"), chunk=160, policy=whole), IDS, [150])
    engine = open_engine(build("qwen3"), resident=resident, policy=pieces)
    feed(engine, IDS, [40, 20, 15, 1, 1, 1, 1, 1, 14, 50, 6])
    assert set(whole.seen) == set(pieces.seen) == {(0, layer, block) for layer in range(3) for block in range(9)}
    for key, (k, v) in whole.seen.items():
        torch.testing.assert_close(pieces.seen[key][0], k, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(pieces.seen[key][1], v, atol=1e-5, rtol=1e-5)
    engine.reset()
    assert not pieces.seen
