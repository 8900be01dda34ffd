"""String matches, as RULER counts them."""

from __future__ import annotations

from longgen.evaluation.scoring import string_match_all, string_match_part


def test_all_is_the_share_of_the_strings_that_are_there() -> None:
    assert string_match_all("They are 123 and 456.", ["123", "456"]) == 1
    assert string_match_all("It is 123.", ["123", "456", "789", "321"]) == 0.25
    assert string_match_all("", ["123"]) == 0


def test_part_asks_for_one_of_them() -> None:
    assert string_match_part("It is 123.", ["123", "456"]) == 1
    assert string_match_part("It is 12.", ["123", "456"]) == 0


def test_case_does_not_matter() -> None:
    assert string_match_all("humble-TEAPOT", ["Humble-Teapot"]) == string_match_part("ABC", ["abc"]) == 1
