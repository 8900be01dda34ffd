"""Random text: key words, numbers and filler sentences, all made up, so that nothing real was seen in training."""

from __future__ import annotations

import random
import re
import string

from longgen.evaluation.needle import MAGIC_NUMBER, PASS_KEY

_LETTERS = string.ascii_lowercase
_PRINTABLE = "".join(chr(code) for code in range(33, 127))
# The words of needles and questions stand in filler too: they alone must be no sign of a needle.
_COMMON = tuple(
    sorted(
        {
            word
            for template in (PASS_KEY, MAGIC_NUMBER)
            for word in re.findall("[a-z]+", f"{template.intro} {template.needle} {template.question}".lower())
        }
    )
)
_ENDS = (".", ".", ".", "!", "?", ";", ":", ",")


def digits(rng: random.Random, count: int) -> str:
    """A number of `count` digits, the first of which is not 0."""
    return str(rng.randrange(10 ** (count - 1), 10**count))


def letters(rng: random.Random, count: int) -> str:
    return "".join(rng.choices(_LETTERS, k=count))


def key_words(rng: random.Random, count: int) -> list[str]:
    """Different key words: letters, a third of the sets with a hyphen, a third alike at the start or the end."""
    joint = "-" if rng.random() < 0.33 else ""
    kind = rng.random()
    shared = letters(rng, rng.randrange(2, 5))
    words: set[str] = set()
    ordered: list[str] = []
    while len(ordered) < count:
        word = letters(rng, rng.randrange(3, 10))
        if joint:
            word = letters(rng, rng.randrange(3, 7)) + joint + word
        if kind < 0.17:
            word = shared + word
        elif kind < 0.34:
            word += shared
        if word not in words:
            words.add(word)
            ordered.append(word)
    return ordered


def random_string(rng: random.Random, count: int) -> str:
    """Characters of one of several alphabets, mostly large ones, in which one character says where one is."""
    alphabets = (_PRINTABLE, _LETTERS, _LETTERS[: rng.randrange(6, 26)], string.digits)
    (alphabet,) = rng.choices(alphabets, (0.55, 0.3, 0.1, 0.05))
    return "".join(rng.choices(alphabet, k=count))


def filler(rng: random.Random, size: int) -> list[str]:
    """Sentences with the white space after each, `size` characters or a little more in all."""
    if size <= 0:
        return []
    styles = (_prose, _prose, _loop, _loop, _records)
    return rng.choice(styles)(rng, size)


def _vocabulary(rng: random.Random) -> list[str]:
    words = [letters(rng, rng.randrange(2, 10)) for _ in range(60)] + rng.choices(_COMMON, k=12)
    if rng.random() < 0.4:
        words += [digits(rng, rng.randrange(1, 6)) for _ in range(6)]
    return words


def _sentence(rng: random.Random, words: list[str], gap: str) -> str:
    return " ".join(rng.choices(words, k=rng.randrange(3, 14))).capitalize() + rng.choice(_ENDS) + gap


def _gap(rng: random.Random) -> str:
    return "\n" if rng.random() < 0.25 else " "


def _prose(rng: random.Random, size: int) -> list[str]:
    words, gap, made = _vocabulary(rng), _gap(rng), 0
    sentences = []
    while made < size:
        sentences.append(_sentence(rng, words, gap))
        made += len(sentences[-1])
    return sentences


def _loop(rng: random.Random, size: int) -> list[str]:
    """A few sentences again and again, as the classic haystacks are."""
    words, gap = _vocabulary(rng), _gap(rng)
    few = [_sentence(rng, words, gap) for _ in range(rng.randrange(2, 8))]
    length = sum(map(len, few))
    start = rng.randrange(len(few))
    return (few * (size // length + 2))[start : start + len(few) * (size // length + 1)]


def _records(rng: random.Random, size: int) -> list[str]:
    """Lines of a log or a table: much of it is numbers."""
    tags = [letters(rng, rng.randrange(2, 8)) for _ in range(5)]
    made, lines = 0, []
    while made < size:
        first, last = (digits(rng, rng.randrange(1, 6)) for _ in range(2))
        lines.append(f"{first} {rng.choice(tags)}{rng.choice('= :,')}{rng.choice(tags)} {last}\n")
        made += len(lines[-1])
    return lines
