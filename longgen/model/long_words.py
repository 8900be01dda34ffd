"""Encoding one very long word in windows, exactly.

Byte-pair encoding merges the neighbouring pair of lowest rank, the leftmost of equals, until no pair can be merged. A
sequence of tokens is the encoding of its bytes exactly if every two neighbours t, u are the encoding of t + u:

- Until the first merge that crosses a border of t or u, what happens inside t + u is what happens when t + u is
  encoded alone: a merge changes nothing outside of it, and rank and place order the merges inside alike.
- So if an encoding has the neighbours t, u, whose borders no merge ever crossed, then t + u alone becomes t, u.
- And if every two neighbours t, u are the encoding of t + u, there is no first merge across a border: it would happen
  in t + u alone.

So two overlapping windows of a word may be joined at a token that both have at the same place: each two neighbours
come from one of the two encodings.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from longgen.model.decoding import byte_of_character

WINDOW_BYTES = 16_384
_OVERLAPS = (64, 4)  # parts of a window that the next one overlaps; the second if the first has no token in common


@dataclass(frozen=True, slots=True)
class _Window:
    """The tokens of data[start:stop]."""

    start: int
    stop: int
    tokens: list[int]


class LongWords:
    """Encodes words of any length by a byte-level BPE model, in time and memory that grow with the length.

    Args:
        model: the BPE model of a tokenizer, without dropout and without `ignore_merges`.
        vocabulary: the model's tokens and their ids.
        window_bytes: bytes of a window.
    """

    def __init__(self, model: Any, vocabulary: dict[str, int], window_bytes: int = WINDOW_BYTES) -> None:
        self._encoder: Any = Tokenizer(model)  # without a splitting rule, so that a string is one word
        self._sizes = array("i", bytes(4 * (1 + max(vocabulary.values()))))
        for token, id_ in vocabulary.items():
            self._sizes[id_] = len(token)  # a character for each byte
        self._characters = {byte: character for character, byte in byte_of_character().items()}
        self._window_bytes = window_bytes

    def encode(self, word: str, ids: array[int], on_bytes: Callable[[int], None]) -> None:
        """Appends the word's ids. on_bytes: called with the number of bytes done since the last call."""
        data, first = word.encode("utf-8"), len(ids)
        window = self._window(data, 0, self._window_bytes)
        while window.stop < len(data):
            following = self._following(data, window)
            if following is None:  # it would take a vocabulary made for it
                del ids[first:]
                window = self._window(data, 0, len(data))
                break
            self._extend(ids, window, following.start)
            on_bytes(following.start - window.start)
            window = following
        ids.extend(window.tokens)
        on_bytes(len(data) - window.start)

    def _window(self, data: bytes, start: int, size: int) -> _Window:
        part = data[start : start + size]
        word = part.decode("latin-1").translate(self._characters)
        return _Window(start, start + len(part), self._encoder.encode_batch_fast([word])[0].ids)

    def _extend(self, ids: array[int], window: _Window, stop: int) -> None:
        """Appends the window's tokens up to the one that starts at `stop`."""
        place = window.start
        for token in window.tokens:
            if place == stop:
                return
            ids.append(token)
            place += self._sizes[token]

    def _following(self, data: bytes, window: _Window) -> _Window | None:
        """What goes on after a window: it begins with a token that the window has at the same place too."""
        for parts in _OVERLAPS:
            places = self._places(window, window.stop - self._window_bytes // parts)
            start = min(places)
            if start == window.start:
                return None
            later = self._window(data, start, self._window_bytes)
            place = later.start
            for index, token in enumerate(later.tokens):
                if places.get(place) == token:
                    return _Window(place, later.stop, later.tokens[index:])
                place += self._sizes[token]
        return None

    def _places(self, window: _Window, begin: int) -> dict[int, int]:
        """The window's last tokens by the places where they start, back to the first that starts before `begin`."""
        places: dict[int, int] = {}
        place = window.stop
        for token in reversed(window.tokens):
            place -= self._sizes[token]
            places[place] = token
            if place <= begin:
                break
        return places
