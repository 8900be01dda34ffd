"""Texts of a given number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
PATIENCE = 12  # tries after which the bounds are halved instead of guessed between


@dataclass(frozen=True, slots=True)
class Fit(Generic[T]):
    """What was written at a size, and the tokens that it comes to."""

    size: int
    tokens: int
    written: T


def fit(
    write: Callable[[int], T],
    count: Callable[[T], int],
    tokens: int,
    *,
    smallest: int,
    guess: int = 0,
    around: int = 0,
) -> Fit[T]:
    """What comes to `tokens` tokens, or, where no size tried does, to the most below.

    The count need not grow with every step of the size, only in the large: where two sizes next to each other lie below
    and above, the `around` sizes on either side are tried too. A good guess spares most of the tries, each of which
    writes and counts once.

    Args:
        write: makes what is counted, of a size: characters, sentences, words.
        count: its tokens.
        tokens: wanted, at least those of the smallest size.
        smallest: size.
        guess: size to begin with.

    Raises:
        ValueError: the smallest size comes to more.
    """

    def attempt(size: int) -> Fit[T]:
        written = write(size)
        return Fit(size, count(written), written)

    low = best = first = attempt(smallest)
    high: Fit[T] | None = None
    if low.tokens > tokens:
        raise ValueError(f"{low.tokens:,} tokens at the smallest size")
    size, tries = max(guess, smallest + 1), 0
    while best.tokens < tokens and (high is None or high.size - low.size > 1):
        tried = attempt(size)
        if tried.tokens > tokens:
            high = tried
        else:
            low = tried
            best = max(best, tried, key=lambda each: each.tokens)
        size, tries = _next_size(first, tried, low, high, tokens), tries + 1
        if high is not None and tries > PATIENCE:
            size = (low.size + high.size) // 2
    for step in range(1, around + 1):
        for size in (low.size - step, low.size + 1 + step):
            if best.tokens == tokens:
                return best
            tried = attempt(max(size, smallest))
            if best.tokens < tried.tokens <= tokens:
                best = tried
    return best


def _next_size(first: Fit[T], tried: Fit[T], low: Fit[T], high: Fit[T] | None, tokens: int) -> int:
    """The size that would fit if tokens grew evenly, kept between the bounds; unbounded, at most twice it."""
    rate = max(tried.tokens - first.tokens, 1) / max(tried.size - first.size, 1)
    size = tried.size + round((tokens - tried.tokens) / rate)
    most = 2 * low.size + 16 if high is None else high.size - 1
    return min(max(size, low.size + 1), most)
