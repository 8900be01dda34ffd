"""Common words and frequent words: the words that stand most often in a list, and in a coded text."""

from __future__ import annotations

import math
import random
import string
from dataclasses import dataclass

from longgen.evaluation.words import distinct_words
from ruler.sample import Sample

COMMON = 10  # words asked for in a list
LONG = 4096  # from this length on, words are repeated more often
ANSWERS = 3  # words asked for in a coded text
LETTERS = 6  # of a coded word
TOKENS_PER_WORD = 50  # of the length, for each different coded word
NOISE = "..."
_COMMON_TEMPLATE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
_COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
_FREQUENT_TEMPLATE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text?"
)
_FREQUENT_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"


@dataclass(frozen=True, slots=True)
class CommonWords:
    """The ten most common words of a numbered list, after a worked example. A size is different words.

    Attributes:
        length: tokens of the whole, which decides how often words are repeated, as published.
    """

    length: int

    @property
    def budget(self) -> int:
        return 120

    @property
    def smallest(self) -> int:
        return COMMON + 1

    @property
    def haystack(self) -> str:
        return "words"

    def write(self, rng: random.Random, size: int) -> Sample:
        few, many = (((20, 3, 1), (6, 1)), ((40, 10, 3), (30, 3)))[self.length >= LONG]
        example, answer = _word_list(rng, *few)
        context, words = _word_list(rng, size, *many)
        shown = f"{_COMMON_TEMPLATE.format(context=example)}{_COMMON_PREFIX} {_numbered(answer)}"
        return Sample(f"{shown}\n{_COMMON_TEMPLATE.format(context=context)}", _COMMON_PREFIX, tuple(words))


@dataclass(frozen=True, slots=True)
class FrequentWords:
    """The three most frequent words of a coded text, whose frequencies follow Zipf's law with exponent 2.

    A size is words of the text, about; the most frequent one is dots, which do not count.

    Attributes:
        length: tokens of the whole, which decides how many different words there are.
    """

    length: int

    @property
    def budget(self) -> int:
        return 50

    @property
    def smallest(self) -> int:
        return 100  # with fewer, the third and the fourth word are equally frequent

    @property
    def haystack(self) -> str:
        return "coded words"

    def write(self, rng: random.Random, size: int) -> Sample:
        words: list[str] = []
        while len(words) < max(self.length // TOKENS_PER_WORD, ANSWERS + 2) - 1:
            word = "".join(rng.choices(string.ascii_lowercase, k=LETTERS))
            if word not in words:
                words.append(word)
        text: list[str] = []
        for rank, word in enumerate((NOISE, *words), 1):
            text += [word] * int(size / rank**2 / (math.pi**2 / 6))
        rng.shuffle(text)
        return Sample(_FREQUENT_TEMPLATE.format(context=" ".join(text)), _FREQUENT_PREFIX, tuple(words[:ANSWERS]))


def _word_list(rng: random.Random, count: int, common: int, others: int) -> tuple[str, list[str]]:
    """A numbered list of `count` words, ten of them `common` times, the others `others` times; and those ten."""
    words = distinct_words(rng, count)
    entries = words[:COMMON] * common + words[COMMON:] * others
    rng.shuffle(entries)
    return _numbered(entries), words[:COMMON]


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
