"""Records of JSONL files: prompts, ids, fields and settings, and what is refused with file and line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from longgen.config import Settings
from longgen.errors import UsageError
from longgen.run.own_settings import thinking, with_own
from longgen.run.records import SMALL_FIELD, RequestFiles, open_prompts, read_records
from longgen.run.requests import Request
from longgen.run.results import Result, read_line, result_line


def read(*records: Any) -> list[Request]:
    lines = "".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records)
    return list(read_records(io.BytesIO(lines.encode()), "a.jsonl"))


def read_one(**record: Any) -> Request:
    return read(record)[0]


MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


def test_the_prompt_is_the_first_of_prompt_input_messages_and_the_bodys_messages() -> None:
    record: dict[str, Any] = {"prompt": "P", "input": "I", "messages": MESSAGES, "body": {"messages": MESSAGES[1:]}}
    pairs = (("system", "be brief"), ("user", "hello"))
    expected = [("P", None), ("I", None), ("", pairs), ("", pairs[1:])]
    for name, (text, messages) in zip(list(record), expected, strict=True):
        request = read_one(**record)
        assert (request.text, request.messages, request.fault) == (text, messages, "")
        record[name] = None
    with pytest.raises(UsageError, match=r'a\.jsonl line 1 has no prompt; give "prompt", "input", "messages" or'):
        read(record)


def test_the_answer_prefix_opens_the_answer() -> None:
    assert read_one(input="I", answer_prefix=" The answer is").opening == " The answer is"
    assert read_one(messages=MESSAGES, answer_prefix="x").opening == "x"


def test_content_is_a_string_or_a_list_of_text_parts() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert read_one(messages=[{"role": "user", "content": parts}]).messages == (("user", "hello"),)


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"input": 5}, "input is a number; it must be a string"),
        ({"prompt": ["a", "b"]}, "prompt is a list; it must be a string"),
        ({"prompt": "a", "answer_prefix": 5}, "answer_prefix is a number; it must be a string"),
        ({"prompt": "\ud800"}, "prompt has half a character"),
        ({"messages": "hello"}, "messages must be a list of at least one message"),
        ({"messages": [{"role": "user", "content": ""}]}, "the messages are empty; one of them must hold"),
        ({"messages": [{"role": "user", "content": []}]}, "the messages are empty"),
        ({"body": {"messages": [{"role": "user", "content": ""}] * 2}}, "the messages are empty"),
        ({"messages": []}, "messages must be a list of at least one message"),
        ({"messages": ["hello"]}, "message 1 has the role None; it must be one of system, user, assistant"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "message 1 has the role 'tool'"),
        ({"messages": [{"role": [], "content": "x"}]}, "message 1 has the role []"),
        ({"messages": [{"role": "user"}]}, "the content of message 1 is null; it must be a string"),
        (
            {"messages": [*MESSAGES, {"role": "user", "content": [{"type": "image_url"}]}]},
            "the content of message 3 has a part that is no text ('image_url')",
        ),
    ],
)
def test_what_is_wrong_with_one_prompt_is_kept_for_its_result(record: dict[str, Any], fault: str) -> None:
    assert fault in read_one(**record).fault


def test_the_id_is_the_first_of_id_custom_id__id_index_and_the_number_of_the_line() -> None:
    record: dict[str, Any] = {"id": 7, "custom_id": "c", "_id": "u", "index": 0, "prompt": "x"}
    for name, expected in (("id", "7"), ("custom_id", "c"), ("_id", "u"), ("index", "0")):
        assert read_one(**record).id == expected
        record[name] = None
    assert [request.id for request in read("", record, "  ", record)] == ["2", "4"]


@pytest.mark.parametrize("value", [True, 1.5, [1], {}, "", "\udc00"])
def test_other_ids_are_refused_with_file_and_line(value: Any) -> None:
    with pytest.raises(UsageError, match=r"a\.jsonl line 2: custom_id is .*; it must be a string or a whole number"):
        read({"prompt": "x"}, {"prompt": "x", "custom_id": value})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"', "a.jsonl line 2 is not JSON: Expecting ',' delimiter at character 16 of the line"),
        ('{"prompt": "x", "n": NaN}', "a.jsonl line 2 is not JSON: NaN is no JSON value"),
        ('{"prompt": "x", "n": ' + "9" * 5000 + "}", "a.jsonl line 2 is not JSON: Exceeds the limit"),
        ("[" * 100_000, "a.jsonl line 2 is not JSON that can be read: it is nested too deep"),
        ('{"prompt": "x", "n": ' + "[" * 700 + "]" * 700 + "}", "it is nested too deep"),
        ('["prompt"]', "a.jsonl line 2 holds a list; a record must be an object"),
        ('"prompt"', "a.jsonl line 2 holds a string; a record must be an object"),
    ],
)
def test_a_line_that_is_no_record_is_refused_with_file_and_line(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read({"prompt": "x"}, line)
    assert message in str(caught.value)


@pytest.mark.parametrize("errors", ["strict", "replace"])
def test_what_is_not_nested_too_deep_is_read_and_written(errors: str) -> None:
    nested = '{"n": [' * 99 + '"\\udc00"' + "]}" * 99
    (request,) = read_records([f'{{"prompt": "x", "a": {nested}}}\n'.encode()], "a.jsonl", errors)
    wanted = json.loads(nested if errors == "strict" else nested.replace("\\udc00", "\ufffd"))
    assert request.fields == {"a": wanted}
    for output_format in ("jsonl", "openai"):
        written = result_line(Result(request, request.prompt_hash()), output_format)
        assert read_line(written, output_format) is not None


def test_bytes_that_are_no_text_are_refused_with_file_line_and_offset() -> None:
    lines = [b'{"prompt": "x"}\n', b'{"prompt": "caf\xe9"}\n']
    with pytest.raises(UsageError, match=r"a\.jsonl line 2 is not UTF-8: byte 0xe9 at offset 31, 15 of the line; c"):
        list(read_records(lines, "a.jsonl"))
    with pytest.raises(UsageError, match=r"line 2 is not UTF-8: byte 0xe9 at offset 34, 15 of the line"):
        list(read_records([b"\xef\xbb\xbf" + lines[0], lines[1]], "a.jsonl"))
    assert [request.text for request in read_records(lines, "a.jsonl", "replace")] == ["x", "caf\ufffd"]


@pytest.mark.parametrize("question", ["input", "question", "query"])
def test_a_context_and_a_question_without_a_prompt_are_refused_with_a_hint(question: str) -> None:
    with pytest.raises(UsageError, match=r"a\.jsonl line 1 has a context and a question, but no prompt: its benchmark"):
        read({"context": "long text", question: "who?", "answers": ["me"]})
    assert read({"context": "long text", question: "who?", "prompt": "both"})[0].text == "both"


def test_records_end_at_a_line_feed_only() -> None:
    texts = ["one\u2028two", "three\x85four\u2029", "five\vsix\fseven\x1c"]
    lines = "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n" for text in texts)
    raw = '{"prompt":\r"eight"}\n{"prompt": "nine"}'
    requests = list(read_records(io.BytesIO((lines + raw).encode()), "a.jsonl"))
    assert [request.text for request in requests] == [*texts, "eight", "nine"]
    assert [request.source for request in requests] == [f"a.jsonl line {number}" for number in range(1, 6)]


def test_the_sign_of_utf8_is_no_text() -> None:
    assert next(iter(read_records([b'\xef\xbb\xbf{"prompt": "x"}\n'], "a"))).text == "x"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_utf16_is_read_by_its_sign_and_its_lines_end_at_a_line_feed_only(encoding: str, end: str) -> None:
    """Bytes 0x0a and 0x00 are in many characters of UTF-16."""
    texts = ["a\u0a00\u000bb", "\u0a0a\u0a0d\u000a\u0a00", "\u010a\u0a01\U0001f642\u2028", "", "\u0a00"]
    lines = [json.dumps({"prompt": f"x{text}", "id": text}, ensure_ascii=False) if text else "" for text in texts]
    data = ("\ufeff" + "\n".join(lines) + end).encode(encoding)
    requests = list(read_records(io.BytesIO(data), "a.jsonl"))
    assert [request.text for request in requests] == [f"x{text}" for text in texts if text]
    assert [request.source for request in requests] == [f"a.jsonl line {number}" for number in (1, 2, 3, 5)]


def test_utf16_that_is_broken_is_refused_with_its_offset_and_utf32_by_name() -> None:
    good, bad = '{"prompt": "x"}\n'.encode("utf-16-le"), '{"prompt": "'.encode("utf-16-le") + b"\x00\xd8x\0\n\0"
    data = b"\xff\xfe" + good + bad
    with pytest.raises(UsageError, match=r"line 2 is not UTF-16: byte 0x00 at offset 58, 24 of the line; correct it"):
        list(read_records(io.BytesIO(data), "a.jsonl"))
    assert list(read_records(io.BytesIO(b"\xff\xfe"), "a.jsonl")) == []
    for encoding in ("utf-32-le", "utf-32-be"):
        with pytest.raises(UsageError, match=r"a\.jsonl is UTF-32; write it as UTF-8 or UTF-16"):
            list(read_records(io.BytesIO('\ufeff{"prompt": "x"}'.encode(encoding)), "a.jsonl"))


def test_replacing_covers_half_characters_that_are_escaped() -> None:
    line = rb'{"id": "a\uDC00", "prompt": "x\ud83d\ude42\ud83d", "more": [{"\udcff": 1.5}], "stop": "\ud800"}'
    request = next(iter(read_records([line], "a.jsonl", "replace")))
    assert (request.id, request.text, request.own) == ("a\ufffd", "x\U0001f642\ufffd", {"stop": "\ufffd"})
    assert request.fields["more"] == [{"\ufffd": 1.5}]
    strict = next(iter(read_records([rb'{"prompt": "\ud83d"}'], "a.jsonl")))
    assert strict.fault.endswith("without its other half; correct it, or give --encoding-errors replace")


def test_small_fields_are_kept_and_the_prompt_and_large_ones_are_not() -> None:
    small, large = "x" * (SMALL_FIELD - 2), "x" * (SMALL_FIELD - 1)
    fields: dict[str, Any] = {"index": 3, "outputs": ["a"], "others": {"id": 0}, "input": small, "length": None}
    request = read_one(prompt="P", **fields, context=large, messages=MESSAGES, body={"model": "m"}, id=None)
    assert dict(request.fields) == fields
    assert dict(read_one(input="I", outputs=["a"]).fields) == {"outputs": ["a"]}


def test_a_prompts_hash_tells_prompts_apart_and_no_settings() -> None:
    one: dict[str, Any] = {"prompt": "x"}
    same: list[dict[str, Any]] = [one, one | {"id": 3, "max_tokens": 4, "outputs": []}, {"input": "x"}]
    other: list[dict[str, Any]] = [
        {"prompt": "y"},
        one | {"answer_prefix": "a"},
        {"messages": [{"role": "user", "content": "x"}]},
    ]
    assert len({read_one(**record).prompt_hash() for record in same}) == 1
    assert len({read_one(**record).prompt_hash() for record in [one, *other]}) == 4


OWN: dict[str, Any] = {
    "max_new_tokens": 7,
    "temperature": 1,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "seed": 11,
    "stop": ["a", "b"],
}


def test_a_record_brings_its_own_settings() -> None:
    for record in ({"prompt": "x", **OWN}, {"body": {"messages": MESSAGES, **OWN}}):
        assert with_own(Settings(), read_one(**record).own) == Settings(**(OWN | {"stop": ("a", "b")}))
    for name in ("max_tokens", "max_completion_tokens"):
        assert with_own(Settings(), read_one(prompt="x", **{name: 3}).own).max_new_tokens == 3
    assert with_own(Settings(), {"max_tokens": 3, "max_new_tokens": 4}).max_new_tokens == 4
    assert with_own(Settings(stop=("z",)), {"stop": "a"}).stop == ("a",)
    assert with_own(Settings(seed=2), dict.fromkeys(OWN)) == Settings(seed=2)


def test_the_bodys_settings_come_before_the_records() -> None:
    assert read_one(body={"messages": MESSAGES, "max_tokens": 4}, max_tokens=9).own == {"max_tokens": 4}


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number, 1 or more"),
        ({"max_new_tokens": "4K"}, "max_new_tokens is '4K'"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"max_tokens": 2.0}, "max_tokens is 2.0"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"seed": -1}, "seed is -1; it must be a whole number, 0 or more"),
        ({"seed": 2**63}, "seed is 9223372036854775808, more than 9,223,372,036,854,775,807, the most"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        (
            {"stop": ["a", ""]},
            "stop is ['a', '']; it must be a string or a list of strings, none of them empty",
        ),
        (
            {"stop": "\ud83d"},
            "stop is '\\ud83d', which has half a character: nothing can match it",
        ),
        ({"stop": 5}, "stop is 5"),
        ({"n": 2}, "n is 2, which is not supported; leave it out"),
        ({"tools": [{}]}, "tools is [{}], which is not supported"),
    ],
)
def test_settings_that_are_not_allowed(own: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        with_own(Settings(), own)
    assert message in str(caught.value)


def test_what_an_openai_request_asks_for_in_vain_is_seen_and_what_asks_for_nothing_is_let_through() -> None:
    body = {"messages": MESSAGES, "n": 1, "presence_penalty": 0.0, "tools": [], "stream": False, "logit_bias": {}}
    assert with_own(Settings(), read_one(body=body).own) == Settings()
    body |= {"tool_choice": "auto", "model": "m", "user": "u", "metadata": {"a": "b"}, "min_tokens": None}
    assert with_own(Settings(), read_one(body=body).own) == Settings()
    assert read_one(prompt="x", n=2).own == {}  # a field of the record's own
    assert read_one(prompt="x", body={"messages": MESSAGES, "subject": "s"}).own == {}  # of a letter, for example


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        ({"min_tokens": 5}, "leave it out"),
        ({"stop_token_ids": [1]}, "leave it out"),
        ({"tool_choice": "required"}, "leave it out"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "give what it holds in body itself"),
    ],
)
def test_whatever_else_an_openai_request_asks_for_is_an_error_that_names_it(asked: dict[str, Any], remedy: str) -> None:
    with pytest.raises(UsageError) as caught:
        with_own(Settings(), read_one(body={"messages": MESSAGES, **asked}).own)
    name = next(iter(asked))
    assert str(caught.value).startswith(f"{name} is ") and str(caught.value).endswith(f"not supported; {remedy}")


@pytest.mark.parametrize("value", [{"enable_thinking": 1}, {"other": True}, [], "x"])
def test_chat_template_kwargs_are_enable_thinking_and_nothing_else(value: Any) -> None:
    assert thinking({"chat_template_kwargs": {"enable_thinking": False}}) is False
    assert thinking({"chat_template_kwargs": {}}) is None
    with pytest.raises(UsageError, match=r"chat_template_kwargs is|enable_thinking is"):
        thinking({"chat_template_kwargs": value})


def test_files_are_read_anew_and_standard_input_only_once(tmp_path: Path) -> None:
    (tmp_path / "a.JSONL").write_text('{"prompt": "x", "id": "a"}\n')
    (tmp_path / "b.txt").write_text("text\n")
    sources = [str(tmp_path / "a.JSONL"), "-", str(tmp_path / "b.txt")]
    files = RequestFiles(sources, io.BytesIO(b"piped"))
    for _ in range(2):
        assert [(each.id, each.text) for each in files] == [("a", "x"), ("stdin", "piped"), ("b.txt", "text\n")]
    assert files.has_records and not RequestFiles(["-"], io.BytesIO()).has_records
    lines = RequestFiles(["-"], io.BytesIO(b'{"prompt": "x"}\n'), "jsonl")
    for _ in range(2):
        assert [(each.source, each.text) for each in lines] == [("standard input line 1", "x")]


def test_a_run_is_a_batch_if_a_prompt_is_jsonl_or_an_output_is_named(tmp_path: Path) -> None:
    records, text = tmp_path / "a.jsonl", tmp_path / "b.txt"
    records.write_text('{"prompt": "x"}\n')
    text.write_text("x")
    for source, settings, expected in (
        (text, Settings(), None),
        (records, Settings(), "jsonl"),
        (text, Settings(prompt_format="jsonl"), "jsonl"),
        (records, Settings(prompt_format="text"), None),
        (text, Settings(output=str(tmp_path / "out")), "jsonl"),
        (text, Settings(output_format="openai"), "openai"),
    ):
        assert open_prompts([str(source)], None, settings)[1].output_format == expected
    with pytest.raises(UsageError, match="shard takes a part of a batch"):
        open_prompts([str(text)], None, Settings(shard="1/2"))
    with pytest.raises(UsageError, match=r"the output .*a\.jsonl is one of the prompts"):
        open_prompts([str(records)], None, Settings(output=str(records)))
