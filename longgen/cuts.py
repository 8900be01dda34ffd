"""What is left of a request's past where it was cut back and went on."""

from __future__ import annotations


class Cuts:
    """The cuts of one request, so that a mark made before one is known to have lost its tokens."""

    def __init__(self) -> None:
        self._count = 0
        # (number of the cut, length left), both ascending: a cut hides earlier ones that left as much or more.
        self._cuts: list[tuple[int, int]] = []

    @property
    def count(self) -> int:
        """Cuts so far: the time, for `least_since`."""
        return self._count

    def add(self, length: int) -> None:
        """The request was cut to `length` tokens."""
        self._count += 1
        while self._cuts and self._cuts[-1][1] >= length:
            self._cuts.pop()
        self._cuts.append((self._count, length))

    def least_since(self, count: int) -> int | None:
        """The least that any cut after the first `count` left; None if there was none."""
        return next((length for number, length in self._cuts if number > count), None)
