"""The commands that continuous integration takes from the README."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _run_readme(folder: Path, heading: str) -> subprocess.CompletedProcess[str]:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    functions = re.findall(r"^(?:readme_command|run_readme)\(\) \{$.*?^\}$", script, re.MULTILINE | re.DOTALL)
    assert len(functions) == 2
    command = ["bash", "-c", "\n".join([*functions, f"run_readme {heading}"])]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_first_block_after_a_heading_is_run(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("## Run\n\nWords.\n\n```bash\necho ran &&\nfalse\n```\n\n```\necho no\n```\n")
    done = _run_readme(tmp_path, "Run")
    assert (done.returncode, done.stdout) == (1, "ran\n")


@pytest.mark.parametrize("readme", ["## Running\n\n```bash\ntrue\n```\n", "## Run\n\nNothing.\n", ""])
def test_a_heading_without_a_command_fails(tmp_path: Path, readme: str) -> None:
    (tmp_path / "README.md").write_text(readme)
    done = _run_readme(tmp_path, "Run")
    assert done.returncode == 1
    assert "no command under '## Run'" in done.stdout
