"""The demo checkpoint answers right through small blocks that all live on the host, in filler that is new to it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from longgen.evaluation.ask import Reader
from longgen.evaluation.filler import noise, tales
from longgen.evaluation.needle import hide
from tests.demo.reading import magic_numbers, pass_key

DEPTHS = range(10)
DISTRACTORS = 3
QUESTION = 160  # bytes of a question and its answer, about


def filler(number: int) -> Iterator[str]:
    return tales(number) if number % 2 else noise()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("size", [1024, 8192, 32768])
def test_a_number_is_found_at_every_depth(reader: Reader, size: int, depth: int) -> None:
    """A pass key and a magic number in one text, each at each of ten depths over the ten tests."""
    needles = [pass_key(size + depth), *magic_numbers(1, size + depth)]
    places = [(depth + 0.5) / 10, ((depth + 5) % 10 + 0.5) / 10]
    document = hide(list(zip(places, needles, strict=True)), filler(depth), size - QUESTION)
    assert reader.answers(document, needles) == [f" {needle.number}" for needle in needles]


def test_at_most_one_number_in_thirty_is_wrong_among_three_distractors(reader: Reader) -> None:
    wrong, asked = [], 0
    for number, size in enumerate([1024, 1024, 2048, 4096, 4096, 8192, 8192, 8192]):
        needles = magic_numbers(DISTRACTORS + 1, number)
        rng = random.Random(number)
        document = hide([(rng.random(), needle) for needle in needles], filler(number), size - QUESTION)
        answers = reader.answers(document, needles)
        wrong += [(size, n.key, n.number, a) for n, a in zip(needles, answers, strict=True) if a != f" {n.number}"]
        asked += len(needles)
    assert asked >= 30
    assert len(wrong) <= 1, wrong
