"""Time against length as a picture. matplotlib is imported only here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longgen.benchmarking.rows import cell
from longgen.errors import OutputError, UsageError
from longgen.places import check_place
from longgen.units import show_length

# (title, unit, value, its roofline)
_PANELS = (
    ("prefill", "seconds", "prefill.seconds", "prefill.roofline_s"),
    ("decode", "milliseconds a token", "decode.ms_per_token", "decode.roofline_ms"),
)


def check_plot(path: Path) -> None:
    """Raises UsageError, before anything is measured, if no plot can be written to `path`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib, which is not installed: pip install 'longgen[plot]'") from None
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.parent}")
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise UsageError(f"--plot {path}: the file's ending must be one of {', '.join(sorted(known))}")
    check_place(path, f"--plot {path}")


def draw(path: Path, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Seconds of prefill and of a decoded token against tokens, with the roofline of each.

    Raises OutputError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    figure.suptitle(title)
    for axes, (name, unit, value, roofline) in zip(figure.subplots(1, 2), _PANELS, strict=True):
        for label, path_of, style in (("measured", value, "o-"), ("roofline", roofline, "--")):
            points = sorted((row["tokens"], cell(row, path_of)) for row in rows if cell(row, path_of) is not None)
            if points:
                axes.plot(*zip(*points, strict=True), style, label=label)
        lengths = sorted({row["tokens"] for row in rows})
        axes.set(title=name, xlabel="tokens", ylabel=unit, xscale="log", yscale="log")
        axes.set_xticks(lengths, [show_length(tokens) for tokens in lengths])
        axes.minorticks_off()
        if axes.lines:
            axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise OutputError(error, f"--plot {path}") from error
