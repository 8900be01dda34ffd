"""Tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def table_lines(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Columns as wide as needed; floats with four digits, None as a dash."""
    cells = [list(headers), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    for row in cells:
        yield "  " + "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
