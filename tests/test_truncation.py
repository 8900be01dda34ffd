"""Cutting prompts: which tokens go, and that characters and the template stay whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from longgen.errors import UsageError
from longgen.model.tokenizer import EncodedPrompt
from longgen.run.truncation import Cut, truncate


def cut(room: int, place: str, *, inside: Callable[[int], bool] = lambda token: False) -> tuple[list[int], Cut | None]:
    """Cuts a prompt of 12 tokens, 0 to 11, of which 2 to 9 are the text's."""
    ids, made = truncate(EncodedPrompt(torch.arange(12, dtype=torch.int32), (2, 10)), room, place, inside)
    assert ids.dtype == torch.int32
    return ids.tolist(), made


@pytest.mark.parametrize(
    ("place", "kept"),
    [("head", [7, 8, 9]), ("middle", [2, 3, 9]), ("tail", [2, 3, 4])],
)
def test_only_the_texts_tokens_go_and_no_more_than_must(place: str, kept: list[int]) -> None:
    assert cut(7, place) == ([0, 1, *kept, 10, 11], Cut(place, 5, 8))


@pytest.mark.parametrize("place", ["head", "middle", "tail"])
def test_a_prompt_that_fits_is_left_alone(place: str) -> None:
    assert cut(12, place) == (list(range(12)), None)
    assert cut(100, place) == (list(range(12)), None)


def test_no_character_is_cut_through() -> None:
    def inside(token: int) -> bool:
        return token in (4, 7, 8)

    assert cut(7, "head", inside=inside) == ([0, 1, 9, 10, 11], Cut("head", 7, 8))
    assert cut(7, "middle", inside=inside) == ([0, 1, 2, 9, 10, 11], Cut("middle", 6, 8))
    assert cut(8, "tail", inside=inside) == ([0, 1, 2, 3, 4, 5, 10, 11], Cut("tail", 4, 8))
    assert cut(9, "tail", inside=inside) == cut(8, "tail", inside=inside)


@pytest.mark.parametrize("place", ["head", "middle", "tail"])
def test_a_cut_that_leaves_nothing_of_the_text_is_refused(place: str) -> None:
    assert len(cut(5, place)[0]) == 5
    for room in (4, 0, -3):
        with pytest.raises(UsageError, match=f"room for {room} tokens, of which the template takes 4: nothing of"):
            cut(room, place)
    with pytest.raises(UsageError, match="nothing of the text's 8 would be left"):
        cut(5, place, inside=lambda token: token > 2)


def test_a_text_that_cannot_be_told_from_the_template_is_not_cut() -> None:
    prompt = EncodedPrompt(torch.arange(12), None)
    assert truncate(prompt, 12, "head", bool)[1] is None
    with pytest.raises(UsageError, match="no way to tell the text's tokens"):
        truncate(prompt, 11, "head", bool)


def test_a_cut_says_what_it_left_out() -> None:
    assert str(Cut("middle", 1234, 56789)) == "middle cut: 1,234 of the text's 56,789 tokens left out"
