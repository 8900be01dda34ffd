"""Sizes found for a number of tokens."""

from __future__ import annotations

import random

import pytest

from longgen.evaluation.fitting import fit


@pytest.mark.parametrize("rate", [0.21, 1.0, 7.3])
@pytest.mark.parametrize("guess", [0, 40, 10_000_000])
def test_the_most_that_fits_is_found_in_few_tries(rate: float, guess: int) -> None:
    tries = []

    def count(size: int) -> int:
        tries.append(size)
        return 20 + int(size * rate)

    for tokens in (20, 21, 1000, 1_000_000):
        tries.clear()
        found = fit(lambda size: size, count, tokens, smallest=0, guess=guess)
        assert count(found.size) == found.tokens <= tokens
        assert found.tokens == tokens or count(found.size + 1) > tokens
        assert len(tries) < 50


def test_a_good_guess_spares_tries() -> None:
    tries = []

    def count(size: int) -> int:
        tries.append(size)
        return 100 + size // 4

    assert fit(lambda size: size, count, 1_000_000, smallest=0, guess=3_999_000).tokens == 1_000_000
    assert len(tries) <= 4


def test_counts_that_jump_about_still_come_to_what_is_there() -> None:
    rng = random.Random(0)
    jumps = [rng.choice((-1, 0, 1)) for _ in range(3000)]
    found = fit(lambda size: size, lambda size: size + jumps[size], 1500, smallest=0, around=10)
    assert found.tokens == 1500 == found.size + jumps[found.size]


def test_what_cannot_be_reached_is_approached_from_below() -> None:
    found = fit(lambda size: size, lambda size: 3 * size, 1000, smallest=0, around=5)
    assert (found.size, found.tokens) == (333, 999)


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="30 tokens at the smallest size"):
        fit(lambda size: size, lambda size: size, 29, smallest=30)
