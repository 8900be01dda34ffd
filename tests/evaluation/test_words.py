"""The word lists."""

from __future__ import annotations

import random

from longgen.evaluation.words import adjectives, distinct_words, key_word, nouns


def test_no_word_is_part_of_another() -> None:
    words = (*adjectives(), *nouns())
    assert len(words) > 300
    assert [(a, b) for i, a in enumerate(words) for j, b in enumerate(words) if i != j and a in b] == []


def test_any_number_of_words_are_different_and_follow_from_the_seed() -> None:
    for count in (10, 300, 1000, 200_000):
        words = distinct_words(random.Random(1), count)
        assert len(set(words)) == count
        assert words == distinct_words(random.Random(1), count)
    assert distinct_words(random.Random(1), 10) != distinct_words(random.Random(2), 10)


def test_a_key_is_an_adjective_and_a_noun() -> None:
    adjective, noun = key_word(random.Random(0)).split("-")
    assert adjective in adjectives() and noun in nouns()
