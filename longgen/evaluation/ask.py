"""Asking an engine about a document: one prefill, any number of questions."""

from __future__ import annotations

from collections.abc import Iterable

from longgen.engine import Engine
from longgen.evaluation.needle import Document, Needle
from longgen.model.tokenizer import TextTokenizer

QUESTION_TOKENS = 512  # room announced for a question and its answer
ANSWER_TOKENS = 16


class Reader:
    """Reads one document at a time and answers questions about it, greedily.

    Args:
        engine: the request lives in its slot 0.
        stop_ids: token ids that end an answer.
    """

    def __init__(self, engine: Engine, tokenizer: TextTokenizer, stop_ids: frozenset[int]) -> None:
        self.engine, self._tokenizer, self._stop_ids = engine, tokenizer, stop_ids

    def read(self, document: Document) -> None:
        """Prefills the document, in place of the one before."""
        ids = self._tokenizer.encode(document.text, chat=False)
        self.engine.prefill(ids, new_tokens=QUESTION_TOKENS)

    def answer(self, needle: Needle) -> str:
        """The answer to the needle's question; nothing of either stays in the slot."""
        start = self.engine.snapshot()
        logits = self.engine.extend(self._tokenizer.encode(needle.question, chat=False))
        answer: list[int] = []
        while (token := int(logits.argmax())) not in self._stop_ids and len(answer) < ANSWER_TOKENS:
            answer.append(token)
            logits = self.engine.decode_step(token)
        self.engine.restore(start)
        return self._tokenizer.decode(answer)

    def answers(self, document: Document, needles: Iterable[Needle]) -> list[str]:
        """Reads the document and answers the question for each needle."""
        self.read(document)
        return [self.answer(needle) for needle in needles]
