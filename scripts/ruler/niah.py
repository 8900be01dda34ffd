"""Needles in a haystack: single, multi-key, multi-value and multi-query (RULER, section 3.1 and appendix B)."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from longgen.evaluation.filler import NOISE
from longgen.evaluation.words import key_word
from ruler.sample import Sample

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE_SENTENCE = " ".join(NOISE)
DEPTHS = tuple(round(100 * step / 39) for step in range(40))  # percent; where needles stand in an essay
_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n{context}\nWhat is the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text is",
)
_SEVERAL = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the provided "
    "text?",
    " The special magic {kind} for {query} mentioned in the provided text are",
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True, slots=True)
class Niah:
    """A needle task.

    Attributes:
        haystack: noise, needle (other needles) or essay. A size is its sentences; of an essay, its words.
        key, value: what keys and values are: words, numbers or uuids.
        keys, values, queries: how many keys there are, values of each, and keys that are asked for.
        essay: the words of the essay, repeated as often as needed.
    """

    haystack: str
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1
    essay: Sequence[str] = ()

    @property
    def budget(self) -> int:
        return 128

    @property
    def smallest(self) -> int:
        return self.keys * self.values

    def write(self, rng: random.Random, size: int) -> Sample:
        keys = _different(rng, self.key, self.keys)
        numbers = _different(rng, self.value, self.keys * self.values)
        values = [numbers[index * self.values : (index + 1) * self.values] for index in range(self.keys)]
        needles = [self._needle(key, value) for key, own in zip(keys, values, strict=True) for value in own]
        rng.shuffle(needles)
        asked = rng.sample(range(self.keys), self.queries)
        context = self._context(rng, size, needles, keys)
        template, prefix = _ONE if self.queries * self.values == 1 else _SEVERAL
        kind = self.value.removesuffix("s") if self.queries * self.values == 1 else self.value
        *first, last = (keys[index] for index in asked)
        query = f"{', '.join(first)}, and {last}" if first else last
        return Sample(
            template.format(kind=kind, context=context, query=query),
            prefix.format(kind=kind, query=query),
            tuple(value for index in asked for value in values[index]),
        )

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value, key=key, value=value)

    def _context(self, rng: random.Random, size: int, needles: Sequence[str], keys: Collection[str]) -> str:
        """The haystack with the needles in it, at random places."""
        if self.haystack == "essay":
            repeats = -(-size // len(self.essay))
            sentences = _SENTENCE_END.split(" ".join((list(self.essay) * repeats)[:size]))
            places = sorted(len(sentences) * depth // 100 for depth in rng.sample(DEPTHS, len(needles)))
        else:
            if self.haystack == "noise":
                sentences = [NOISE_SENTENCE] * size
            else:
                others = (_drawn(rng, self.key, keys) for _ in range(size))
                sentences = [self._needle(other, _drawn(rng, self.value)) for other in others]
            places = sorted(rng.sample(range(size), len(needles)))
        for place, needle in reversed(list(zip(places, needles, strict=True))):
            sentences.insert(place, needle)
        return (" " if self.haystack == "essay" else "\n").join(sentences)


def _drawn(rng: random.Random, kind: str, taken: Collection[str] = ()) -> str:
    """A word, number or uuid that is not taken."""
    while True:
        if kind == "words":
            value = key_word(rng)
        elif kind == "numbers":
            value = str(rng.randint(1_000_000, 9_999_999))
        else:
            value = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        if value not in taken:
            return value


def _different(rng: random.Random, kind: str, count: int) -> list[str]:
    values: list[str] = []
    for _ in range(count):
        values.append(_drawn(rng, kind, values))
    return values
