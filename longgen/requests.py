"""Where prompts come from: a text file, or standard input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from longgen.errors import UsageError


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    id: the file's name without its folder, or "stdin"; with the seed it decides the request's random numbers.
    source: where the text came from, for messages.
    text: the prompt, every character as it was found.
    """

    id: str
    source: str
    text: str


def read_requests(sources: Sequence[str], stdin: BinaryIO | None) -> list[Request]:
    """One request per source, in order. A source is the path of a UTF-8 text file, or "-" for `stdin` (None: closed).

    Raises UsageError naming the source if it cannot be read, is empty or is not UTF-8, and if "-" is given twice.
    """
    if sources.count("-") > 1:
        raise UsageError("the prompt - (standard input) is given more than once; it can be read only once")
    return [_read(source, stdin) for source in sources]


def _read(source: str, stdin: BinaryIO | None) -> Request:
    name, shown = ("stdin", "standard input") if source == "-" else (Path(source).name, source)
    try:
        data = Path(source).read_bytes() if source != "-" else stdin.read() if stdin else None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise UsageError(f"the prompt {shown} cannot be read: {getattr(error, 'strerror', error)}") from None
    if data is None:
        raise UsageError("the prompt - cannot be read: standard input is closed")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise UsageError(f"the prompt {shown} is not UTF-8: byte 0x{byte:02x} at offset {error.start:,}") from None
    if not text:
        raise UsageError(f"the prompt {shown} is empty; it must hold at least one character")
    return Request(id=name, source=shown, text=text)
