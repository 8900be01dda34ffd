"""A checkpoint's tokenizer: prompts to token ids, raw or in the chat template, and token ids back to text."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import normalize

import torch
from tokenizers import decoders
from transformers import AutoTokenizer

from longgen.errors import CheckpointError
from longgen.model.decoding import DecodeStream
from longgen.model.encoding import TextEncoder
from longgen.model.files import read_json_object, reason, refuse_pointer

SETTING_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample")
_TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))

# Stands for a message's text while the chat template is rendered: what the text says must not change the template.
_PLACEHOLDER = "LONGGENusersTEXT"


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt's ids.

    ids: int32 [n].
    text: from which token to before which one they are the user's text alone, so that some of them can be left out;
        None where the tokenizer gives no way to tell.
    """

    ids: torch.Tensor
    text: tuple[int, int] | None


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
        backend: Any = tokenizer.backend_tokenizer if hasattr(tokenizer, "backend_tokenizer") else None
        if not isinstance(getattr(backend, "decoder", None), decoders.ByteLevel):
            raise CheckpointError(
                "the tokenizer is not a byte-level one with a tokenizer.json, as Qwen checkpoints have"
            )
        added: dict[int, Any] = backend.get_added_tokens_decoder()
        self._control = {token.content: id_ for id_, token in added.items() if token.content}
        longest_first = [re.escape(token) for token in sorted(self._control, key=len, reverse=True)]
        self._stream = DecodeStream(tokenizer)
        self._control_pattern = re.compile("|".join(longest_first)) if longest_first else None
        # Where control tokens are no plain strings, or every text gets one, only the library itself knows the ids.
        plain = not any(t.lstrip or t.rstrip or t.single_word or t.normalized for t in added.values())
        self._encoder = TextEncoder.for_backend(backend) if plain and not tokenizer("")["input_ids"] else None

    @classmethod
    def load(cls, folder: Path) -> TextTokenizer:
        """Loads the tokenizer of a checkpoint folder. Raises CheckpointError if there is none that can be used."""
        # Without any of these files transformers makes an empty tokenizer and says nothing.
        there = [names for names in _TOKENIZER_FILES if all((folder / name).is_file() for name in names)]
        if not there:
            raise CheckpointError(
                f"{folder} has no tokenizer: neither tokenizer.json nor vocab.json with merges.txt; get them"
            )
        for name in there[0]:
            refuse_pointer(folder / name)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        # Missing, damaged and foreign files raise errors of three libraries.
        except Exception as error:
            raise CheckpointError(
                f"the tokenizer of {folder} cannot be loaded: {reason(error)}; get its files again"
            ) from error
        return cls(tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, chat: bool) -> torch.Tensor:
        """The ids of a prompt, int32 [n]; see `encode_prompt`."""
        return self.encode_prompt(text, chat).ids

    def encode_prompt(
        self, text: str, chat: bool, on_chars: Callable[[int], None] = lambda count: None, opening: str = ""
    ) -> EncodedPrompt:
        """Token ids of a prompt, the same that transformers gives for the whole string.

        But in a chat the text is data: control tokens that are spelled in it are encoded as any other text. Raw, they
        are control tokens.

        Args:
            text: the prompt.
            chat: make it the user's message of the chat template, followed by the opening of an answer.
            on_chars: called with the number of characters encoded since the last call.
            opening: what the answer begins with; raw, it follows the text.

        Raises:
            CheckpointError: `chat` without a chat template, or with one that cannot be used.
        """
        if chat:
            return self.encode_chat([("user", text)], on_chars, opening)
        if self._encoder is None:
            return self._encode_at_once(text + opening, special=True)
        ids = array("i")
        self._extend(ids, self._parts(text + opening), on_chars)
        return EncodedPrompt(_tensor(ids), self._inner(ids, 0, 0, _size(opening)))

    def encode_chat(
        self,
        messages: Sequence[tuple[str, str]],
        on_chars: Callable[[int], None] = lambda count: None,
        opening: str = "",
        thinking: bool | None = None,
    ) -> EncodedPrompt:
        """Token ids of a conversation in the chat template, followed by the opening of an answer.

        What the messages and the opening say is data. The text that may be cut is the longest message.

        Args:
            messages: (role, text) of each.
            on_chars: called with the number of characters encoded since the last call.
            opening: what the answer begins with.
            thinking: what the template gets as `enable_thinking`; None leaves that to the template.

        Raises:
            CheckpointError: there is no chat template, or one that cannot be used.
        """
        frames = self._chat_frames([role for role, _ in messages], thinking)
        texts = [text for _, text in messages]
        if self._encoder is None:
            return self._encode_chat_at_once(frames, [*texts, opening])
        longest = max(range(len(texts)), key=lambda index: len(texts[index]))
        ids, span = array("i"), None
        # What stands between two control tokens of the template is encoded as one, texts in its midst.
        run: list[str] = []
        place = -1  # of the longest text in the run
        for index, frame in enumerate(frames):
            first, *rest = self._parts(frame)
            run.append(str(first))
            for part in rest:
                if isinstance(part, int):
                    span = self._extend_run(ids, run, place, on_chars) or span
                    ids.append(part)
                    run, place = [], -1
                else:
                    run.append(part)
            if index == longest:
                place = len(run)
            run.append(texts[index] if index < len(texts) else opening)
        span = self._extend_run(ids, run, place, on_chars) or span
        return EncodedPrompt(_tensor(ids), span)

    def decode(self, ids: Iterable[int] | torch.Tensor) -> str:
        """The text of `ids`, special tokens left out."""
        stream = self.decode_stream()
        return "".join(stream.push(int(id_)) for id_ in ids) + stream.flush()

    def decode_stream(self) -> DecodeStream:
        """A decoder for ids that come one by one."""
        return DecodeStream(self._tokenizer)

    def begins_inside(self, token_id: int) -> bool:
        """Whether a token begins in the midst of a character."""
        return 0x80 <= self._stream.token_bytes(token_id)[0] < 0xC0

    def control_id(self, text: str) -> int | None:
        """The id of the control token that is written so, None for any other text."""
        return self._control.get(text)

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

    def _chat_frames(self, roles: Sequence[str], thinking: bool | None) -> list[str]:
        """What the chat template puts before each message's text, and after the last one."""
        if not self.has_chat_template:
            raise CheckpointError("the checkpoint has no chat template; run with --raw to send the prompt as it is")
        marks = [f"{_PLACEHOLDER}{number}END" for number in range(len(roles))]
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        options = {} if thinking is None else {"enable_thinking": thinking}
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **options
            )
        # A template is a program of the checkpoint's: it may fail in any way, or refuse by raising.
        except Exception as error:
            raise CheckpointError(
                f"the chat template of the checkpoint fails: {reason(error)}; run with --raw to do without it"
            ) from error
        frames, rest = [], rendered
        for number, mark in enumerate(marks):
            before, found, rest = rest.partition(mark)
            if not found or mark in rest:
                whose = "the user's text" if len(marks) == 1 else f"the text of message {number + 1}"
                count = rendered.count(mark)
                how = "not in its place" if count == 1 else f"{count} times instead of once"
                raise CheckpointError(
                    f"the chat template of the checkpoint gives {whose} {how}; run with --raw to do without it"
                )
            frames.append(before)
        return [*frames, rest]

    def _parts(self, text: str) -> list[str | int]:
        """`text` as strings and ids of control tokens by turns; the first and the last are strings."""
        parts: list[str | int] = []
        start = 0
        for match in self._control_pattern.finditer(text) if self._control_pattern else ():
            parts += (text[start : match.start()], self._control[match[0]])
            start = match.end()
        return [*parts, text[start:]]

    def _extend(self, ids: array[int], parts: Iterable[str | int], on_chars: Callable[[int], None]) -> None:
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            elif part and self._encoder is not None:
                self._encoder.extend(ids, part, on_chars)

    def _extend_run(
        self, ids: array[int], run: Sequence[str], place: int, on_chars: Callable[[int], None]
    ) -> tuple[int, int] | None:
        """Appends the ids of texts that are encoded as one; returns which are those of run[place], None below 0."""
        start = len(ids)
        self._extend(ids, ["".join(run)], on_chars)
        if place < 0:
            return None
        return self._inner(ids, start, _size("".join(run[:place])), _size("".join(run[place + 1 :])))

    def _inner(self, ids: array[int], start: int, before: int, after: int) -> tuple[int, int]:
        """The tokens from `start` on that hold none of the first `before` and the last `after` bytes."""
        stop = len(ids)
        while before > 0 and start < stop:
            before -= len(self._stream.token_bytes(ids[start]))
            start += 1
        while after > 0 and start < stop:
            stop -= 1
            after -= len(self._stream.token_bytes(ids[stop]))
        return start, stop

    def _encode_chat_at_once(self, frames: Sequence[str], texts: Sequence[str]) -> EncodedPrompt:
        for text in texts:
            if spelled := next((t for t in self._control if t in text or t in normalize("NFC", text)), None):
                raise CheckpointError(
                    f"the prompt spells {spelled}, and this tokenizer gives no way to encode that as text; run with "
                    "--raw"
                )
        whole = "".join(part for pair in zip(frames, texts, strict=True) for part in pair)
        return self._encode_at_once(whole, special=False)

    def _encode_at_once(self, text: str, *, special: bool) -> EncodedPrompt:
        """As transformers encodes it, which takes long and much memory for long texts."""
        ids = array("i", self._tokenizer(text, add_special_tokens=special)["input_ids"])
        return EncodedPrompt(_tensor(ids), None)


def _tensor(ids: array[int]) -> torch.Tensor:
    """int32 [n] in the array's own memory."""
    return torch.frombuffer(ids, dtype=torch.int32) if ids else torch.empty(0, dtype=torch.int32)


def _size(text: str) -> int:
    """Bytes that its tokens stand for."""
    return len(normalize("NFC", text).encode("utf-8"))
