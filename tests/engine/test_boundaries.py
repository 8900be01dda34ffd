"""Every length around a block boundary: prompt, decode, partial commit, abort and truncate, and then go on."""

from __future__ import annotations

import pytest
import torch

from longgen.errors import LongGenError, SlotError
from tests.checkpoints import Build, random_ids
from tests.engine.conftest import Reference
from tests.engine.running import BLOCK, feed, forward, open_engine

N = 5 * BLOCK
AROUND = (N - 1, N, N + 1)
TOTAL = N + 2 * BLOCK
KINDS = [("qwen3", {}), ("qwen2", {"sliding": True, "window": 24}), ("qwen3_moe", {})]
HYBRIDS = ["qwen3_next", "qwen3_5"]
TOLERANCE = 1e-4
HYBRID_TOLERANCE = 5e-4


@pytest.mark.parametrize("resident", [0, 5, 6, 32])
@pytest.mark.parametrize("length", AROUND)
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_prompt_then_decode(
    build: Build, reference: Reference, kind: str, options: dict[str, object], length: int, resident: int
) -> None:
    folder, ids = build(kind, **options), random_ids(TOTAL)
    engine = open_engine(folder, resident=resident)
    got = feed(engine, ids, [64, length - 64] + [1] * (TOTAL - length))
    torch.testing.assert_close(got, reference(folder, ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("resident", [0, 5, 6, 32])
@pytest.mark.parametrize("accepted_to", AROUND)
@pytest.mark.parametrize("start", [N - 2, N - 20, N - 64])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_partial_commit(
    build: Build,
    reference: Reference,
    kind: str,
    options: dict[str, object],
    start: int,
    accepted_to: int,
    resident: int,
) -> None:
    """A pass from `start` over the boundary, of wrong tokens beyond `accepted_to`; then the right ones."""
    folder, ids = build(kind, **options), random_ids(TOTAL)
    engine = open_engine(folder, resident=resident, chunk=80)
    feed(engine, ids[:, :start], [start])
    tokens = ids[:, start : N + 6].clone()
    tokens[:, accepted_to - start :] += 1
    with engine.store.begin([(0, tokens.shape[1])]) as pass_:
        forward(engine, pass_, tokens)
        pass_.commit(accepted_to - start)
    assert engine.store.length(0) == accepted_to
    got = feed(engine, ids[:, accepted_to:], [1] * 6 + [TOTAL - accepted_to - 6])
    torch.testing.assert_close(got, reference(folder, ids)[:, accepted_to:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("resident", [0, 5, 6, 32])
@pytest.mark.parametrize("length", AROUND)
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_truncate(
    build: Build, reference: Reference, kind: str, options: dict[str, object], length: int, resident: int
) -> None:
    folder, ids = build(kind, **options), random_ids(TOTAL)
    wrong = ids.clone()
    wrong[:, length:] += 1
    engine = open_engine(folder, resident=resident)
    feed(engine, wrong[:, : N + 18], [64, N - 64, 1, 1, 16])
    engine.truncate(length)
    got = feed(engine, ids[:, length:], [1] * 3 + [TOTAL - length - 3])
    torch.testing.assert_close(got, reference(folder, ids)[:, length:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("resident", [0, 3, 32])
@pytest.mark.parametrize("length", AROUND)
@pytest.mark.parametrize("kind", HYBRIDS)
def test_hybrids_with_a_snapshot(build: Build, reference: Reference, kind: str, length: int, resident: int) -> None:
    folder, ids = build(kind), random_ids(TOTAL)
    engine = open_engine(folder, resident=resident)
    feed(engine, ids[:, :length], [64, length - 64])
    mark = engine.snapshot()
    feed(engine, (ids + 1)[:, length : length + 20], [1, 19])
    engine.restore(mark)
    got = feed(engine, ids[:, length:], [1] * (TOTAL - length))
    torch.testing.assert_close(got, reference(folder, ids)[:, length:], atol=HYBRID_TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_hybrids_refuse_what_their_state_cannot_do(build: Build, reference: Reference, kind: str) -> None:
    """A partial commit is refused, and the pass can still be aborted without a trace."""
    folder, ids = build(kind), random_ids(TOTAL)
    engine = open_engine(folder)
    feed(engine, ids[:, :64], [64])
    with pytest.raises(SlotError, match="snapshot"):
        engine.truncate(63)
    with engine.store.begin([(0, 20)]) as pass_:
        forward(engine, pass_, (ids + 1)[:, 64:84])
        with pytest.raises(LongGenError, match="abort"):
            pass_.commit(7)
    assert engine.store.length(0) == 64
    got = feed(engine, ids[:, 64:], [TOTAL - 64 - 6] + [1] * 6)
    torch.testing.assert_close(got, reference(folder, ids)[:, 64:], atol=HYBRID_TOLERANCE, rtol=0)


def test_decode_before_prefill_is_refused(build: Build) -> None:
    with pytest.raises(SlotError, match="before prefill"):
        open_engine(build("qwen3")).decode_step(5)
