"""Filler sentences for haystacks."""

from __future__ import annotations

import random
from collections.abc import Iterator

# The filler of the pass key and of RULER's simplest haystack.
NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")

_WHO = (
    "the old baker",
    "a tired clerk",
    "my neighbour",
    "the harbour master",
    "a young painter",
    "the miller's daughter",
    "an honest thief",
    "the village doctor",
    "a retired sailor",
    "the night watchman",
    "two cousins from the coast",
    "nobody",
)
_DID = (
    "carried",
    "repaired",
    "forgot",
    "counted",
    "borrowed",
    "painted",
    "described",
    "buried",
    "found",
    "sold",
    "admired",
    "measured",
)
_WHAT = (
    "a crate of lemons",
    "the broken clock",
    "three letters",
    "the long ladder",
    "a map of the valley",
    "some blue cloth",
    "the church bell",
    "an empty barrel",
    "a pair of boots",
    "the second gate",
    "half of the harvest",
    "a small brown dog",
)
_WHEN = (
    "before the rain came",
    "on the last day of the fair",
    "while the others slept",
    "without a word",
    "in the early morning",
    "because of the wind",
    "behind the station",
    "after a short rest",
    "as the ferry left",
    "far from the road",
)


def noise() -> Iterator[str]:
    """The sentences of NOISE, again and again."""
    while True:
        yield from NOISE


def tales(seed: int) -> Iterator[str]:
    """Sentences of plain English, put together at random, without end."""
    rng = random.Random(seed)
    while True:
        sentence = f"{rng.choice(_WHO)} {rng.choice(_DID)} {rng.choice(_WHAT)}"
        if rng.random() < 0.8:
            sentence += f" {rng.choice(_WHEN)}"
        if rng.random() < 0.25:
            sentence += f", and {rng.choice(_WHO)} {rng.choice(_DID)} {rng.choice(_WHAT)}"
        yield sentence[0].upper() + sentence[1:] + "."
