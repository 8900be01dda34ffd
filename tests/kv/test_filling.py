"""A slot of random KV is like one that was prefilled with it: what comes after attends to exactly these values."""

from __future__ import annotations

import pytest
import torch

from longgen.errors import SlotError
from longgen.kv.counters import TierBlocks
from longgen.kv.store import KVStore
from tests.checkpoints import Build
from tests.engine.running import open_engine
from tests.kv.mirror import Mirror, run_pass
from tests.kv.test_store import make_mirror, make_store


def filled(tokens: int, resident: object) -> tuple[KVStore, Mirror]:
    store, mirror = make_store(resident_blocks=resident, slots=2), make_mirror(1)
    store.poison()
    store.fill_random(1, tokens, torch.Generator().manual_seed(7))
    mirror.fill(1, tokens, store.sizes.chunk_tokens, torch.Generator().manual_seed(7))
    return store, mirror


@pytest.mark.parametrize("resident", [0, 3, {0: 5, 3: 1}, 100], ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 23, 24, 25, 70, 96])
def test_decoding_after_it_is_attention_over_the_same_values(tokens: int, resident: object) -> None:
    """The mirror checks every attend against plain attention over its list of tokens."""
    store, mirror = filled(tokens, resident)
    assert store.length(1) == tokens and store.length(0) == 0
    for _ in range(9):  # over the end of the open block, too
        run_pass(store, mirror, [(1, 1)], [1])
    run_pass(store, mirror, [(1, 24)], [24])
    store.truncate(1, store.length(1) - 5)
    mirror.truncate(1, store.length(1))
    run_pass(store, mirror, [(0, 1), (1, 1)], [1, 1])


def test_blocks_lie_where_a_prefill_puts_them() -> None:
    store, _ = filled(70, 3)
    assert store.blocks(1) == TierBlocks(resident=2 * 3, host=2 * 14, open=2)
    store.reset(1)
    assert store.length(1) == 0


def test_only_an_empty_slot_is_filled() -> None:
    store, mirror = filled(10, 0)
    with pytest.raises(SlotError, match="holds 10 tokens"):
        store.fill_random(1, 5, torch.Generator())
    pass_ = store.begin([(1, 1)])
    with pytest.raises(SlotError, match="a pass is open"):
        store.fill_random(0, 5, torch.Generator())
    pass_.abort()
    run_pass(store, mirror, [(1, 1)], [1])


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_an_engine_decodes_from_random_values_that_the_seed_decides(build: Build, kind: str) -> None:
    engine = open_engine(build(kind))
    logits = []
    for seed in (1, 1, 2):
        engine.fill_random(150, new_tokens=2, seed=seed)
        assert engine.store.length(0) == 150
        logits.append(engine.decode_step(5))
        figures = engine.observer.request(0)
        assert figures is not None and figures.decode.d2h_bytes == 0 < figures.prefill.d2h_bytes
        assert figures.decode.h2d_bytes > 0
    assert torch.equal(logits[0], logits[1]) and not torch.allclose(logits[0], logits[2])
    assert all(bool(row.isfinite().all()) for row in logits)
    if engine.provider.is_recurrent:
        state = engine.provider.snapshot(0).tensors
        assert all(float(tensor.float().std()) > 0.1 for tensor in state)
