"""Ends that are reached whatever fails on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


def do_all(*steps: Callable[[], object]) -> None:
    """Does every step, also those after one that fails; then raises what failed first."""
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first


@contextmanager
def ended_on_failure(end: Callable[[], object]) -> Iterator[None]:
    """Calls `end` if what runs inside fails or is interrupted. Raises that failure, also where `end` fails too."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            end()
        raise
