"""What every task gives."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Sample:
    """One question. answer_prefix: what the answer begins with, after the prompt; outputs: what it must contain."""

    input: str
    answer_prefix: str
    outputs: tuple[str, ...]


class Task(Protocol):
    """A task at one length.

    Attributes:
        budget: tokens for the answer.
        smallest: size that `write` can do with.
        haystack: what the text is made of.
    """

    @property
    def budget(self) -> int: ...

    @property
    def smallest(self) -> int: ...

    @property
    def haystack(self) -> str: ...

    def write(self, rng: random.Random, size: int) -> Sample:
        """A question over a text of a size: sentences, words, whatever the task counts."""
        ...
