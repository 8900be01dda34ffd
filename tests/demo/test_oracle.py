"""With the demo checkpoint as an oracle: a damaged cache gives a wrong answer, or at least other logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from longgen.engine import Engine
from longgen.evaluation.ask import Reader
from longgen.evaluation.needle import Needle, is_right
from tests.demo import faults
from tests.demo.reading import magic_numbers, one_in_every_block

BLOCKS = 16
ASKED = (0, 3, 8, 15)
SEEDS = (1, 2)  # texts whose sixteen numbers the model finds, all of them, when nothing is damaged
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


def question_logits(reader: Reader, needle: Needle) -> torch.Tensor:
    """fp32 [n, vocab]: the logits of every token of the needle's question."""
    engine = reader.engine
    start = engine.snapshot()
    ids = torch.tensor([list(needle.question.encode())])
    with engine.store.begin([(faults.SLOT, ids.shape[1])]) as pass_:
        positions = torch.tensor(pass_.lengths)[:, None] + torch.arange(ids.shape[1])
        logits = engine.provider.forward(pass_, ids, positions, keep=ids.shape[1])[0]
        pass_.commit()
    engine.restore(start)
    return logits


@pytest.mark.parametrize("fault", [faults.zero, faults.shift_keys, faults.rotate_keys])
@pytest.mark.parametrize("layer", range(4))
def test_a_fault_in_one_block_of_one_layer_moves_the_logits(
    exact_reader: Reader, layer: int, fault: Callable[..., None]
) -> None:
    """Only the last layer reads the number itself, and positions that are off by one seldom change an answer."""
    needles = magic_numbers(8, seed=0)
    exact_reader.read(one_in_every_block(needles, seed=0))
    engine = exact_reader.engine
    for block, needle in enumerate(needles):
        right = question_logits(exact_reader, needle)
        assert torch.equal(question_logits(exact_reader, needle), right)
        with faults.undone(engine, block):
            fault(engine, block, (layer,))
            moved = (question_logits(exact_reader, needle) - right).abs().max()
        assert moved > MOVED, (block, float(moved))
