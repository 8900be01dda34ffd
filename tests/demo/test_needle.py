"""Documents that hide needles."""

from __future__ import annotations

import pytest

from longgen.errors import UsageError
from longgen.evaluation.filler import noise, tales
from longgen.evaluation.needle import MAGIC_NUMBER, PASS_KEY, Needle, hide, is_right

NEEDLES = [(0.9, Needle(PASS_KEY, "12345")), (0.1, Needle(MAGIC_NUMBER, "7654321", "lantern"))]


@pytest.mark.parametrize("size", [600, 5000])
def test_needles_stand_at_their_depths_and_the_size_is_exact(size: int) -> None:
    document = hide(NEEDLES, tales(0), size)
    assert len(document.text) == size and document.text.startswith(PASS_KEY.intro) and document.text.endswith("\n")
    for (depth, needle), (start, stop) in zip(NEEDLES, document.spans, strict=True):
        assert document.text[start:stop] == needle.text
        assert abs(start / size - depth) < (0.4 if size < 1000 else 0.1)


@pytest.mark.parametrize("depth", [0.0, 1.0])
def test_the_ends_are_depths_too(depth: float) -> None:
    document = hide([(depth, NEEDLES[0][1])], noise(), 2000)
    start, stop = document.spans[0]
    assert start == len(PASS_KEY.intro) + 1 if depth == 0 else stop >= 1997


def test_the_prompt_ends_with_the_question() -> None:
    needle = NEEDLES[1][1]
    prompt = hide([(0.5, needle)], noise(), 1000).prompt(needle)
    assert prompt.endswith("\n" + needle.question) and needle.question.endswith("mentioned in the provided text is")
    assert is_right(needle, " 7654321\n") and not is_right(needle, " 76543210") and not is_right(needle, "")


def test_too_little_room_or_filler_is_refused() -> None:
    with pytest.raises(UsageError, match="too small"):
        hide(NEEDLES, noise(), 200)
    with pytest.raises(UsageError, match="short of"):
        hide(NEEDLES, ["One sentence."], 2000)
