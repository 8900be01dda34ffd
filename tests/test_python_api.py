"""The examples of docs/python-api.md, run as they stand there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "python-api.md"


def _examples() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def _run(example: str) -> str:
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_example_runs_and_prints_the_numbers() -> None:
    example = _examples()[0]
    assert _run(example) == "{'first': ' 71432', 'second': ' 90817'}\n"
    assert len([line for line in example.splitlines() if line]) <= 15


def test_the_second_example_answers_one_request_to_its_stop_token() -> None:
    assert _run(_examples()[1]) == " 71432 stop\n"


def test_the_third_example_writes_a_file_of_results(tmp_path: Path) -> None:
    _, _, example = _examples()
    output = tmp_path / "results.jsonl"
    assert _run(f"{example.replace('results.jsonl', str(output))}print(code)") == "1\n"
    first, second = map(json.loads, output.read_text().splitlines())
    assert (first["id"], first["outputs"], first["error"]) == ("first", ["there"], None)
    assert first["generated_tokens"] <= first["settings"]["max_new_tokens"] == 4
    assert second["error"] == "messages need the chat template of the checkpoint, and this run goes without it"
