"""Token ids to text as they come, without broken characters."""

from __future__ import annotations

import codecs
from typing import Any


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
        self._bytes = byte_of_character()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes: empty for a special token, an unknown id or half a character."""
        if token_id in self._special:
            return ""
        return self._decoder.decode(self.token_bytes(token_id))

    def flush(self) -> str:
        """What is left at the end: a replacement character for half a character, else nothing."""
        return self._decoder.decode(b"", final=True)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token stands for; none for an unknown id."""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # the model's vocabulary is padded beyond the tokenizer's
            return b""
        try:
            return bytes(self._bytes[character] for character in token)
        except KeyError:  # an added token is stored as plain text
            return token.encode("utf-8")


def byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, the other bytes for characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(256 + offset): byte for offset, byte in enumerate(others)}
