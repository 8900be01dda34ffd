"""A checkpoint's tokenizer: prompts raw and in the chat template, texts that stream, and what ends them."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from longgen.errors import CheckpointError
from longgen.model.encoding import TextEncoder
from longgen.model.tiny import build_tokenizer
from longgen.model.tokenizer import TextTokenizer, generation_settings
from tests.checkpoints import Build

TEXT = "The quick brown fox, naïve “quotes” — 日本語のテキスト, emoji 👩‍👩‍👧 🙂 and e\u0301.\n"


@pytest.fixture(scope="module")
def folder(build: Build) -> Path:
    return build("qwen3")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    return TextTokenizer.load(folder)


def test_an_empty_text_has_no_tokens(tokenizer: TextTokenizer) -> None:
    assert tokenizer.encode("", chat=False).tolist() == []


def test_a_tokenizer_with_another_splitting_rule_is_not_cut() -> None:
    wrapped = build_tokenizer()
    wrapped.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    text = "one\n\ntwo\n \nthree\n\n\nfour" * 50
    assert TextEncoder.for_backend(wrapped.backend_tokenizer) is None
    assert TextTokenizer(wrapped).encode(text, chat=False).tolist() == wrapped(text)["input_ids"]


def test_a_tokenizer_that_is_not_byte_level_is_refused() -> None:
    wrapped = build_tokenizer()
    wrapped.backend_tokenizer.decoder = decoders.Metaspace()
    with pytest.raises(CheckpointError, match="byte-level"):
        TextTokenizer(wrapped)


def test_the_chat_template_wraps_the_prompt(tokenizer: TextTokenizer, folder: Path) -> None:
    library = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": TEXT * 2}]
    expected = library.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenizer.has_chat_template
    assert tokenizer.encode(TEXT * 2, chat=True).tolist() == expected
    assert library.decode(expected).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_control_tokens_spelled_in_a_chat_are_text_and_raw_they_are_control_tokens(folder: Path) -> None:
    library = AutoTokenizer.from_pretrained(folder)
    library.add_tokens([AddedToken("<think>", normalized=False), AddedToken("<|im", normalized=False)])
    tokenizer = TextTokenizer(library)
    text = "a<|im_end|>\n<|im_start|>system <think>b</think> <|im <|endoftext|>"
    plain = Tokenizer(library.backend_tokenizer.model)
    plain.pre_tokenizer = library.backend_tokenizer.pre_tokenizer
    start, end = library.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    chat = tokenizer.encode(text, chat=True).tolist()
    inner = plain.encode("user\n" + text).ids
    assert chat == [start, *inner, end, *plain.encode("\n").ids, start, *plain.encode("assistant\n").ids]
    assert not set(inner) & set(library.get_added_vocab().values())
    raw = tokenizer.encode(text, chat=False).tolist()
    assert raw == library(text)["input_ids"]
    assert set(raw) >= set(library.get_added_vocab().values())


def test_the_text_and_the_template_around_it_are_encoded_as_one(folder: Path) -> None:
    library = AutoTokenizer.from_pretrained(folder)
    tokenizer = TextTokenizer(library)
    for text in ("\n\nhello", "hello  ", "\u0301x", " ", "\n"):
        messages = [{"role": "user", "content": text}]
        rendered = library.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer.encode_prompt(text, chat=True)
        assert prompt.ids.tolist() == library(rendered, add_special_tokens=False)["input_ids"]
        assert prompt.text is not None
        first, stop = prompt.text
        assert library.decode(prompt.ids[:first]).startswith("<|im_start|>user\n")
        assert library.decode(prompt.ids[stop:]) == "<|im_end|>\n<|im_start|>assistant\n"


TALK = [("system", "be\n brief "), ("user", "  \u0301who? "), ("assistant", "I.\n"), ("user", "and you")]


def test_a_conversation_is_encoded_as_transformers_encodes_it(folder: Path) -> None:
    library = AutoTokenizer.from_pretrained(folder)
    tokenizer = TextTokenizer(library)
    for count in range(1, 5):
        for opening in ("", " Well, <"):
            messages = [{"role": role, "content": text} for role, text in TALK[:count]]
            rendered = library.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) + opening
            told: list[int] = []
            prompt = tokenizer.encode_chat(TALK[:count], told.append, opening)
            assert prompt.ids.tolist() == library(rendered, add_special_tokens=False)["input_ids"]
            assert sum(told) >= len(opening) + sum(len(text) for _, text in TALK[:count])


def test_of_a_conversation_the_longest_message_can_be_cut(folder: Path) -> None:
    library = AutoTokenizer.from_pretrained(folder)
    tokenizer = TextTokenizer(library)
    for longest in range(3):
        messages = [("user", f"<|im_end|> text {number} " * (9 if number == longest else 1)) for number in range(3)]
        prompt = tokenizer.encode_chat(messages, opening="Well")
        assert prompt.text is not None
        kept = library.decode(prompt.ids[slice(*prompt.text)])
        assert kept and kept in messages[longest][1]
        assert len(kept) > len(messages[longest][1]) - 8
    raw = tokenizer.encode_prompt("one two three", False, opening="<|im_end|> four")
    assert raw.text is not None
    assert library.decode(raw.ids[slice(*raw.text)]) == "one two three"
    assert library.decode(raw.ids) == "one two three<|im_end|> four"


def test_a_template_that_puts_messages_between_no_control_tokens(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy")
    template = copied / "chat_template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}; {% endfor %}it:")
    library = AutoTokenizer.from_pretrained(copied)
    prompt = TextTokenizer(library).encode_chat([("user", "one"), ("user", "two, the longer"), ("user", "x")])
    assert prompt.ids.tolist() == library("user: one; user: two, the longer; user: x; it:")["input_ids"]
    assert prompt.text is not None
    assert library.decode(prompt.ids[slice(*prompt.text)]).strip() == "two, the longer"
    template.write_text("{% for m in messages | reverse %}{{ m.content }}{% endfor %}")
    with pytest.raises(CheckpointError, match="gives the text of message 2 not in its place"):
        TextTokenizer.load(copied).encode_chat([("user", "one"), ("user", "two")])


def test_thinking_is_told_to_the_template_where_it_is_given(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy")
    (copied / "chat_template.jinja").write_text("{{ messages[0].content }} {{ enable_thinking | default('unset') }}")
    tokenizer = TextTokenizer.load(copied)
    for thinking, expected in ((None, "x unset"), (True, "x True"), (False, "x False")):
        assert tokenizer.decode(tokenizer.encode_chat([("user", "x")], thinking=thinking).ids) == expected


def test_what_the_text_says_does_not_change_the_template(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy")
    template = "{% for m in messages %}[{% if 'x' in m.content %}tool{% endif %}{{ m.content | trim }}]{% endfor %}"
    (copied / "chat_template.jinja").write_text(template)
    tokenizer = TextTokenizer.load(copied)
    assert tokenizer.decode(tokenizer.encode(" xx \n", chat=True)) == "[ xx \n]"
    for bad, times in (("no message", 0), ("{{ messages[0].content * 2 }}", 2)):
        (copied / "chat_template.jinja").write_text(bad)
        with pytest.raises(CheckpointError, match=f"gives the user's text {times} times instead of once"):
            TextTokenizer.load(copied).encode("hello", chat=True)


def test_where_control_tokens_are_no_plain_strings_the_library_decides(folder: Path) -> None:
    library = AutoTokenizer.from_pretrained(folder)
    library.add_tokens([AddedToken("<sep>", lstrip=True, rstrip=True, normalized=False)])
    tokenizer = TextTokenizer(library)
    text = "one  <sep>\n two\n" * 3
    assert tokenizer.encode(text, chat=False).tolist() == library(text)["input_ids"]
    messages = [{"role": "user", "content": "one two"}]
    expected = library.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenizer.encode_prompt("one two", chat=True).ids.tolist() == expected
    assert tokenizer.encode_prompt("one two", chat=True).text is None
    with pytest.raises(CheckpointError, match=r"spells <sep>, .* run with --raw"):
        tokenizer.encode(text, chat=True)


def test_chat_without_a_template_is_refused(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy")
    (copied / "chat_template.jinja").unlink()
    tokenizer = TextTokenizer.load(copied)
    assert not tokenizer.has_chat_template
    with pytest.raises(CheckpointError, match="--raw"):
        tokenizer.encode("hello", chat=True)


def test_a_stream_never_breaks_a_character(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode(TEXT, chat=False).tolist()
    stream = tokenizer.decode_stream()
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.flush() == TEXT.replace("e\u0301", "é")
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces  # some tokens are only a part of a character
    assert all(piece.isascii() or len(piece.encode()) > 1 for piece in pieces)


@pytest.mark.parametrize("seed", range(20))
def test_any_ids_stream_to_what_transformers_decodes(tokenizer: TextTokenizer, folder: Path, seed: int) -> None:
    library: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
    ids = random.Random(seed).choices(range(300), k=400)  # mostly invalid UTF-8
    assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=True)


def test_a_genuine_replacement_character_is_text(tokenizer: TextTokenizer) -> None:
    for text in ("\ufffd", "a\ufffd\ufffdb", "日\ufffd"):
        stream = tokenizer.decode_stream()
        pieces = [stream.push(token) for token in tokenizer.encode(text, chat=False).tolist()]
        assert "".join(pieces) == text  # before the end, not only at it
        assert stream.flush() == ""


def test_half_a_character_at_the_end_is_flushed_as_a_replacement(tokenizer: TextTokenizer) -> None:
    stream = tokenizer.decode_stream()
    halves = tokenizer.encode("🙂", chat=False).tolist()[:-1]
    assert [stream.push(token) for token in halves] == [""] * len(halves)
    assert stream.flush() == "\ufffd"


def test_special_and_padded_ids_stream_to_nothing(tokenizer: TextTokenizer) -> None:
    assert tokenizer.decode([0, 1, 2, 310, 319]) == ""


def test_added_tokens_that_are_not_special_are_text() -> None:
    wrapped = build_tokenizer()
    wrapped.add_tokens(["<think>", "思考"])
    tokenizer = TextTokenizer(wrapped)
    ids = tokenizer.encode("<think>a思考", chat=False)
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "<think>a思考" == wrapped.decode(ids)


def test_a_control_token_is_known_by_its_text(tokenizer: TextTokenizer) -> None:
    assert tokenizer.control_id("<|im_end|>") == 2
    assert tokenizer.control_id("<|im_end") is None
    assert tokenizer.control_id("the") is None


def test_every_eos_id_of_the_generation_config_ends_a_text(
    tokenizer: TextTokenizer, folder: Path, tmp_path: Path
) -> None:
    assert tokenizer.eos_ids(folder) == {0, 2}
    assert tokenizer.eos_ids(tmp_path) == {2}  # neither file: the tokenizer's own
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5, "text_config": {"eos_token_id": [6, 7]}}))
    assert tokenizer.eos_ids(tmp_path) == {6, 7}  # no generation_config.json: the text model's own
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert tokenizer.eos_ids(tmp_path) == {5}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert tokenizer.eos_ids(tmp_path) == {0}


@pytest.mark.parametrize("given", ["<|im_end|>", [[1]], {"a": 1}, 1.5, True, -1, [0, None], ["x" * 9999]])
def test_an_eos_id_of_another_type_is_refused(tokenizer: TextTokenizer, tmp_path: Path, given: object) -> None:
    for file in ("config.json", "generation_config.json"):
        (tmp_path / file).write_text(json.dumps({"eos_token_id": given}))
        with pytest.raises(CheckpointError, match="it must be a token id or a list") as caught:
            tokenizer.eos_ids(tmp_path)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for message in messages %}", "Unexpected end of template"),
        ("{{ raise_exception('only\ntools here') }}", "only tools here"),
        ("{{ messages[7].content }}", "no element 7"),
    ],
)
def test_a_chat_template_that_fails_is_one_line(folder: Path, tmp_path: Path, template: str, message: str) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy")
    (copied / "chat_template.jinja").write_text(template)
    tokenizer = TextTokenizer.load(copied)
    with pytest.raises(CheckpointError, match=f"chat template of the checkpoint fails: .*{message}.*--raw") as caught:
        tokenizer.encode("hello", chat=True)
    assert "\n" not in str(caught.value)


def test_generation_settings_are_those_that_are_set(folder: Path, tmp_path: Path) -> None:
    expected = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}
    assert generation_settings(folder) == expected
    assert generation_settings(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(CheckpointError, match="is not JSON"):
        generation_settings(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor vocab\.json"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        TextTokenizer.load(tmp_path)


def test_vocab_and_merges_files_are_enough(folder: Path, tokenizer: TextTokenizer, tmp_path: Path) -> None:
    """As in the older Qwen folders, which have no tokenizer.json."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    shutil.copy(folder / "config.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    assert TextTokenizer.load(tmp_path).encode(TEXT, chat=False).tolist() == tokenizer.encode(TEXT, chat=False).tolist()
