"""The commands that continuous integration takes from the README."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _call(folder: Path, call: str) -> subprocess.CompletedProcess[str]:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    functions = re.findall(
        r"^(?:readme_command|run_readme|readme_answers)\(\) \{$.*?^\}$", script, re.MULTILINE | re.DOTALL
    )
    assert len(functions) == 3
    command = ["bash", "-c", "\n".join([*functions, call])]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_first_block_after_a_heading_is_run(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("## Run\n\nWords.\n\n```bash\necho ran &&\nfalse\n```\n\n```\necho no\n```\n")
    done = _call(tmp_path, "run_readme Run")
    assert (done.returncode, done.stdout) == (1, "ran\n")


@pytest.mark.parametrize("readme", ["## Running\n\n```bash\ntrue\n```\n", "## Run\n\nNothing.\n", ""])
def test_a_heading_without_a_command_fails(tmp_path: Path, readme: str) -> None:
    (tmp_path / "README.md").write_text(readme)
    done = _call(tmp_path, "run_readme Run")
    assert done.returncode == 1
    assert "no command under '## Run'" in done.stdout


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("echo ' 71432'", 0),
        ("echo ' 71432'; echo of >&2", 0),
        ("echo 71432", 1),
        ("echo A; echo ' 71432'", 1),
        ("false", 1),
    ],
)
def test_the_answer_must_be_all_that_is_printed(tmp_path: Path, command: str, code: int) -> None:
    (tmp_path / "README.md").write_text(f"## Run\n\n```bash\n{command}\n```\n")
    done = _call(tmp_path, "readme_answers Run ' 71432'")
    assert done.returncode == code
    assert ("not ' 71432'" in done.stdout) == (code == 1 and command != "false")
