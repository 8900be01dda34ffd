"""The tests that need a CUDA device, run by pytest in a process of their own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpucheck.report import Result, Settings, say

ROOT = Path(__file__).parents[2]
STRESS = "tests/cuda/test_stress.py"


def run_tests(settings: Settings) -> Result:
    """Every CUDA test but the stress test."""
    return _pytest(settings, ["tests", f"--ignore={STRESS}"], "test_nothing_in_a_pass_waits")


def run_stress(settings: Settings) -> Result:
    """Random passes under disturbance."""
    return _pytest(settings, [STRESS], "test_every_pass")


def _pytest(settings: Settings, arguments: Sequence[str], small: str) -> Result:
    """Runs the tests marked `cuda` (with --small: the ones named `small`, on whatever device there is)."""
    chosen = ["-k", small] if settings.small else ["-m", "cuda"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--durations=10", f"--junitxml={report}"]
        command += [*chosen, *arguments, *settings.pytest_arguments]
        done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
        if not report.exists():
            return Result(False, {"error": f"pytest ended with {done.returncode} and left no report"})
        data = read_report(report)
    say(f"  {data['passed']} passed, {data['failed']} failed, {data['skipped']} skipped")
    for failure in data["failures"]:
        say(f"  FAILED {failure['test']}: {failure['message']}")
    for reason, count in data["skip_reasons"].items():
        say(f"  skipped {count}: {reason}")
    return Result(done.returncode == 0 and data["failed"] == 0 and data["passed"] > 0, data)


def read_report(path: Path) -> dict[str, Any]:
    """Counts, failures with the first line of their message, and reasons of skips, from a JUnit report."""
    failures, reasons, total = [], Counter[str](), 0
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        total += 1
        name = f"{case.get('classname')}.{case.get('name')}"
        for kind in ("failure", "error"):
            for problem in case.findall(kind):
                message = (problem.get("message") or "").strip().splitlines()
                failures.append({"test": name, "message": message[0][:300] if message else kind})
        for skip in case.findall("skipped"):
            reasons[skip.get("message") or "no reason given"] += 1
    failed, skipped = len({failure["test"] for failure in failures}), sum(reasons.values())
    return {
        "passed": total - failed - skipped,
        "failed": failed,
        "skipped": skipped,
        "failures": failures,
        "skip_reasons": dict(reasons),
    }
