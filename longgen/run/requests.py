"""Where prompts come from: a text file, or standard input. Records of JSONL files: longgen.run.records."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

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

    id: the file's name without its folder, "stdin", or the record's; with the seed it decides the random numbers.
    source: where it came from, for messages.
    text: the prompt, every character as it was found.
    messages: in place of a text, (role, text) of each message of a conversation.
    opening: what the answer begins with; not part of the answer.
    own: settings of its own, as they were given, by the names in longgen.run.own_settings.
    fields: of its record, for the results: they are passed through as they are.
    fault: what is wrong with it, so that it cannot be run; empty: nothing.
    """

    id: str
    source: str
    text: str = ""
    messages: tuple[tuple[str, str], ...] | None = None
    opening: str = ""
    own: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""

    @property
    def chars(self) -> int:
        """Characters of the prompt."""
        texts = [self.text] if self.messages is None else [text for _, text in self.messages]
        return sum(map(len, texts)) + len(self.opening)

    def prompt_hash(self) -> str:
        """Tells whether a record still asks what it asked: 32 hex digits, of the prompt alone and of no setting."""
        prompt = json.dumps([self.text, self.messages, self.opening])
        return hashlib.sha256(prompt.encode("ascii")).hexdigest()[:32]


def check_standard_input(sources: Sequence[str], stdin: BinaryIO | None) -> None:
    """Raises UsageError if standard input is asked for and closed, or asked for twice."""
    if sources.count("-") > 1:
        raise UsageError("the prompt - (standard input) is given more than once; it can be read only once")
    if "-" in sources and stdin is None:
        raise UsageError("the prompt - cannot be read: standard input is closed")


def shown_name(source: str) -> str:
    """A source as messages call it."""
    return "standard input" if source == "-" else source


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Turns what goes wrong while a source is read into a UsageError that names it."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        problem = getattr(error, "strerror", None) or error
        raise UsageError(f"the prompt {shown_name(source)} cannot be read: {problem}") from None


def text_request(source: str, data: bytes, errors: str) -> Request:
    """The request that a text file makes. Raises UsageError if it is empty or no text."""
    shown = shown_name(source)
    text = decode(data, shown, errors)
    if not text:
        raise UsageError(f"the prompt {shown} is empty; it must hold at least one character")
    return Request(id="stdin" if source == "-" else Path(source).name, source=shown, text=text)


def decode(data: bytes, shown: str, errors: str = "strict") -> str:
    """The text of a file's bytes: UTF-8, with or without its sign, or UTF-16 with its own. Nothing else is changed.

    Raises UsageError that names `shown` and the offset of the first bytes that are no text, unless `errors` is
    "replace"; and for UTF-32.
    """
    sign, encoding, name = sign_of(data)
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


def sign_of(data: bytes) -> tuple[bytes, str, str]:
    """The sign that a file's bytes begin with (empty: none), Python's name of the encoding and the usual one."""
    return next((known for known in _SIGNS if data.startswith(known[0])), (b"", "utf-8", "UTF-8"))


def _is_utf32(data: bytes) -> bool:
    if len(data) == len(codecs.BOM_UTF32_LE):  # a NUL in UTF-16
        return False
    try:
        data.decode("utf-32")
    except UnicodeDecodeError:
        return False
    return True
