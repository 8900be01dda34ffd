"""Text without control tokens to ids: in near-linear time, in bounded memory, and exactly as in one piece."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer, models, normalizers

from longgen.model.boundaries import PIECE_CHARS, RULES, WordBoundaries, normalise
from longgen.model.decoding import byte_of_character
from longgen.model.long_words import WINDOW_BYTES, LongWords

BATCH_CHARS = 131_072


class TextEncoder:
    """Encodes text in which nothing is a control token. Made by `for_backend`.

    Args:
        backend: a tokenizer of the tokenizers library.
        rule: its splitting rule, one of RULES; None if the model merges nothing, so that each byte is a token.
        piece_chars, window_bytes: sizes of the pieces that text is cut into; they change no id.
    """

    def __init__(
        self, backend: Any, rule: str | None, *, piece_chars: int = PIECE_CHARS, window_bytes: int = WINDOW_BYTES
    ) -> None:
        self._normalizer, self._piece_chars = backend.normalizer, piece_chars
        self._backend, self._window_bytes = backend, window_bytes
        self._byte_ids: list[int] | None = None
        if rule is None:
            vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=False)
            characters = {byte: character for character, byte in byte_of_character().items()}
            self._byte_ids = [vocabulary[characters[byte]] for byte in range(256)]
            return
        # The same without a normaliser, which has been applied before, and without added tokens.
        self._words: Any = Tokenizer(backend.model)
        self._words.pre_tokenizer = backend.pre_tokenizer
        self._boundaries = WordBoundaries(rule, piece_chars)

    @cached_property
    def _long_words(self) -> LongWords:
        """Made when the first long word comes: few texts have one, and a large vocabulary takes a while to copy."""
        return LongWords(self._backend.model, self._backend.get_vocab(with_added_tokens=False), self._window_bytes)

    @classmethod
    def for_backend(cls, backend: Any) -> TextEncoder | None:
        """An encoder that agrees with `backend` on every text, or None where that is not certain."""
        if not _merges_plainly(backend.model) or not isinstance(backend.normalizer, (normalizers.NFC, type(None))):
            return None
        splits, only_bytes = _steps(backend.pre_tokenizer)
        if not only_bytes:
            return None
        if _has_only_bytes(backend):
            return cls(backend, None)
        return cls(backend, splits[0]) if len(splits) == 1 and splits[0] in RULES else None

    def extend(self, ids: array[int], text: str, on_chars: Callable[[int], None]) -> None:
        """Appends the ids of `text`. on_chars: called with the number of its characters done since the last call."""
        text = normalise(text, self._normalizer, self._piece_chars)
        if self._byte_ids is not None:
            for start in range(0, len(text), BATCH_CHARS):
                part = text[start : start + BATCH_CHARS]
                ids.extend(map(self._byte_ids.__getitem__, part.encode("utf-8")))
                on_chars(len(part))
            return
        batch: list[str] = []
        held = 0
        for piece in self._boundaries.pieces(text):
            part = text[piece.start : piece.stop]
            if piece.one_word or held + len(part) > BATCH_CHARS:
                self._encode(batch, ids, on_chars)
                batch, held = [], 0
            if piece.one_word:
                self._encode_long(part, ids, on_chars)
            else:
                batch.append(part)
                held += len(part)
        self._encode(batch, ids, on_chars)

    def _encode(self, batch: list[str], ids: array[int], on_chars: Callable[[int], None]) -> None:
        for encoding in self._words.encode_batch_fast(batch, add_special_tokens=False):
            ids.extend(encoding.ids)
        on_chars(sum(map(len, batch)))

    def _encode_long(self, word: str, ids: array[int], on_chars: Callable[[int], None]) -> None:
        size = len(word.encode("utf-8"))
        done = told = 0

        def on_bytes(count: int) -> None:
            nonlocal done, told
            done += count
            chars = len(word) * done // size
            on_chars(chars - told)
            told = chars

        self._long_words.encode(word, ids, on_bytes)


def _merges_plainly(model: Any) -> bool:
    """Whether the model merges pairs by rank and does nothing else."""
    return isinstance(model, models.BPE) and not (
        model.dropout
        or model.ignore_merges
        or model.byte_fallback
        or model.continuing_subword_prefix
        or model.end_of_word_suffix
    )


def _has_only_bytes(backend: Any) -> bool:
    """Whether each token of the model is a byte. A large vocabulary is not copied to find out."""
    characters = byte_of_character().keys()
    alike = backend.get_vocab_size(with_added_tokens=False) == len(characters)
    return alike and backend.get_vocab(with_added_tokens=False).keys() == characters


def _steps(pre_tokenizer: Any) -> tuple[list[str], bool]:
    """The regular expressions that split a text, and whether its bytes are all that goes to the model then."""
    state = json.loads(pre_tokenizer.__getstate__()) if pre_tokenizer is not None else {}
    steps: Iterable[dict[str, Any]] = state.get("pretokenizers", [state])
    *splits, last = steps
    plain = last.get("type") == "ByteLevel" and not last["add_prefix_space"] and not last["use_regex"]
    for step in splits:
        isolated = step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert")
        plain = plain and isolated and "Regex" in step["pattern"]
    return [step["pattern"]["Regex"] for step in splits] if plain else [], plain
