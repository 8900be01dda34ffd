"""Progress bars: of tokenizing, and of prefill with an estimate that knows what prefill costs.

In prefill each new token attends to all tokens before it, so n tokens cost a * n + b * n**2 seconds. An estimate from
the rate so far is wrong by more the longer the prompt; this one fits a and b to the chunks that are done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TextIO

from tqdm import tqdm

LONG_TEXT_CHARS = 1_000_000  # a fifth of a second


def fit_cost(samples: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """The cost of prefill, seconds(n) = a * n + b * n**2, as (a, b), both 0 or more; None before two chunks are done.

    samples: (tokens done, seconds since the start) after each chunk, increasing. Least squares over the time of each
    chunk. The first chunk also pays for what is made on first use, so it is left out as soon as two others are done.
    """
    if len(samples) < 2:
        return None
    points = [(0, 0.0), *samples]
    first = 1 if len(samples) > 2 else 0
    xx = xy = yy = xt = yt = 0.0
    for (n0, t0), (n1, t1) in zip(points[first:], points[first + 1 :], strict=False):
        x, y, t = float(n1 - n0), float(n1**2 - n0**2), t1 - t0
        xx, xy, yy, xt, yt = xx + x * x, xy + x * y, yy + y * y, xt + x * t, yt + y * t
    determinant = xx * yy - xy * xy
    # Chunks that differ too little to tell the two terms apart leave a determinant that is rounding only.
    if determinant <= 1e-12 * xx * yy:
        return xt / xx, 0.0
    a, b = (xt * yy - yt * xy) / determinant, (yt * xx - xt * xy) / determinant
    if b < 0:
        return xt / xx, 0.0
    return (a, b) if a >= 0 else (0.0, yt / yy)


def seconds_left(samples: Sequence[tuple[int, float]], total: int) -> float | None:
    """Seconds until `total` tokens are done, 0 or more; None before two chunks are done. See fit_cost."""
    cost = fit_cost(samples)
    if cost is None:
        return None
    a, b = cost
    done = samples[-1][0]
    return max(0.0, a * (total - done) + b * (total**2 - done**2))


class TokenizingProgress:
    """A tqdm bar over the characters of all prompts while they are encoded.

    A context manager that draws nothing if it is not shown, or if the prompts are short.
    """

    def __init__(self, total: int, *, shown: bool, stream: TextIO) -> None:
        self._bar = tqdm(
            total=total,
            desc="tokenizing",
            unit="char",
            unit_scale=True,
            file=stream,
            disable=not shown or total < LONG_TEXT_CHARS,
            dynamic_ncols=True,
        )

    def update(self, count: int) -> None:
        """Note that `count` more characters are encoded."""
        self._bar.update(count)

    def __enter__(self) -> TokenizingProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


class PrefillProgress:
    """A tqdm bar over the tokens of one prompt: tokens, tokens per second and the time left.

    A context manager that draws nothing if it is not shown; call `update` with the tokens done after every chunk.
    """

    def __init__(self, total: int, *, shown: bool, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._started = clock()
        self._samples: list[tuple[int, float]] = []
        self._bar = tqdm(
            total=total,
            desc="prefill",
            unit="tok",
            unit_scale=True,
            file=stream,
            disable=not shown,
            dynamic_ncols=True,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} tok [{elapsed}, {rate_fmt}{postfix}]",
        )

    def update(self, done: int) -> None:
        """Note that the first `done` tokens are prefilled."""
        before = self._samples[-1][0] if self._samples else 0
        if done <= before:
            return
        self._samples.append((done, self._clock() - self._started))
        if self._bar.disable:
            return
        left = seconds_left(self._samples, self._total)
        eta = "?" if left is None else tqdm.format_interval(left)
        self._bar.set_postfix_str(f"ETA {eta}" if done < self._total else "", refresh=False)
        self._bar.update(done - before)

    def __enter__(self) -> PrefillProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
