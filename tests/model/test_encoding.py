"""Encoding in pieces equals encoding at once, for the Qwen2 and the Qwen3.5 tokenizer classes."""

from __future__ import annotations

import json
import sys
import unicodedata
from array import array
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer, Qwen3_5Tokenizer

from longgen.model.boundaries import QWEN2_RULE, QWEN3_5_RULE, WHITE_SPACE, WordBoundaries, normalise, stands_alone
from longgen.model.checkpoint import DEMO_FOLDER
from longgen.model.encoding import TextEncoder
from longgen.model.long_words import LongWords

# Characters that the splitting rules, normalisation or the merges treat each in a way of its own.
PARTS = (
    *("\n", "\r", "\r\n", " ", "\t", "\x0b", "\x85", "\u2028", "\x1c", "\x1f", "\u3000", "\u00a0", "\0", "\ufeff"),
    *("a", "the", "Z", "'s", "'", "'ll", "'LL", "\u017f", "é", "e\u0301", "\u0301", "\u0308", "\u0323", "ß", "ﬁ"),
    *("1", "2024", "٣", "²", "½", "Ⅷ", "!", "...", "_", "=", "+/", "\u037e", "\u212a", "\u0958", "\u0915", "\u093f"),
    *("日", "本語", "，", "。", "ア", "\u3099", "가", "\u1100", "\u1161", "\u11a8", "🙂", "👩‍👩‍👧", "\u200b", "\ufffd"),
    *("\U00016d67", "\U00016d63", "\u0378", "\U0010ffff", "\ue000"),
)
TRAINING = ["aaaa the then others =====   \n\n\n日本語日本 éé'll 's 🙂🙂 " * 4, "a" * 64, " " * 32, "日" * 16, "=" * 16]


RULES = {"Qwen2": QWEN2_RULE, "Qwen3.5": QWEN3_5_RULE}


@pytest.fixture(scope="module")
def backends() -> dict[str, Any]:
    """Both classes over merges that have tokens of many bytes for every kind of run."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        TRAINING, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    classes = {"Qwen2": Qwen2Tokenizer, "Qwen3.5": Qwen3_5Tokenizer}
    return {name: cls(vocab=model["vocab"], merges=merges).backend_tokenizer for name, cls in classes.items()}


def encoded(encoder: TextEncoder, text: str) -> list[int]:
    ids = array("i")
    encoder.extend(ids, text, lambda count: None)
    return ids.tolist()


runs = st.tuples(st.sampled_from(PARTS) | st.text(max_size=3), st.sampled_from((1, 1, 1, 2, 3, 40)))
texts = st.lists(runs, max_size=20).map(lambda parts: "".join(part * count for part, count in parts))


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=400, deadline=None)
@given(text=texts, piece_chars=st.integers(1, 40), window_bytes=st.integers(8, 80))
def test_encoding_in_pieces_equals_encoding_at_once(
    backends: dict[str, Any], name: str, text: str, piece_chars: int, window_bytes: int
) -> None:
    encoder = TextEncoder(backends[name], RULES[name], piece_chars=piece_chars, window_bytes=window_bytes)
    assert encoded(encoder, text) == backends[name].encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("rule", RULES.values())
@settings(max_examples=400, deadline=None)
@example(text="\t" * 4 + "=" * 40, piece_chars=4)
@example(text="=" * 40 + "abc", piece_chars=2)
@example(text="!" * 8 + "\n" * 30 + " \n!", piece_chars=2)
@example(text=" " * 40 + "a", piece_chars=4)
@given(text=texts, piece_chars=st.integers(1, 40))
def test_pieces_have_the_words_of_the_whole_text(rule: str, text: str, piece_chars: int) -> None:
    split = pre_tokenizers.Split(Regex(rule), behavior="isolated")
    words: list[str] = []
    for piece in WordBoundaries(rule, piece_chars).pieces(text):
        part = text[piece.start : piece.stop]
        words += [part] if piece.one_word else [word for word, _ in split.pre_tokenize_str(part)]
    assert words == [word for word, _ in split.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    "text", ["a", "日", "=", " ", "\n", "日本語", "thea", "aé", "\t", "\n ", "!\n", "a\u0301", "1", "Zg+/4"]
)
def test_long_texts_in_pieces_of_the_usual_size(backends: dict[str, Any], name: str, text: str) -> None:
    encoder = TextEncoder.for_backend(backends[name])
    assert encoder is not None
    long = text * (100_000 // len(text)) + "end of it"
    assert encoded(encoder, long) == backends[name].encode(long, add_special_tokens=False).ids


@pytest.mark.parametrize("rule", RULES.values())
def test_pieces_are_short_and_only_a_long_word_is_longer(rule: str) -> None:
    boundaries = WordBoundaries(rule, 100)
    for text in ("The quick brown fox. " * 200, "日本語，" * 500, "a1" * 2000, "no\u00a0\u3000" * 800, "!?\tabc" * 700):
        pieces = list(boundaries.pieces(text))
        assert "".join(text[piece.start : piece.stop] for piece in pieces) == text
        assert len(pieces) > len(text) / 250
        assert not any(piece.one_word for piece in pieces)
        assert max(piece.stop - piece.start for piece in pieces) <= 200
    text = "word " * 100 + "a" * 1000 + " word" * 100
    assert [text[piece.start : piece.stop].strip() for piece in boundaries.pieces(text) if piece.one_word] == [
        "a" * 1000
    ]


def test_windows_of_a_long_word_are_joined_where_they_agree(
    backends: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backends["Qwen2"]
    words = LongWords(backend.model, backend.get_vocab(with_added_tokens=False), window_bytes=256)
    sizes: list[int] = []
    window = LongWords._window

    def watched(self: LongWords, data: bytes, start: int, size: int) -> Any:
        sizes.append(size)
        return window(self, data, start, size)

    monkeypatch.setattr(LongWords, "_window", watched)
    for word in ("a" * 5000, "日本" * 900, "thenéa" * 700):
        ids = array("i")
        done: list[int] = []
        words.encode(word, ids, done.append)
        assert ids.tolist() == Tokenizer(backend.model).encode(byte_text(word)).ids
        assert sum(done) == len(word.encode())
        assert len(done) > 15
    assert set(sizes) == {256}  # never all of it


def byte_text(word: str) -> str:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(part for part, _ in byte_level.pre_tokenize_str(word))


def test_windows_that_never_agree_are_given_up_for_the_whole_word() -> None:
    """With aa -> A and Aa -> B only (of three letters), windows of "aaa..." agree if their starts differ by threes."""
    model = models.BPE(vocab={"a": 0, "aa": 1, "aaa": 2}, merges=[("a", "a"), ("aa", "a")])
    words = LongWords(model, {"a": 0, "aa": 1, "aaa": 2}, window_bytes=8)
    whole = Tokenizer(model)
    for length in range(1, 60):
        ids = array("i", [7])
        words.encode("a" * length, ids, lambda count: None)
        assert ids.tolist() == [7, *whole.encode("a" * length).ids]


def test_text_is_normalised_in_parts_as_at_once(backends: dict[str, Any]) -> None:
    text = "e\u0301" * 50 + "q\u0307\u0323" * 50 + "\u1112\u1161\u11ab" * 50 + "\u0301" * 200 + "plain"
    for part_chars in (1, 2, 7, 64):
        assert normalise(text, normalizers.NFC(), part_chars) == unicodedata.normalize("NFC", text)


def test_what_stands_alone_is_never_joined_or_moved() -> None:
    joined = {
        character
        for code in range(sys.maxunicode + 1)
        for character in unicodedata.normalize("NFD", chr(code))[1:]
        if unicodedata.normalize("NFC", unicodedata.normalize("NFD", chr(code))) == chr(code)
    }
    moved = {chr(code) for code in range(sys.maxunicode + 1) if unicodedata.combining(chr(code))}
    assert len(joined) > 100
    assert not [character for character in joined | moved if stands_alone(character)]
    assert all(map(stands_alone, "a é日가🙂，\u00a0\ufffd\u200b"))


def test_white_space_is_what_the_splitting_rule_takes_for_it() -> None:
    characters = "".join(chr(code) for code in range(0x3100) if not 0xD800 <= code < 0xE000)
    spaces = pre_tokenizers.Split(Regex(r"\s"), behavior="removed").pre_tokenize_str(characters)
    assert set(characters) - set("".join(part for part, _ in spaces)) == set(WHITE_SPACE)


def test_a_model_without_merges_takes_each_byte_for_a_token() -> None:
    backend = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    encoder = TextEncoder.for_backend(backend)
    assert encoder is not None
    text = "日本 \r\n\0 é e\u0301" * 20
    assert encoded(encoder, text) == backend.encode(text, add_special_tokens=False).ids == list(text.encode())


class Counting:
    """A tokenizer that counts how often its vocabulary is copied."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.copies = backend, 0

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        self.copies += 1
        vocabulary: dict[str, int] = self.backend.get_vocab(with_added_tokens=with_added_tokens)
        return vocabulary

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


def test_the_vocabulary_is_copied_once_and_only_for_a_word_beyond_the_pieces(backends: dict[str, Any]) -> None:
    backend = Counting(backends["Qwen2"])
    encoder = TextEncoder.for_backend(backend)
    assert encoder is not None
    encoded(encoder, "The end. " * 500)
    assert backend.copies == 0
    for _ in range(2):
        encoded(encoder, "a" * 100_000)
        assert backend.copies == 1


def _changed(backend: Any, **parts: Any) -> Any:
    copy = Tokenizer.from_str(backend.to_str())
    for name, part in parts.items():
        setattr(copy, name, part)
    return copy


def test_a_tokenizer_of_another_kind_has_no_encoder(backends: dict[str, Any]) -> None:
    backend = backends["Qwen2"]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    digits = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|" + QWEN2_RULE), "isolated")
    split = pre_tokenizers.Split(Regex(QWEN2_RULE), "removed")
    ignoring = Tokenizer.from_str(backend.to_str())
    ignoring.model.ignore_merges = True
    others = (
        _changed(backend, normalizer=normalizers.NFKC()),
        _changed(backend, pre_tokenizer=byte_level),
        _changed(backend, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        _changed(backend, pre_tokenizer=pre_tokenizers.Sequence([digits, byte_level])),
        _changed(backend, pre_tokenizer=pre_tokenizers.Sequence([split, byte_level])),
        _changed(backend, model=models.WordLevel({"a": 0}, unk_token="a")),
        ignoring,
    )
    assert TextEncoder.for_backend(_changed(backend)) is not None
    assert [TextEncoder.for_backend(other) for other in others] == [None] * len(others)


def test_progress_adds_up_to_the_text(backends: dict[str, Any]) -> None:
    encoder = TextEncoder(backends["Qwen2"], QWEN2_RULE, piece_chars=50, window_bytes=64)
    for text in ("The end. " * 500, "日" * 3000, "a" * 3000, "1é" * 900):
        told: list[int] = []
        encoder.extend(array("i"), text, told.append)
        assert sum(told) == len(text)
        assert min(told) >= 0
