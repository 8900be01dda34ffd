"""Standard error of the program, which a run can do without."""

from __future__ import annotations

import io
from typing import Any, TextIO


class _Lossy(io.FileIO):
    """A file that takes what it is given, and loses what cannot be written."""

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return len(data) if written is None else written


def lossy(stream: TextIO) -> TextIO:
    """The stream over the same descriptor, in which what cannot be written, as on a full disk, is lost and no error.

    What has no descriptor is given back as it is.
    """
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # io.UnsupportedOperation is both; ValueError: it is closed
        return stream
    raw = io.BufferedWriter(_Lossy(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True)
