"""Needle prompts of exact token lengths: a number hidden at a depth of a long text, and the question for it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import TYPE_CHECKING

from longgen.errors import UsageError
from longgen.evaluation.filler import tales
from longgen.evaluation.fitting import Fit, fit
from longgen.evaluation.needle import MAGIC_NUMBER, PASS_KEY, Needle, Template, hide, smallest_size
from longgen.evaluation.words import nouns

if TYPE_CHECKING:
    from longgen.model.tokenizer import TextTokenizer

MULTI_KEYS = 4  # as in RULER's niah_multikey_1
CLOSE_SIZES = 64  # sizes tried on either side where none comes to the exact length at once


class Kind(str, Enum):
    """What is hidden and asked for.

    passkey: one number, the pass key.
    magic: one number with a key word, the magic number.
    multi: four magic numbers with different key words, one of them asked for: RULER's multi-key task. The asked one
        stands at the depth, the others anywhere.
    """

    passkey = "passkey"
    magic = "magic"
    multi = "multi"

    @property
    def template(self) -> Template:
        return PASS_KEY if self is Kind.passkey else MAGIC_NUMBER

    @property
    def words(self) -> str:
        return f"one of {MULTI_KEYS} magic numbers" if self is Kind.multi else self.template.title


@dataclass(frozen=True, slots=True)
class NeedlePrompt:
    """A prompt that hides a number.

    kind, depth: what is asked for, and how far into the filler it stands, 0 to 1.
    wanted, length: tokens that were asked for, and that the prompt has.
    input: the prompt.   outputs: what the answer must contain.
    """

    index: int
    kind: Kind
    depth: float
    wanted: int
    length: int
    input: str
    outputs: tuple[str, ...]


class Replayed:
    """An endless iterator that can be read again and again from its start; what was read is kept."""

    def __init__(self, source: Iterator[str]) -> None:
        self._source, self._seen = source, list[str]()

    def __iter__(self) -> Iterator[str]:
        index = 0
        while True:
            if index == len(self._seen):
                self._seen.append(next(self._source))
            yield self._seen[index]
            index += 1


def even_depths(count: int) -> list[float]:
    """`count` depths from 0 to 1, equally far apart; the middle for one."""
    return [index / (count - 1) for index in range(count)] if count > 1 else [0.5]


def make_prompts(
    tokenizer: TextTokenizer, chat: bool, kind: Kind, lengths: Sequence[int], depths: Sequence[float], seed: int
) -> Iterator[NeedlePrompt]:
    """A prompt for every length and depth, length by length; the same for the same arguments.

    A prompt has as many tokens as asked for, the chat template's own included if `chat`. Where the tokenizer does not
    come to that number, it has as many as can be reached below. The filler of a short prompt is the beginning of that
    of a long one; numbers, key words and the places of other needles are drawn for every prompt.

    Raises:
        UsageError: a length that is too short for the needles and the question.
    """
    filler, places = Replayed(tales(seed)), product(lengths, depths)
    chars_per_token = 1.0
    for index, (length, depth) in enumerate(places):
        needles, asked = _needles(kind, depth, random.Random(f"{seed} {kind.value} {length} {depth}"))
        found = _fitted(tokenizer, chat, needles, asked, filler, length, round(length * chars_per_token))
        chars_per_token = found.size / found.tokens
        yield NeedlePrompt(index, kind, depth, length, found.tokens, found.written, (asked.number,))


def _fitted(
    tokenizer: TextTokenizer,
    chat: bool,
    needles: Sequence[tuple[float, Needle]],
    asked: Needle,
    filler: Iterable[str],
    length: int,
    guess: int,
) -> Fit[str]:
    """The prompt of a length, in tokens. guess: characters of its document."""
    try:
        return fit(
            lambda size: hide(needles, filler, size).prompt(asked),
            lambda text: len(tokenizer.encode(text, chat)),
            length,
            smallest=smallest_size(needles),
            guess=guess,
            around=CLOSE_SIZES,
        )
    except ValueError as error:
        raise UsageError(f"a length of {length:,} is too short for the needles: {error}; give a longer one") from None


def _needles(kind: Kind, depth: float, rng: random.Random) -> tuple[list[tuple[float, Needle]], Needle]:
    """Needles with their depths, and the one that is asked for, which comes first."""
    count = MULTI_KEYS if kind is Kind.multi else 1
    keys = [""] if kind is Kind.passkey else rng.sample(nouns(), count)
    low = 10 ** (kind.template.digits - 1)
    numbers = rng.sample(range(low, 10 * low), count)
    needles = [Needle(kind.template, str(number), key) for number, key in zip(numbers, keys, strict=True)]
    places = [depth, *(rng.random() for _ in needles[1:])]
    return list(zip(places, needles, strict=True)), needles[0]
