"""With the demo checkpoint as an oracle: a damaged cache gives a wrong answer, or at least other logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from longgen.engine import Engine, EngineOptions
from longgen.evaluation.ask import Reader
from longgen.evaluation.needle import Needle, is_right
from tests.checkpoints import Build, random_ids
from tests.demo import faults
from tests.demo.reading import magic_numbers, one_in_every_block

BLOCKS = 16
ASKED = (0, 3, 8, 15)
SEEDS = (1, 2)  # texts whose sixteen numbers the model finds, all of them, when nothing is damaged
SMALL_FAULTS = (faults.zero, faults.shift_keys, faults.rotate_keys)
FAR_LAYERS = (0, 2, 3)  # layer 1 of the demo checkpoint gives keys some blocks away a weight of exactly 0 in fp32
MOVED = 1e-5  # the same run without a fault gives the same logits bit for bit, so less would show too


def changed(needle: Needle) -> Needle:
    """The same needle with every digit of its number another one."""
    return Needle(needle.template, "".join(str((int(digit) + 5) % 9 + 1) for digit in needle.number), needle.key)


def wrong_with(reader: Reader, needle: Needle, block: int, damage: Callable[[Engine], None], *others: int) -> bool:
    """Whether the needle in `block` is found before and after, and not found while the damage is there."""
    assert is_right(needle, reader.answer(needle))
    with faults.undone(reader.engine, block, *others):
        damage(reader.engine)
        wrong = not is_right(needle, reader.answer(needle))
    assert is_right(needle, reader.answer(needle))
    return wrong


@pytest.mark.parametrize("seed", SEEDS)
def test_every_block_is_read(reader: Reader, seed: int) -> None:
    """One needle in every block: each is found, and not when its block alone is zero."""
    needles = magic_numbers(BLOCKS, seed)
    reader.read(one_in_every_block(needles, seed))
    for block, needle in enumerate(needles):
        assert wrong_with(reader, needle, block, partial(faults.zero, block=block)), block


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", [faults.overwrite, faults.exchange_values])
def test_a_mixed_up_block_gives_a_wrong_answer(reader: Reader, fault: Callable[..., None], seed: int) -> None:
    needles = magic_numbers(BLOCKS, seed)
    reader.read(one_in_every_block(needles, seed))
    for block in ASKED:
        other = (block + 5) % BLOCKS
        assert wrong_with(reader, needles[block], block, partial(fault, block=block, other=other), other), block


@pytest.mark.parametrize("seed", SEEDS)
def test_a_block_left_over_from_the_request_before_gives_a_wrong_answer(reader: Reader, seed: int) -> None:
    needles = magic_numbers(BLOCKS, seed)
    reader.read(one_in_every_block([changed(needle) for needle in needles], seed))
    stale = {block: faults.copy_of(reader.engine, block) for block in ASKED}
    reader.read(one_in_every_block(needles, seed))
    for block in ASKED:
        assert wrong_with(reader, needles[block], block, partial(faults.put, block=block, copy=stale[block])), block


def logits_after(engine: Engine, ids: torch.Tensor) -> torch.Tensor:
    """fp32 [n, vocab]: the logits of every one of the tokens ids [1, n] after what the slot holds, which stays so."""
    start = engine.snapshot()
    with engine.store.begin([(faults.SLOT, ids.shape[1])]) as pass_:
        positions = torch.tensor(pass_.lengths)[:, None] + torch.arange(ids.shape[1])
        logits = engine.provider.forward(pass_, ids, positions, keep=ids.shape[1])[0]
        pass_.commit()
    engine.restore(start)
    return logits


def check_moved(engine: Engine, ids: torch.Tensor, block: int, layer: int, fault: Callable[..., None]) -> None:
    """Asserts that a fault in one block of one layer changes the logits of ids [1, n], and nothing else does."""
    right = logits_after(engine, ids)
    assert torch.equal(logits_after(engine, ids), right)
    with faults.undone(engine, block):
        fault(engine, block, (layer,))
        moved = (logits_after(engine, ids) - right).abs().max()
    assert moved > MOVED, (block, float(moved))


@pytest.mark.parametrize("fault", SMALL_FAULTS)
@pytest.mark.parametrize("layer", FAR_LAYERS)
def test_a_fault_in_one_block_of_one_layer_moves_the_logits(
    exact_reader: Reader, layer: int, fault: Callable[..., None]
) -> None:
    """Only the last layer reads the number itself, and positions that are off by one seldom change an answer."""
    needles = magic_numbers(8, seed=0)
    exact_reader.read(one_in_every_block(needles, seed=0))
    # All questions, since layer 0 gives far keys so little that of a short text it may be lost in rounding.
    questions = torch.tensor([list("".join(needle.question for needle in needles).encode())])
    for block in range(len(needles)):
        check_moved(exact_reader.engine, questions, block, layer, fault)


@pytest.mark.parametrize("fault", SMALL_FAULTS)
def test_where_every_layer_reads_far_every_block_of_each_is_checked(build: Build, fault: Callable[..., None]) -> None:
    """Random weights attend to everything, in every layer."""
    block_size, blocks = 64, 8
    options = EngineOptions(
        device="cpu", block_size=block_size, chunk_size=block_size, ring_entries=2, ring_blocks=1, resident_blocks=0
    )
    engine = Engine.load(build("qwen3"), options)
    ids = random_ids(blocks * block_size + 8)
    engine.prefill(ids[0, :-8])
    for layer in engine.store.layout.full_layers:
        for block in range(blocks):
            check_moved(engine, ids[:, -8:], block, layer, fault)
