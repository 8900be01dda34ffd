"""Scores by length and depth: as a table of text, and as a heat map that matplotlib draws."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from longgen.errors import LongGenError, UsageError
from longgen.places import check_place
from longgen.units import show_length

Scores = Mapping[tuple[int, float], float | None]  # 0 to 1, by length and depth; None for a request that failed


def table(scores: Scores) -> str:
    """Scores in percent, a row for each depth and a column for each length, with the mean of every column."""
    lengths, depths = axes(scores)
    width = max(len("failed"), *(len(f"{length:,}") for length in lengths)) + 2
    rows = [("depth", [f"{length:,}" for length in lengths])]
    rows += [(f"{depth:.0%}", [_percent([scores[length, depth]]) for length in lengths]) for depth in depths]
    rows.append(("mean", [_percent([scores[length, depth] for depth in depths]) for length in lengths]))
    return "\n".join(f"{name:>6}" + "".join(f"{cell:>{width}}" for cell in cells) for name, cells in rows)


def axes(scores: Scores) -> tuple[list[int], list[float]]:
    """The lengths and the depths, each from the smallest."""
    return sorted({length for length, _ in scores}), sorted({depth for _, depth in scores})


def _percent(scores: Sequence[float | None]) -> str:
    known = [score for score in scores if score is not None]
    return f"{100 * sum(known) / len(known):.0f}" if len(known) == len(scores) else "failed"


def check_plot(path: Path) -> None:
    """Raises UsageError if a heat map cannot be drawn, or not there."""
    if path.suffix.lower() != ".png":
        raise UsageError(f"--plot {path}: the heat map is a PNG; give a name that ends in .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed; run pip install 'longgen[plot]'")
    check_place(path, f"--plot {path}")


def draw(path: Path, title: str, scores: Scores) -> None:
    """Writes a PNG of the scores: lengths from left to right, depths from top to bottom; red to green, failures grey.

    Raises LongGenError if the file cannot be written.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lengths, depths = axes(scores)
    grid = [[_number(scores[length, depth]) for length in lengths] for depth in depths]
    figure = Figure(figsize=(2.5 + 0.7 * len(lengths), 1.7 + 0.32 * len(depths)), layout="constrained")
    canvas, plot = FigureCanvasAgg(figure), figure.add_subplot()
    colours = colormaps["RdYlGn"].with_extremes(bad="lightgrey")
    image = plot.pcolormesh(grid, cmap=colours, vmin=0, vmax=1, edgecolors="white", linewidth=1)
    plot.invert_yaxis()
    plot.set_xticks([index + 0.5 for index in range(len(lengths))], [show_length(length) for length in lengths])
    plot.set_yticks([index + 0.5 for index in range(len(depths))], [f"{depth:.0%}" for depth in depths])
    plot.set(title=title, xlabel="prompt tokens", ylabel="depth of the needle")
    plot.tick_params(length=0)
    figure.colorbar(image, ax=plot, label="score")
    try:
        canvas.print_png(path)
    except OSError as error:
        raise LongGenError(f"the heat map {path} cannot be written: {error.strerror or error}") from error


def _number(score: float | None) -> float:
    return float("nan") if score is None else score
