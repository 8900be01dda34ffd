"""What the sections share: settings in, results out, tables on stderr, and a clock that waits for the device."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from longgen.benchmarking.tables import table_lines
from longgen.planning.measure import timed


@dataclass(frozen=True, slots=True)
class Settings:
    """Where to run, and whether with sizes that only show that the script works."""

    device: torch.device
    small: bool
    pytest_arguments: tuple[str, ...] = ()  # more of them, for the sections that run tests


@dataclass(slots=True)
class Result:
    """What a section found.

    Attributes:
        ok: whether everything that has a bar met it; None if the section could not run.
        data: for the JSON line.
    """

    ok: bool | None
    data: dict[str, Any] = field(default_factory=dict)


def say(text: str) -> None:
    """A line for people."""
    print(text, file=sys.stderr, flush=True)


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table for people."""
    for line in table_lines(headers, rows):
        say(line)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Of one call, from an idle device to an idle device."""
    return timed(function, lambda: synchronize(device))


def median_seconds(function: Callable[[], object], device: torch.device, *, repeats: int = 5, calls: int = 1) -> float:
    """Of one call: the median of `repeats` measurements of `calls` calls in a row, after two that do not count."""

    def several() -> None:
        for _ in range(calls):
            function()

    for _ in range(2):
        several()
    return statistics.median(seconds(several, device) for _ in range(repeats)) / calls
