"""Seconds by phase, from the start of a process on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from longgen.run.phases import Phases, process_age


def test_a_phase_ends_where_the_next_begins() -> None:
    times = iter([10.0, 12.5, 13.0, 20.0])
    phases = Phases(started=7.0, clock=times.__next__)
    for name in ("import", "plan", "load", "plan"):
        phases.end(name)
    assert phases.seconds() == {"import": 3.0, "plan": 2.5 + 7.0, "load": 0.5}


def test_without_a_start_the_first_phase_begins_with_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longgen.run.phases.process_age", lambda: 4.0)
    times = iter([10.0, 11.0])
    phases = Phases(clock=times.__next__)
    phases.end("import")
    assert phases.seconds() == {"import": 5.0}


def test_the_age_of_a_process_counts_what_came_before_the_first_import() -> None:
    code = "import time; time.sleep(0.3); from longgen.run.phases import process_age; print(process_age())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) >= 0.29
    assert process_age() > 0
