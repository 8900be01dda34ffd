"""Where a text may be cut so that encoding its pieces gives the ids of encoding all of it.

A Qwen tokenizer normalises a text (NFC), splits it into words by one regular expression, and merges the bytes of each
word. The expression is matched from left to right and never looks back, so the words from the start of any word on
depend only on the text from there on: a text may be cut wherever a word is certain to end, if it still ends there when
nothing follows (the space before the last of several would not). Words that are too long to be cut around are encoded
in windows, see `longgen.model.long_words`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

# The rules of the tokenizer classes Qwen2 (also of Qwen3 folders) and Qwen3.5; what follows holds for these two.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_RULE = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
QWEN3_5_RULE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
RULES = frozenset({QWEN2_RULE, QWEN3_5_RULE})

# What \s matches in the rules: Unicode's White_Space. Python's \s matches a little more, its \S a little less.
_BLANKS = (
    "\t\x0b\x0c \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
WHITE_SPACE = "\r\n" + _BLANKS
_SPACE_RUN = re.compile(f"[{WHITE_SPACE}]*")
_NEWLINES = re.compile(r"[\r\n]*")

# Places where a word ends whatever surrounds them: after the newline that ends a run of white space, before a space
# that begins one, around a digit, which is a word of its own, and between a letter and a mark of punctuation. None is
# after white space but a newline.
_CERTAIN_END = re.compile(
    r"(?<=\n)(?=\S)|(?<=\S)(?= )|(?<=[0-9])|(?<=\S)(?=[0-9])"
    r"|(?<=[A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5])"
    r"(?=[!-/:-@\[-`{-~\u2018-\u201d\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])"
)

PIECE_CHARS = 8192


@dataclass(frozen=True, slots=True)
class Piece:
    """text[start:stop], whose ends are ends of words. one_word: it is a single word, and a long one."""

    start: int
    stop: int
    one_word: bool = False


class WordBoundaries:
    """Cuts texts by one of RULES. The texts must be normalised already.

    Args:
        rule: one of RULES.
        piece_chars: how long pieces should be; single words may be longer, and no other piece more than twice that.
    """

    def __init__(self, rule: str, piece_chars: int = PIECE_CHARS) -> None:
        self._split: Any = pre_tokenizers.Split(Regex(rule), behavior="isolated")
        self._piece_chars = max(2, piece_chars)  # long words are followed from their last two characters on

    def pieces(self, text: str) -> Iterator[Piece]:
        """All of the text, in order."""
        start, size = 0, self._piece_chars
        while len(text) - start > 2 * size:
            certain = _CERTAIN_END.search(text, start + size, start + 2 * size)
            stop = certain.start() if certain else self._last_end(text, start)
            if stop is not None:
                yield Piece(start, stop)
            else:
                stop = self._word_end(text, start)
                yield Piece(start, stop, one_word=True)
            start = stop
        if start < len(text):
            yield Piece(start, len(text))

    def _words(self, text: str, start: int) -> list[tuple[str, tuple[int, int]]]:
        """The words of the window at `start`, each with its place in the window."""
        return self._split.pre_tokenize_str(text[start : start + 2 * self._piece_chars])

    def _last_end(self, text: str, start: int) -> int | None:
        """The last place in the window at `start` where the text may be cut; None if there is none.

        `start` begins a word, and the text goes on after the window. A word with something else than white space in it
        is decided one character after its end, and is the same without that. One of white space alone is decided when
        its run has ended; cut off, it would be one with the word of the same run before it.
        """
        words = self._words(text, start)
        after_run = False
        for index in reversed(range(len(words))):
            word, (_, end) = words[index]
            if word.strip(WHITE_SPACE):
                if end < 2 * self._piece_chars:
                    return start + end
                after_run = True
            elif after_run and (index == 0 or words[index - 1][0][-1] not in _BLANKS):
                return start + end
        return None

    def _word_end(self, text: str, start: int) -> int:
        """Where the word at `start` ends, which is the only one in its window or begins a run of white space there."""
        if text[start] in WHITE_SPACE and text[start + 1] in WHITE_SPACE:
            return _space_end(text, start)
        while True:
            end = start + self._words(text, start)[0][1][1]
            if end < start + 2 * self._piece_chars or end == len(text):
                return end
            if text[end - 1] in "\r\n":  # what may follow a run of punctuation
                return _newlines_end(text, end)
            # Two characters of the word's own kind: what follows them is the rest of the same run of it.
            start = end - 2


def _space_end(text: str, start: int) -> int:
    """Where the word ends that begins a run of two or more white space characters."""
    match = _SPACE_RUN.match(text, start)
    stop = match.end() if match else start
    newline = max(text.rfind("\n", start, stop), text.rfind("\r", start, stop))
    if newline >= 0:
        return newline + 1
    return stop if stop == len(text) else stop - 1  # the last one goes to what follows


def _newlines_end(text: str, start: int) -> int:
    match = _NEWLINES.match(text, start)
    return match.end() if match else start


def normalise(text: str, normalizer: Any, part_chars: int) -> str:
    """`text` as `normalizer` (of the tokenizers library, NFC or None) makes it, about `part_chars` at a time."""
    if normalizer is None or text.isascii():
        return text
    parts = []
    start = 0
    while start < len(text):
        stop = start + part_chars
        while stop < len(text) and not stands_alone(text[stop]):
            stop += 1
        part = text[start:stop]
        parts.append(part if part.isascii() else normalizer.normalize_str(part))
        start = stop
    return "".join(parts)


def stands_alone(character: str) -> bool:
    """Whether NFC never joins the character with what is before it or moves it there, in any version of Unicode.

    Marks may be joined, and so may vowels and final consonants of Hangul and of Kirat Rai. Of a character that this
    Python does not know nothing is known.
    """
    if character.isascii():
        return True
    kind = unicodedata.category(character)
    if kind[0] == "M" or kind == "Cn" or unicodedata.combining(character):
        return False
    return not ("\u1100" <= character <= "\u11ff" or "\U00016d40" <= character <= "\U00016d7f")
