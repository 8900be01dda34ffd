"""A few passes of a tiny store under compute-sanitizer: no access outside its memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from gpucheck.report import Result, Settings, say

CASE = Path(__file__).with_name("sanitizer_case.py")
TIMEOUT = 420  # seconds


def run(settings: Settings) -> Result:
    """memcheck; errors of the CUDA API that the libraries provoke on purpose are not counted."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        say("  skipped: compute-sanitizer is not on PATH")
        return Result(None, {"skipped": "compute-sanitizer is not on PATH"})
    # Without torch's caching, each tensor is an allocation of its own, and an access past its end shows.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [tool, "--tool", "memcheck", "--report-api-errors", "no", sys.executable, str(CASE)]
    try:
        done = subprocess.run(
            command, cwd=CASE.parents[2], env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return Result(False, {"error": f"not done after {TIMEOUT} s"})
    output = done.stdout + done.stderr
    summary = re.search(r"ERROR SUMMARY: (\d+) error", output)
    errors = int(summary.group(1)) if summary else None
    agreed = "agrees with the reference" in output
    say(f"  {errors if errors is not None else 'no count of'} errors, exit status {done.returncode}")
    ok = errors == 0 and agreed and done.returncode == 0
    if not ok:
        reported = [line for line in output.splitlines() if line.startswith("=========")]
        say("\n".join(reported[:60]) or output[-4000:])
    return Result(ok, {"errors": errors, "returncode": done.returncode, "agreed": agreed})
