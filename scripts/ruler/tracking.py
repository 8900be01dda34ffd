"""Variable tracking: a chain of assignments among noise; all variables that come to its value are asked for."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from ruler.niah import NOISE_SENTENCE
from ruler.sample import Sample

HOPS = 4
EXAMPLE_TOKENS = 500  # most of the worked example
EXAMPLE_STEP = 5  # sentences by which the example's noise grows
_TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {query} in the text above."
)
_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {query}, they are: "
)


@dataclass(frozen=True, slots=True)
class VariableTracking:
    """The task. A size is sentences of noise. example_size: those of the worked example that comes first."""

    example_size: int

    @property
    def budget(self) -> int:
        return 30

    @property
    def smallest(self) -> int:
        return HOPS + 1

    @property
    def haystack(self) -> str:
        return "noise"

    def write(self, rng: random.Random, size: int) -> Sample:
        example = example_text(rng, self.example_size)
        question = _question(rng, size, letters=5)
        return Sample(f"{example}\n\n{question.input}", question.answer_prefix, question.outputs)


def example_text(rng: random.Random, size: int) -> str:
    """A worked example, the answer included; its variables have three letters."""
    sample = _question(rng, size, letters=3)
    return f"{sample.input}{sample.answer_prefix} {' '.join(sample.outputs)}"


def example_size(count: Callable[[str], int]) -> int:
    """Sentences of noise in the example: the most that keep it to EXAMPLE_TOKENS, in steps; one step at least."""
    size = EXAMPLE_STEP
    while count(example_text(random.Random(0), size + EXAMPLE_STEP)) <= EXAMPLE_TOKENS:
        size += EXAMPLE_STEP
    return size


def _question(rng: random.Random, size: int, letters: int) -> Sample:
    names: list[str] = []
    while len(names) < HOPS + 1:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in names:
            names.append(name)
    value = str(rng.randint(10_000, 99_999))
    lines = [NOISE_SENTENCE] * size
    # As published, all assignments but the first end with a space.
    chain = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in pairwise(names))]
    for offset, place in enumerate(sorted(rng.sample(range(size), len(chain)))):
        lines.insert(place + offset, chain[offset])
    return Sample(
        _TEMPLATE.format(context="\n".join(lines), query=value),
        _PREFIX.format(count=len(names), query=value),
        tuple(names),
    )
