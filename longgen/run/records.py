"""Records of JSONL files as requests: where each one's prompt, id, settings and other fields are found."""

from __future__ import annotations

import codecs
import json
import math
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from string import whitespace
from typing import Any, BinaryIO, NoReturn

from longgen.config import HALF_CHARACTER, Settings
from longgen.errors import UsageError
from longgen.run.output import check_apart
from longgen.run.own_settings import HARMLESS, NAMES, REFUSED
from longgen.run.requests import Request, check_standard_input, reading, shown_name, sign_of, text_request

ID_NAMES = ("id", "custom_id", "_id", "index")
QUESTION_NAMES = ("input", "question", "query", "instruction")
ROLES = ("system", "user", "assistant")
SMALL_FIELD = 16_384  # characters of JSON: fields up to this size are passed through
MOST_NESTED = 200  # lists and objects in one another; Python writes about a thousand, less the calls it is in


def open_prompts(
    sources: Sequence[str], stdin: BinaryIO | None, settings: Settings
) -> tuple[Iterable[Request], Settings]:
    """The requests of a run, and its settings with the form that their results will have.

    A run is a batch if one of its prompts is JSONL, or if the settings name an output or a form of it: every request
    then gives a line, a text prompt too. Raises UsageError for prompts that cannot be read, and for settings that make
    sense for a batch only.
    """
    files = RequestFiles(sources, stdin, settings.prompt_format, settings.encoding_errors)
    if files.has_records or settings.output is not None or settings.output_format is not None:
        check_apart(settings.output, sources)
        return files, replace(settings, output_format=settings.output_format or "jsonl")
    if settings.shard is not None:
        raise UsageError("shard takes a part of a batch, and the prompts are texts; give a .jsonl file, or --output")
    return list(files), settings


class RequestFiles:
    """The requests of prompt files in order, read anew each time they are iterated, so that no text has to be kept.

    A file is JSONL if its name ends in .jsonl or `prompt_format` is "jsonl", and gives a request for every record;
    any other file is a text, and one request. What can be read only once, as standard input, is copied to a temporary
    file first.

    Args:
        sources: paths, or "-" for standard input.
        stdin: standard input; None: closed.
        prompt_format: "auto", "text" or "jsonl".
        errors: "strict", or "replace" to read U+FFFD in place of bytes that are no text.

    Raises UsageError for a source that cannot be read; iterating it does too, for what is no record.
    """

    def __init__(
        self, sources: Sequence[str], stdin: BinaryIO | None, prompt_format: str = "auto", errors: str = "strict"
    ) -> None:
        check_standard_input(sources, stdin)
        self._sources, self._format, self._errors = tuple(sources), prompt_format, errors
        self._copies = {source: _copied(source, stdin) for source in sources if _only_once(source)}

    @property
    def has_records(self) -> bool:
        """Whether one of the files is JSONL."""
        return any(map(self._is_jsonl, self._sources))

    def __iter__(self) -> Iterator[Request]:
        for source in self._sources:
            with ExitStack() as stack, reading(source):
                if source in self._copies:
                    file = self._copies[source]
                    file.seek(0)
                else:
                    file = stack.enter_context(open(source, "rb"))
                if self._is_jsonl(source):
                    yield from read_records(file, shown_name(source), self._errors)
                else:
                    yield text_request(source, file.read(), self._errors)

    def _is_jsonl(self, source: str) -> bool:
        return self._format == "jsonl" or (self._format == "auto" and source.lower().endswith(".jsonl"))


def _only_once(source: str) -> bool:
    """Whether a source is gone once it is read: standard input, or a pipe."""
    if source == "-":
        return True
    with reading(source):
        kind = Path(source).stat().st_mode
        return not stat.S_ISREG(kind) and not stat.S_ISDIR(kind)


def _copied(source: str, stdin: BinaryIO | None) -> BinaryIO:
    copy = tempfile.TemporaryFile()  # noqa: SIM115  as long as the requests may be read
    with reading(source), ExitStack() as stack:
        file = stdin if source == "-" and stdin is not None else stack.enter_context(open(source, "rb"))
        shutil.copyfileobj(file, copy)
    return copy


def read_records(lines: Iterable[bytes], name: str, errors: str = "strict") -> Iterator[Request]:
    """The request of every line that is not blank. lines: a file, or its bytes cut after each that is a line feed.

    name: of the file, for messages. errors: as in RequestFiles.
    Raises UsageError that names file and line for what is no JSON object, has no prompt or no id that can be used.
    """
    for number, text in enumerate(_decoded(lines, name, errors), 1):
        if text.strip(whitespace):
            where = f"{name} line {number}"
            record = _parse(text, where)
            if errors == "replace" and "\\ud" in text.casefold():
                record = _mended(record)
            yield _request(record, where, number)


def _decoded(lines: Iterable[bytes], name: str, errors: str) -> Iterator[str]:
    """The text of each line; a file is UTF-8, with or without its sign, or UTF-16 with its own."""
    pieces = iter(lines)
    first = next(pieces, b"")
    if first.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        raise UsageError(f"{name} is UTF-32; write it as UTF-8 or UTF-16")
    sign, encoding, called = sign_of(first)
    offset = len(sign)
    pieces = chain((first[offset:],), pieces)
    for number, line in enumerate(pieces if encoding == "utf-8" else _utf16_lines(pieces, encoding), 1):
        try:
            text = str(line, encoding, errors)
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{name} line {number} is not {called}: byte 0x{line[error.start]:02x} at offset "
                f"{offset + error.start:,}, {error.start:,} of the line; correct it, or give --encoding-errors replace"
            ) from None
        offset += len(line)
        line = b""  # a long one had better not be kept twice
        yield text


def _utf16_lines(pieces: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """The lines of UTF-16 text that was cut after every byte 0x0a, which most often is no line feed, or half of one."""
    line = bytearray()
    for piece in pieces:
        if encoding == "utf-16-le" and len(line) % 2 and line[-1:] == b"\n" and piece[:1] == b"\0":
            yield bytes(line) + b"\0"
            line, piece = bytearray(), piece[1:]
        line += piece
        if encoding == "utf-16-be" and len(line) % 2 == 0 and line[-2:] == b"\0\n":
            yield bytes(line)
            line = bytearray()
    if line:
        yield bytes(line)


def _mended(value: Any) -> Any:
    """JSON with U+FFFD in place of half characters, which only escapes can spell."""
    if isinstance(value, dict):
        return {_mended(name): _mended(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_mended(item) for item in value]
    return HALF_CHARACTER.sub("\ufffd", value) if isinstance(value, str) else value


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        _check_nesting(record)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is not JSON: {error.msg} at character {error.pos + 1:,} of the line") from None
    except RecursionError:
        raise UsageError(f"{where} is not JSON that can be read: it is nested too deep") from None
    except ValueError as error:  # NaN, or a number of thousands of digits
        raise UsageError(f"{where} is not JSON: {str(error).partition(';')[0]}") from None
    if isinstance(record, dict):
        return record
    raise UsageError(f'{where} holds {_kind(record)}; a record must be an object, such as {{"prompt": "..."}}')


def _check_nesting(value: Any) -> None:
    """Raises RecursionError for JSON that is nested too deep to be written again."""
    level = [value]
    for _ in range(MOST_NESTED):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list)))
        level = [*chain.from_iterable(inner)]
        if not level:
            return
    raise RecursionError


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):  # which has no JSON, so it could not be passed through
        raise ValueError(f"{text[:80]} is larger than a number can be")
    return value


def _kind(value: Any) -> str:
    """What JSON calls a value."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _request(record: dict[str, Any], where: str, number: int) -> Request:
    given = record.get("body")
    body = given if isinstance(given, dict) else {}
    name, prompt = _prompt(record, body, where)
    own = {key: source[key] for source in (record, body) for key in NAMES if key in source}
    asked = prompt is body.get("messages")  # an OpenAI request, and no field that happens to be called body
    known = {"messages", *NAMES, *HARMLESS}
    own |= {key: value for key, value in body.items() if key in REFUSED or (asked and key not in known)}
    request = Request(
        id=_id(record, where, number),
        source=where,
        own=own,
        fields=_small_fields(record, {name, "messages", "body"}),
    )
    try:
        opening = _text(record.get("answer_prefix") or "", "answer_prefix")
        if name == "messages":
            return replace(request, messages=_messages(prompt), opening=opening)
        if prompt == "":
            raise UsageError(f"{name} is empty; it must hold at least one character")
        return replace(request, text=_text(prompt, name), opening=opening)
    except UsageError as error:
        return replace(request, fault=str(error))


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} is {_kind(value)}; it must be a string")
    if HALF_CHARACTER.search(value):
        raise UsageError(
            f"{name} has half a character: a surrogate without its other half; correct it, or give "
            "--encoding-errors replace"
        )
    return value


def _prompt(record: Mapping[str, Any], body: Mapping[str, Any], where: str) -> tuple[str, Any]:
    """The name and the value of the prompt. Raises UsageError if there is none."""
    places = (("prompt", record), ("input", record), ("messages", record), ("messages", body))
    found = [(name, source[name]) for name, source in places if source.get(name) is not None]
    asks = any(record.get(name) is not None for name in QUESTION_NAMES)
    if record.get("context") is not None and asks and all(name == "input" for name, _ in found):
        raise UsageError(
            f"{where} has a context and a question, but no prompt: its benchmark has a template of its own that makes "
            'one of both; apply it, and give the whole as "prompt"'
        )
    if not found:
        raise UsageError(f'{where} has no prompt; give "prompt", "input", "messages" or "body": {{"messages": ...}}')
    return found[0]


def _messages(messages: Any) -> tuple[tuple[str, str], ...]:
    """(role, text) of each message, whose content is a string or a list of text parts."""
    if not isinstance(messages, list) or not messages:
        raise UsageError("messages must be a list of at least one message")
    found = []
    for number, message in enumerate(messages, 1):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise UsageError(f"message {number} has the role {repr(role)[:80]}; it must be one of {', '.join(ROLES)}")
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        found.append((role, "".join(_part(part, f"the content of message {number}") for part in parts)))
    if not any(text for _, text in found):
        raise UsageError("the messages are empty; one of them must hold at least one character")
    return tuple(found)


def _part(part: Any, place: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text":
        return _text(part.get("text"), place)
    kind = repr(part.get("type"))[:80] if isinstance(part, dict) else _kind(part)
    raise UsageError(f'{place} has a part that is no text ({kind}); give {{"type": "text", "text": "..."}}')


def _id(record: Mapping[str, Any], where: str, number: int) -> str:
    for name in ID_NAMES:
        value = record.get(name)
        if value is None:
            continue
        plain = isinstance(value, (str, int)) and not isinstance(value, bool) and value != ""
        if not plain or HALF_CHARACTER.search(str(value)):
            raise UsageError(f"{where}: {name} is {repr(value)[:80]}; it must be a string or a whole number")
        return str(value)
    return str(number)


def _small_fields(record: Mapping[str, Any], without: set[str]) -> dict[str, Any]:
    """What is passed through: all but the prompt, what is too large, and what there is none of."""
    kept = {name: value for name, value in record.items() if name not in without and (name, value) != ("id", None)}
    return {name: value for name, value in kept.items() if _is_small(value)}


def _is_small(value: Any) -> bool:
    if isinstance(value, str) and len(value) > SMALL_FIELD:
        return False
    return len(json.dumps(value)) <= SMALL_FIELD
