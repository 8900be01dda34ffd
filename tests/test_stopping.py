"""Stop strings: cut exactly, whatever pieces the text comes in."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longgen.run.stopping import StopStrings


def passed(stops: Sequence[str], pieces: Sequence[str]) -> tuple[list[str], bool]:
    filtered = StopStrings(stops)
    return [*map(filtered.push, pieces), filtered.flush()], filtered.found


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        ([], ["ab", "", "c"], ["ab", "", "c", ""]),
        (["x"], ["ab", "cxd", "e"], ["ab", "c", "", ""]),
        (["END"], ["one E", "N", "D two"], ["one ", "", "", ""]),
        (["END"], ["one E", "N", "d"], ["one ", "", "ENd", ""]),
        (["END"], ["one E", "N"], ["one ", "", "EN"]),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", "", ""]),
        (["bc", "abcd"], ["a", "b", "c", "d"], ["", "", "a", "", ""]),
        (["c", "abc"], ["a", "b", "c"], ["", "", "", ""]),
        (["\n\n"], ["x\n", "\ny"], ["x", "", ""]),
        (["\ufffd"], ["a\ufffdb"], ["a", ""]),
        (["日本"], ["a日", "本b"], ["a", "", ""]),
    ],
)
def test_text_goes_out_up_to_the_first_stop_string(stops: list[str], pieces: list[str], expected: list[str]) -> None:
    parts, found = passed(stops, pieces)
    assert parts == expected
    assert found == any(stop in "".join(pieces) for stop in stops)


letters = st.text("ab", max_size=12)


@given(stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), pieces=st.lists(letters, max_size=8))
def test_the_pieces_make_no_difference(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    parts, found = passed(stops, pieces)
    assert ("".join(parts), found) == (expected, bool(ends))
    one_by_one, _ = passed(stops, list(text))
    assert "".join(one_by_one) == expected


def test_nothing_is_held_back_that_cannot_begin_a_stop_string() -> None:
    parts, _ = passed(["abc"], ["xa", "x", "ab", "b"])
    assert parts == ["x", "ax", "", "abb", ""]
