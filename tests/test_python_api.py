"""The example of docs/python-api.md, run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "python-api.md"


def test_the_example_runs_and_prints_the_numbers() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{'first': ' 71432', 'second': ' 90817'}\n"
    assert len([line for line in example.splitlines() if line]) <= 15
