"""Sizes and times as people write and read them."""

from __future__ import annotations

import pytest

from longgen.errors import UsageError
from longgen.units import parse_bytes, parse_bytes_or_fraction, show_bytes, show_length, show_seconds


@pytest.mark.parametrize(
    ("text", "count"),
    [("24GiB", 24 << 30), ("24 GiB", 24 << 30), ("512MiB", 512 << 20), ("1.5TiB", 3 << 39), ("24GB", 24 * 10**9)],
)
def test_amounts_of_memory(text: str, count: int) -> None:
    assert parse_bytes(text) == count == parse_bytes_or_fraction(text)


@pytest.mark.parametrize("value", ["0.5", ".5", 0.5])
def test_fractions(value: object) -> None:
    assert parse_bytes_or_fraction(value) == 0.5


@pytest.mark.parametrize(
    "value", ["", "24", "24G", "24gib", "-1GiB", "0GiB", "0", "0.0", "1.5", 24, 0, True, None, 2.0]
)
def test_other_spellings_are_refused(value: object) -> None:
    with pytest.raises(UsageError, match="is not an amount of memory; write one such as 24GiB"):
        parse_bytes_or_fraction(value)


def test_bytes_are_shown_in_the_unit_that_fits() -> None:
    shown = [show_bytes(count) for count in (12, 48 << 10, 896 << 20, 48 << 30, 57344, 15_231_233_024, 3 << 40)]
    assert shown == ["12 B", "48 KiB", "896 MiB", "48 GiB", "56 KiB", "14.2 GiB", "3 TiB"]


def test_lengths_are_shown_as_they_are_given() -> None:
    assert [show_length(n) for n in (4 << 20, 256 << 10, 1_000_000, 300)] == ["4M", "256K", "1,000,000", "300"]


def test_times_are_shown_in_the_unit_that_fits() -> None:
    assert [show_seconds(s) for s in (0.42, 52.4, 450, 8280)] == ["0.4 s", "52 s", "7.5 min", "2.3 h"]
