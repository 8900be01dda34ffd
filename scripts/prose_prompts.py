"""Prompts of real prose: one that asks for a summary, and ones that hide a number and ask for it."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from longgen.errors import UsageError
from longgen.model.tokenizer import TextTokenizer

GREEDY_QUESTION = "Summarise the text above in your own words, point by point."
NEEDLE_QUESTION = "What is the registration number of the red bicycle? Answer with the number only."

# A sentence, or a heading up to an empty line, with the white space before it: the pieces joined are the text, and
# their tokens add up to nearly its tokens, as a tokenizer joins a space to the word after it.
_SENTENCE = re.compile(r"\s*\S.*?(?:[.!?][\"')\]]*(?=\s)|[。！？]|(?=\n\s*\n)|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text and as longgen's token ids. number: the one hidden in it, if any."""

    name: str
    text: str
    ids: tuple[int, ...]
    number: str | None = None


def reference_prose() -> str:
    """The paragraphs of prose, about 165,000 characters, in the language reference behind Python's `help()`.

    Grammar, tables and code examples are left out. Raises UsageError if this Python comes without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UsageError("this Python comes without pydoc_data.topics; give a text of prose with --text") from error
    paragraphs = (
        " ".join(paragraph.split()) for name in sorted(topics) for paragraph in re.split(r"\n\s*\n", topics[name])
    )
    # Some paragraphs stand under several topics.
    return "\n\n".join(dict.fromkeys(filter(_is_prose, paragraphs)))


def _is_prose(paragraph: str) -> bool:
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return (
        len(paragraph) >= 80 and letters >= 0.88 * len(paragraph) and paragraph[0].isupper() and paragraph.endswith(".")
    )


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises UsageError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as UTF-8 text: {error}") from error


def cut_sentences(tokenizer: TextTokenizer, text: str, tokens: int) -> list[tuple[str, int]]:
    """The first sentences of `text` that come to at least `tokens` tokens, each with the tokens before it.

    Raises UsageError if the text is too short.
    """
    sentences: list[tuple[str, int]] = []
    done = 0
    for match in _SENTENCE.finditer(text):
        if done >= tokens:
            return sentences
        sentences.append((match[0], done))
        done += len(tokenizer.encode(match[0], chat=False))
    if done < tokens:
        raise UsageError(f"the text has {done:,} tokens, and {tokens:,} are needed; give a longer one with --text")
    return sentences


def make_prompt(tokenizer: TextTokenizer, name: str, text: str, number: str | None = None) -> Prompt:
    """A prompt of `text`, in the checkpoint's chat template where it has one."""
    return Prompt(name, text, tuple(tokenizer.encode(text, chat=tokenizer.has_chat_template).tolist()), number)


def greedy_prompt(tokenizer: TextTokenizer, text: str, tokens: int) -> Prompt:
    """A prompt of about `tokens` tokens of `text` that asks for a summary."""
    body = "".join(sentence for sentence, _ in cut_sentences(tokenizer, text, tokens))
    return make_prompt(tokenizer, "greedy", f"{body.strip()}\n\n{GREEDY_QUESTION}")


def needle_prompts(tokenizer: TextTokenizer, text: str, tokens: int, depths: Sequence[float]) -> Iterator[Prompt]:
    """For each depth (0 to 1) a prompt of about `tokens` tokens of `text` that hides a number there and asks for it."""
    sentences = cut_sentences(tokenizer, text, tokens) if depths else []
    for depth in depths:
        # A number of its own for each depth, the same in every run.
        number = str(random.Random(f"needle {depth}").randrange(1_000_000, 10_000_000))
        needle = f" The registration number of the red bicycle is {number}."
        before = "".join(sentence for sentence, start in sentences if start < depth * tokens)
        after = "".join(sentence for sentence, start in sentences if start >= depth * tokens)
        body = f"{before}{needle}{after}".strip()
        yield make_prompt(tokenizer, f"needle at {depth:.0%}", f"{body}\n\n{NEEDLE_QUESTION}", number)


def is_answered(prompt: Prompt, text: str) -> bool:
    """Whether the prompt's number stands in `text`, thousands separators allowed; False if it has none."""
    return prompt.number in re.findall(r"\d+", re.sub(r"(?<=\d),(?=\d{3})", "", text))
