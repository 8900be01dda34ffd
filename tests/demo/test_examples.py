"""The example prompts that ship, and the commands that are given for them."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from longgen.cli import main

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("make_needle_examples")


def test_the_examples_are_what_the_script_writes(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([str(tmp_path)]) == 0
    answers = {Path(name).name: number for name, number in json.loads(capsys.readouterr().out).items()}
    assert answers == {"pass-key.txt": "71432", "magic-number.txt": "5820397"}
    for name, number in answers.items():
        text = (EXAMPLES / name).read_bytes()
        assert text == (tmp_path / name).read_bytes()
        assert len(text) == 32768 and number.encode() in text


def test_the_answers_are_right_and_all_there_is_on_standard_output(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of shorter ones: continuous integration runs the command of the README over the long text."""
    assert script.main([str(tmp_path), "--length", "4K"]) == 0
    capsys.readouterr()
    files = [word for name in ("pass-key.txt", "magic-number.txt") for word in ("--prompt", str(tmp_path / name))]
    assert main(["run", "--model", "demo", "--device", "cpu", *files]) == 0
    assert capsys.readouterr().out == " 71432\n 5820397\n"


def test_the_numbers_are_where_the_commands_are() -> None:
    guide = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall("--prompt examples/([a-z-]+[.]txt)", guide)) == {"pass-key.txt", "magic-number.txt"}
    assert re.findall("[0-9]{5,}", guide) == ["71432", "5820397"]
    first = re.search("```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert first is not None and "longgen run --model demo --prompt examples/pass-key.txt" in first[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--length", "16Q"], "'16Q' is not a length"), (["--length", "100"], "is too small"), ([], "Not a directory")],
)
def test_what_cannot_be_written_is_one_line(
    script: Any, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert script.main([str(tmp_path / "file" / "folder"), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("make_needle_examples: ") and captured.err.count("\n") == 1
    assert message in captured.err
