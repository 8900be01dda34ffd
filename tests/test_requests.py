"""Prompt sources: what is read, exactly, and what is refused."""

from __future__ import annotations

import errno
import io
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import pytest

from longgen.errors import UsageError
from longgen.run.records import RequestFiles
from longgen.run.requests import Request

NO_INPUT = io.BytesIO()


def read_requests(sources: Sequence[str], stdin: BinaryIO | None, errors: str = "strict") -> list[Request]:
    """The requests of text files, as a run reads them."""
    return list(RequestFiles(sources, stdin, "text", errors))


def test_a_file_is_read_exactly_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    text = "First line\ufeff\r\nsecond \u00e9\U0001f600\x00 line\n\n"
    path.write_bytes(text.encode("utf-8"))
    assert read_requests([str(path)], NO_INPUT) == [Request(id="prompt.txt", source=str(path), text=text)]


def test_a_dash_is_standard_input_and_the_order_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("from a file")
    requests = read_requests([str(path), "-"], io.BytesIO("déjà vu\n".encode()))
    assert [(request.id, request.text) for request in requests] == [("a.txt", "from a file"), ("stdin", "déjà vu\n")]


@pytest.mark.parametrize(
    ("data", "offset"), [(b"abc\xff", "3"), (b"x" * 4096 + b"\xe9t\xe9", "4,096"), (b"ab\xc3", "2")]
)
def test_text_that_is_not_utf8_is_refused_with_file_and_offset(tmp_path: Path, data: bytes, offset: str) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(data)
    with pytest.raises(
        UsageError, match=rf"latin\.txt is not UTF-8: byte 0x\w\w at offset {offset}; correct it, or give --enc"
    ):
        read_requests([str(path)], NO_INPUT)
    with pytest.raises(UsageError, match=f"standard input is not UTF-8: .* at offset {offset}; "):
        read_requests(["-"], io.BytesIO(data))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16-le", "utf-16-be"])
def test_the_sign_of_an_encoding_is_no_text_and_all_else_is(encoding: str) -> None:
    text = "\0\ufeff\\n \r\n\u00e9\U0001f600\x1a\x85\u2028\ufffd\r\n\n\n"
    sign = "\ufeff".encode(encoding) if encoding.startswith("utf-16") else b""
    assert read_requests(["-"], io.BytesIO(sign + text.encode(encoding)))[0].text == text


def test_utf16_that_is_broken_is_refused_with_its_offset() -> None:
    for data, offset in ((b"\xff\xfea\0\0\xd8b\0", 4), (b"\xfe\xff\0a\0", 4), (b"\xef\xbb\xbfab\xff", 5)):
        name = "UTF-8" if data[0] == 0xEF else "UTF-16"
        with pytest.raises(UsageError, match=f"standard input is not {name}: byte 0x.. at offset {offset};"):
            read_requests(["-"], io.BytesIO(data))


def test_replacing_reads_a_replacement_character_in_place_of_what_is_no_text() -> None:
    assert read_requests(["-"], io.BytesIO(b"a\xffb\r\n\xe9"), "replace")[0].text == "a\ufffdb\r\n\ufffd"
    assert read_requests(["-"], io.BytesIO(b"\xff\xfea\0\0\xd8"), "replace")[0].text == "a\ufffd"


def test_utf32_is_refused_and_not_taken_for_utf16() -> None:
    with pytest.raises(UsageError, match="standard input is UTF-32; write it as UTF-8"):
        read_requests(["-"], io.BytesIO("\ufefftext".encode("utf-32-le")))
    with pytest.raises(UsageError, match="standard input is not UTF-8: byte 0xfe at offset 2;"):
        read_requests(["-"], io.BytesIO("\ufefftext".encode("utf-32-be")))
    for text in ("\0text", "\0"):
        assert read_requests(["-"], io.BytesIO(f"\ufeff{text}".encode("utf-16-le")))[0].text == text


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.txt cannot be read: No such file"):
        read_requests([str(tmp_path / "nowhere.txt")], NO_INPUT)
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_requests([str(tmp_path)], NO_INPUT)
    with pytest.raises(UsageError, match="cannot be read: embedded null"):
        read_requests(["a\0b"], NO_INPUT)


def test_an_empty_prompt_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UsageError, match=r"empty\.txt is empty"):
        read_requests([str(tmp_path / "empty.txt")], NO_INPUT)
    for nothing in (b"", b"\xef\xbb\xbf", b"\xff\xfe"):
        with pytest.raises(UsageError, match="standard input is empty"):
            read_requests(["-"], io.BytesIO(nothing))


def test_standard_input_can_be_read_only_once() -> None:
    with pytest.raises(UsageError, match="more than once"):
        read_requests(["-", "-"], io.BytesIO(b"text"))


def test_a_closed_standard_input_matters_only_if_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("text")
    assert read_requests([str(path)], None)[0].text == "text"
    with pytest.raises(UsageError, match="standard input is closed"):
        read_requests(["-"], None)


def test_a_standard_input_that_cannot_be_read_is_a_usage_error() -> None:
    class Folder(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise IsADirectoryError(errno.EISDIR, "Is a directory")

    with pytest.raises(UsageError, match="the prompt standard input cannot be read: Is a directory"):
        read_requests(["-"], Folder())
