"""Where prompts come from: a text file, or standard input."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from longgen.errors import UsageError

# Signs at the start of a file that say how its text is written; they are not part of the text.
_SIGNS = (
    (codecs.BOM_UTF8, "utf-8", "UTF-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le", "UTF-16"),
    (codecs.BOM_UTF16_BE, "utf-16-be", "UTF-16"),
)


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


def read_requests(sources: Sequence[str], stdin: BinaryIO | None, errors: str = "strict") -> list[Request]:
    """One request per source, in order. A source is the path of a text file, or "-" for `stdin` (None: closed).

    errors: "strict", or "replace" to read U+FFFD in place of bytes that are no text.

    Raises UsageError naming the source if it cannot be read, is empty or is not text, and if "-" is given twice.
    """
    if sources.count("-") > 1:
        raise UsageError("the prompt - (standard input) is given more than once; it can be read only once")
    return [_read(source, stdin, errors) for source in sources]


def _read(source: str, stdin: BinaryIO | None, errors: str) -> Request:
    name, shown = ("stdin", "standard input") if source == "-" else (Path(source).name, source)
    try:
        data = Path(source).read_bytes() if source != "-" else stdin.read() if stdin else None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise UsageError(f"the prompt {shown} cannot be read: {getattr(error, 'strerror', error)}") from None
    if data is None:
        raise UsageError("the prompt - cannot be read: standard input is closed")
    text = decode(data, shown, errors)
    if not text:
        raise UsageError(f"the prompt {shown} is empty; it must hold at least one character")
    return Request(id=name, source=shown, text=text)


def decode(data: bytes, shown: str, errors: str = "strict") -> str:
    """The text of a file's bytes: UTF-8, with or without its sign, or UTF-16 with its own. Nothing else is changed.

    Raises UsageError that names `shown` and the offset of the first bytes that are no text, unless `errors` is
    "replace"; and for UTF-32.
    """
    sign, encoding, name = next((known for known in _SIGNS if data.startswith(known[0])), (b"", "utf-8", "UTF-8"))
    if data.startswith(codecs.BOM_UTF32_LE) and _is_utf32(data):  # whose sign begins like that of UTF-16
        raise UsageError(f"the prompt {shown} is UTF-32; write it as UTF-8 or UTF-16")
    try:
        return str(memoryview(data)[len(sign) :], encoding, errors)
    except UnicodeDecodeError as error:
        offset = len(sign) + error.start
        raise UsageError(
            f"the prompt {shown} is not {name}: byte 0x{data[offset]:02x} at offset {offset:,}; correct it, or give "
            "--encoding-errors replace"
        ) from None


def _is_utf32(data: bytes) -> bool:
    try:
        data.decode("utf-32")
    except UnicodeDecodeError:
        return False
    return True
