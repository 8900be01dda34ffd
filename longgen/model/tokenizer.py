"""Text to token ids and back: encoding in near-linear time, the chat template, streaming without broken characters."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import decoders
from transformers import AutoTokenizer

from longgen.errors import CheckpointError
from longgen.model.files import read_json_object
from longgen.model.shards import reason

SETTING_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample")
_TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))

# A byte-pair encoder slows down on very long strings. Qwen's splitting rule ends a piece after a newline that a
# non-space follows (`\s*[\r\n]+` takes all newlines of a run of spaces), so cutting there changes no id.
_CUT = re.compile(r"(?<=\n)(?=\S)")
_CUT_RULE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PIECE_CHARS = 16_384
_BATCH_PIECES = 256


def generation_settings(folder: Path) -> dict[str, Any]:
    """The sampling settings that the folder's generation_config.json sets, of SETTING_NAMES; empty if it sets none."""
    content = _read_generation_config(folder)
    return {name: content[name] for name in SETTING_NAMES if content.get(name) is not None}


def _read_generation_config(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    return read_json_object(path) if path.is_file() else {}


def _read_text_config(folder: Path) -> dict[str, Any]:
    """config.json, or its text part; empty if there is none."""
    path = folder / "config.json"
    content = read_json_object(path) if path.is_file() else {}
    text = content.get("text_config", content)
    return text if isinstance(text, dict) else {}


class TextTokenizer:
    """A checkpoint's tokenizer.

    Args:
        tokenizer: a fast tokenizer of transformers with a byte-level decoder, as every Qwen checkpoint has.

    Raises:
        CheckpointError: the tokenizer is of another kind.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(getattr(self._backend, "decoder", None), decoders.ByteLevel):
            raise CheckpointError(
                "the tokenizer is not a byte-level one with a tokenizer.json, as Qwen checkpoints have"
            )
        self._can_cut = self._cutting_is_safe()

    @classmethod
    def load(cls, folder: Path) -> TextTokenizer:
        """Loads the tokenizer of a checkpoint folder. Raises CheckpointError if there is none that can be used."""
        # Without any of these files transformers makes an empty tokenizer and says nothing.
        if not any(all((folder / name).is_file() for name in names) for names in _TOKENIZER_FILES):
            raise CheckpointError(f"{folder} has no tokenizer: neither tokenizer.json nor vocab.json with merges.txt")
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        # Missing, damaged and foreign files raise errors of three libraries.
        except Exception as error:
            raise CheckpointError(f"the tokenizer of {folder} cannot be loaded: {reason(error)}") from error
        return cls(tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, chat: bool) -> list[int]:
        """Token ids of `text`, the same that transformers gives for the whole string.

        Args:
            text: the prompt.
            chat: make it the user's message of the chat template, followed by the opening of an answer.

        Raises:
            CheckpointError: `chat` without a chat template, or with one that cannot be used.
        """
        if chat:
            text = self._chat_text(text)
        if not self._can_cut:
            return self._tokenizer(text, add_special_tokens=not chat)["input_ids"]
        ids: list[int] = []
        batch: list[str] = []
        for piece in _pieces(text):
            batch.append(piece)
            if len(batch) == _BATCH_PIECES:
                self._encode_batch(batch, ids)
                batch = []
        self._encode_batch(batch, ids)
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, special tokens left out."""
        stream = self.decode_stream()
        return "".join(map(stream.push, ids)) + stream.flush()

    def decode_stream(self) -> DecodeStream:
        """A decoder for ids that come one by one."""
        return DecodeStream(self._tokenizer)

    def eos_ids(self, folder: Path) -> frozenset[int]:
        """The ids that end a text: those of generation_config.json, else of config.json, else the tokenizer's own.

        Possibly none. Raises CheckpointError for an eos_token_id that is neither a token id nor a list of them.
        """
        for content in (_read_generation_config(folder), _read_text_config(folder)):
            given = content.get("eos_token_id")
            if given is not None:
                break
        else:
            given = self._tokenizer.eos_token_id
        ids = given if isinstance(given, list) else [] if given is None else [given]
        if not all(type(id_) is int and id_ >= 0 for id_ in ids):
            raise CheckpointError(
                f"eos_token_id is {repr(given)[:80]} in {folder}; it must be a token id or a list of token ids"
            )
        return frozenset(ids)

    def _chat_text(self, text: str) -> str:
        if not self.has_chat_template:
            raise CheckpointError("the checkpoint has no chat template; run with --raw to send the prompt as it is")
        messages = [{"role": "user", "content": text}]
        try:
            return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        # A template is a program of the checkpoint's: it may fail in any way, or refuse by raising.
        except Exception as error:
            raise CheckpointError(
                f"the chat template of the checkpoint fails: {reason(error)}; run with --raw to do without it"
            ) from error

    def _encode_batch(self, pieces: list[str], ids: list[int]) -> None:
        for encoding in self._backend.encode_batch_fast(pieces, add_special_tokens=False):
            ids.extend(encoding.ids)

    def _cutting_is_safe(self) -> bool:
        rules = json.loads(self._backend.pre_tokenizer.__getstate__()) if self._backend.pre_tokenizer else {}
        steps = rules.get("pretokenizers", [rules])
        if not any(_CUT_RULE in step.get("pattern", {}).get("Regex", "") for step in steps):
            return False
        if self._tokenizer("")["input_ids"]:  # it adds a token at the start or end
            return False
        added = self._tokenizer.added_tokens_decoder.values()
        return not any("\n" in token.content or token.lstrip for token in added)


def _pieces(text: str) -> Iterator[str]:
    """`text` in pieces of _PIECE_CHARS characters or a little more, cut only where cutting is safe."""
    start = 0
    while start < len(text):
        cut = _CUT.search(text, start + _PIECE_CHARS)
        end = cut.start() if cut else len(text)
        yield text[start:end]
        start = end


class DecodeStream:
    """Turns token ids into text as they come, never emitting part of a character.

    A byte-level token is a string in which each character stands for one byte; the bytes run through an incremental
    UTF-8 decoder, which keeps an unfinished character back. The whole equals transformers' `decode` of all ids with
    special tokens skipped.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids) | {
            id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._bytes = _byte_of_character()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes: empty for a special token, an unknown id or half a character."""
        if token_id in self._special:
            return ""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # the model's vocabulary is padded beyond the tokenizer's
            return ""
        return self._decoder.decode(self._token_bytes(token))

    def flush(self) -> str:
        """What is left at the end: a replacement character for half a character, else nothing."""
        return self._decoder.decode(b"", final=True)

    def _token_bytes(self, token: str) -> bytes:
        try:
            return bytes(self._bytes[character] for character in token)
        except KeyError:  # an added token is stored as plain text
            return token.encode("utf-8")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, the other bytes for characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(256 + offset): byte for offset, byte in enumerate(others)}
