"""Where the time of a command goes, from the start of its process on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


class Phases:
    """Seconds by phase. A phase ends where `end` names it, and the next one begins there."""

    def __init__(self, started: float | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        """started: when the first phase began, by the clock; None: when the process did."""
        self._clock = clock
        self._last = clock() - process_age() if started is None else started
        self._seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """Counts what has passed since the last call to the phase `name`."""
        now = self._clock()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """By phase, in the order in which they first ended."""
        return dict(self._seconds)


def process_age() -> float:
    """Seconds since this process was started, to a hundredth; 0.0 where /proc does not say."""
    try:
        # The fields after the name, which may hold spaces; starttime is the twenty-second of all.
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, IndexError, ValueError):
        return 0.0
