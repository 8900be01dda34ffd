"""Places that results are to be written to, tried before the work begins."""

from __future__ import annotations

import os
from pathlib import Path

from longgen.errors import UsageError


def check_place(path: Path, what: str) -> None:
    """Raises UsageError, which begins with `what`, unless a file can be written at `path`; leaves it as it was.

    What is there must be a file: a pipe would be waited for, and a device would be replaced.
    """
    there = os.path.exists(path)
    if there and not path.is_file() and not path.is_dir():
        raise UsageError(f"{what} cannot be written: it is there and is no file")
    try:
        path.open("ab").close()
    except OSError as error:
        raise UsageError(f"{what} cannot be written: {error.strerror or error}") from None
    if not there:
        os.unlink(os.path.realpath(path))  # what a link leads to, not the link
