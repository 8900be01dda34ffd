"""Needles in a haystack: numbers hidden in filler text, and the questions that ask for them.

Two tasks. The pass key of Mohtashami and Jaggi (2023, arXiv:2305.16300, appendix): one number, asked for by name. The
magic number of RULER (Hsieh et al. 2024, arXiv:2404.06654, NIAH): a number with a key word, alone or among others that
differ in the key word. Everything that trains, tests or evaluates a model on them takes the texts from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from longgen.errors import UsageError


class Template(Enum):
    """The texts of one task.

    Attributes:
        title: the task in words.
        intro: opens the document.
        needle: hides `{number}`, for `{key}` where the task has one.
        question: follows the document, and ends where the number begins.
        digits: of the number.
    """

    PASS_KEY = (
        "pass key",
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
        "I will quiz you about the important information there.",
        "The pass key is {number}. Remember it. {number} is the pass key.",
        "What is the pass key? The pass key is",
        5,
    )
    MAGIC_NUMBER = (
        "magic number",
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the numbers afterwards.",
        "One of the special magic numbers for {key} is: {number}.",
        "What is the special magic number for {key} mentioned in the provided text? "
        "The special magic number for {key} mentioned in the provided text is",
        7,
    )

    def __init__(self, title: str, intro: str, needle: str, question: str, digits: int) -> None:
        self.title, self.intro, self.needle, self.question, self.digits = title, intro, needle, question, digits


PASS_KEY, MAGIC_NUMBER = Template.PASS_KEY, Template.MAGIC_NUMBER


@dataclass(frozen=True, slots=True)
class Needle:
    """One hidden number. key: its key word; empty for a task without one."""

    template: Template
    number: str
    key: str = ""

    @property
    def text(self) -> str:
        """The sentence to hide."""
        return self.template.needle.format(number=self.number, key=self.key)

    @property
    def question(self) -> str:
        """The question, ending where the number begins."""
        return self.template.question.format(key=self.key)


@dataclass(frozen=True, slots=True)
class Document:
    """A text that hides needles.

    Attributes:
        text: the whole, ending with a newline; a question appended to it makes a prompt.
        spans: where each needle stands, in the order they were given: characters [start, stop) of `text`.
    """

    text: str
    spans: tuple[tuple[int, int], ...]

    def prompt(self, needle: Needle) -> str:
        """The document followed by the question for `needle`."""
        return self.text + needle.question


def hide(needles: Sequence[tuple[float, Needle]], filler: Iterable[str], size: int, *, intro: str = "") -> Document:
    """Hides needles between the sentences of a filler text.

    Args:
        needles: each with its depth, 0 (start of the filler) to 1 (its end); it goes before the first sentence that
            starts there or later.
        filler: sentences, enough of them; joined by spaces, the last one cut so that the size is exact.
        size: characters of the document.
        intro: its first line; empty: that of the first needle's task.

    Raises:
        UsageError: `size` is too small for the needles, or the filler too short.
    """
    opening = _opening(needles, intro)
    needed = smallest_size(needles, intro=intro)
    if size < needed:
        raise UsageError(f"a document of {size:,} characters is too small: {needed:,} are needed")
    room = size - needed
    sentences = _cut(filler, room)
    parts, spans = [opening], {}
    waiting = sorted(range(len(needles)), key=lambda index: needles[index][0])
    length, done = len(opening), 0  # of the text so far, and of the filler in it
    for sentence in [*sentences, ""]:
        while waiting and (needles[waiting[0]][0] * room <= done or not sentence):
            text = needles[waiting[0]][1].text
            spans[waiting.pop(0)] = (length, length + len(text))
            parts.append(text + " ")
            length += len(text) + 1
        parts.append(sentence)
        length, done = length + len(sentence), done + len(sentence)
    return Document("".join(parts) + "\n", tuple(spans[index] for index in range(len(needles))))


def smallest_size(needles: Sequence[tuple[float, Needle]], *, intro: str = "") -> int:
    """Characters of the smallest document that `hide` makes of these needles, with no filler."""
    return len(_opening(needles, intro)) + sum(len(needle.text) + 1 for _, needle in needles) + 1


def _opening(needles: Sequence[tuple[float, Needle]], intro: str) -> str:
    return (intro or needles[0][1].template.intro) + "\n"


def _cut(filler: Iterable[str], room: int) -> list[str]:
    """Sentences with a space after each, `room` characters in all."""
    sentences: list[str] = []
    left = room
    for sentence in filler:
        if left <= 0:
            break
        sentences.append((sentence + " ")[:left])
        left -= len(sentences[-1])
    if left > 0:
        raise UsageError(f"the filler is {left:,} characters short of {room:,}")
    return sentences


def is_right(needle: Needle, answer: str) -> bool:
    """Whether the answer is the needle's number, and nothing else but white space around it."""
    return answer.strip() == needle.number
