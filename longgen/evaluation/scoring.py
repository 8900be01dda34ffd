"""RULER's scores: which of the expected strings stand in an answer, in any case (arXiv:2404.06654, section 4)."""

from __future__ import annotations

from collections.abc import Sequence


def string_match_all(pred: str, outputs: Sequence[str]) -> float:
    """The share of the expected strings that the answer contains, 0 to 1."""
    return sum(output.lower() in pred.lower() for output in outputs) / len(outputs)


def string_match_part(pred: str, outputs: Sequence[str]) -> float:
    """1 if the answer contains one of the expected strings, else 0."""
    return float(any(output.lower() in pred.lower() for output in outputs))
