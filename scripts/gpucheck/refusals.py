"""What does not fit is refused by the real command, in one line with numbers, before weights are loaded."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpucheck.report import Settings

CUDA_CASES = (
    ("too little GPU", ("--gpu-memory", "775MiB"), 1),
    ("cap below CUDA and the weights", ("--gpu-memory", "300MiB"), 1),
    ("cap above the card", ("--gpu-memory", "4TiB"), 1),
    ("too little RAM", ("--cpu-memory", "200MiB"), 1),
)
CPU_CASES = CUDA_CASES[-1:]
COLUMNS = ("case", "ok", "code", "says")


def check(settings: Settings) -> list[dict[str, Any]]:
    """A row for each case, all run at once."""
    cases = CUDA_CASES if settings.device.type == "cuda" else CPU_CASES
    with tempfile.TemporaryDirectory() as folder:
        prompt = Path(folder) / "prompt.txt"
        prompt.write_text("A number is hidden here. " * 400, encoding="utf-8")
        command = [sys.executable, "-m", "longgen", "run", "--model", "demo", "--prompt", str(prompt)]
        command += ["--device", str(settings.device), "--max-new-tokens", "4"]
        running = [
            subprocess.Popen(
                [*command, *flags],
                cwd=Path(__file__).parents[2],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _, flags, _ in cases
        ]
        return [_judged(name, code, process) for (name, _, code), process in zip(cases, running, strict=True)]


def _judged(name: str, code: int, process: subprocess.Popen[str]) -> dict[str, Any]:
    """The plan's lines and `chat template` come before loading; an error there is the last line, and the only one."""
    out, err = process.communicate()
    errors = [line for line in err.splitlines() if line.startswith("longgen: error: ")]
    last = (err.splitlines() or [""])[-1]
    numbers = any(letter.isdigit() for letter in last)
    ok = process.returncode == code and not out and errors == [last] and numbers and "Traceback" not in err
    ok &= not any("tok/s" in line and "prompt tokens" in line for line in err.splitlines())
    return {"case": name, "ok": ok, "code": process.returncode, "says": last}
