"""The estimate of the prefill's time, with a clock that the tests move."""

from __future__ import annotations

import io

import pytest

from longgen.run.progress import LONG_TEXT_CHARS, PrefillProgress, TokenizingProgress, fit_cost, seconds_left


def _samples(a: float, b: float, chunks: int, chunk: int = 4096, warm_up: float = 0.0) -> list[tuple[int, float]]:
    return [(n, warm_up + a * n + b * n**2) for n in (chunk * (i + 1) for i in range(chunks))]


class FakeClock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("chunks", [2, 3, 10, 500])
@pytest.mark.parametrize(("a", "b"), [(1e-3, 0.0), (1e-4, 2e-9), (0.0, 1e-8)])
def test_linear_and_quadratic_costs_are_found(a: float, b: float, chunks: int) -> None:
    fitted = fit_cost(_samples(a, b, chunks))
    assert fitted == (pytest.approx(a, rel=1e-5, abs=1e-9), pytest.approx(b, rel=1e-5, abs=1e-14))


def test_the_time_left_counts_the_quadratic_part() -> None:
    a, b, total = 1e-4, 2e-9, 4_194_304
    samples = _samples(a, b, 256)
    done, elapsed = samples[-1]
    assert done == total // 4
    expected = a * total + b * total**2 - elapsed
    assert seconds_left(samples, total) == pytest.approx(expected, rel=1e-6)
    assert elapsed / done * (total - done) < expected / 3  # what an estimate from the mean rate would say


def test_a_slow_first_chunk_does_not_disturb_the_estimate() -> None:
    a, b, total = 1e-4, 2e-9, 400_000
    clean, slow = _samples(a, b, 10), _samples(a, b, 10, warm_up=30.0)
    assert seconds_left(slow, total) == pytest.approx(seconds_left(clean, total), rel=1e-5)


def test_a_last_chunk_that_is_shorter_fits_too() -> None:
    a, b = 1e-4, 2e-9
    samples = [*_samples(a, b, 5), (20_500, a * 20_500 + b * 20_500**2)]
    assert fit_cost(samples) == (pytest.approx(a, rel=1e-4), pytest.approx(b, rel=1e-4))


@pytest.mark.parametrize("seconds", [[1.0, 1.5, 1.8, 2.0], [0.0, 0.0, 0.5, 5.0], [1.0, 1.0, 1.0, 1.0]])
def test_no_cost_is_negative_whatever_the_times(seconds: list[float]) -> None:
    samples = [(1024 * (i + 1), t) for i, t in enumerate(seconds)]
    fitted = fit_cost(samples)
    assert fitted is not None
    assert min(fitted) >= 0
    left = seconds_left(samples, 100_000)
    assert left is not None
    assert left >= 0


def test_one_chunk_gives_no_estimate_and_a_finished_prefill_has_none_left() -> None:
    assert seconds_left([(1024, 1.0)], 4096) is None
    assert seconds_left(_samples(1e-4, 1e-9, 4), 4 * 4096) == 0.0


def test_the_bar_shows_tokens_and_the_time_left() -> None:
    stream, clock = io.StringIO(), FakeClock()
    with PrefillProgress(16_384, shown=True, stream=stream, clock=clock) as progress:
        progress._bar.mininterval = 0
        for done, seconds in _samples(1e-3, 1e-6, 4):
            clock.now = 1000.0 + seconds
            progress.update(done)
    frames = stream.getvalue().split("\r")
    at_half = next(frame for frame in frames if "8.19k/16.4k tok" in frame)
    assert "prefill:  50%" in at_half
    assert "tok/s" in at_half
    assert "ETA 03:29" in at_half  # 8.192 s of the linear and 201.3 s of the quadratic part are left
    assert "ETA ?" in next(frame for frame in frames if "4.10k/16.4k tok" in frame)
    assert "16.4k/16.4k tok" in frames[-1]
    assert "ETA" not in frames[-1]


def test_a_bar_that_is_not_shown_writes_nothing() -> None:
    stream = io.StringIO()
    with PrefillProgress(4096, shown=False, stream=stream) as progress:
        progress.update(2048)
        progress.update(4096)
    assert stream.getvalue() == ""


def test_tokenizing_has_a_bar_only_for_long_texts() -> None:
    for total, shown, drawn in (
        (LONG_TEXT_CHARS, True, True),
        (LONG_TEXT_CHARS - 1, True, False),
        (10**7, False, False),
    ):
        stream = io.StringIO()
        with TokenizingProgress(total, shown=shown, stream=stream) as progress:
            progress.update(total - 1)
            progress.update(1)
        assert ("tokenizing: 100%" in stream.getvalue()) == bool(stream.getvalue()) == drawn
