"""The script that measures tokenizing, on a tiny checkpoint: its texts, its figures, and what it calls a fault."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from longgen.model.tiny import make_checkpoint

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    return importlib.import_module("measure_tokenizing")


def test_texts_have_their_size_and_only_prose_has_spaces(script: Any) -> None:
    for name, make in script.KINDS.items():
        text = make(30_000)
        assert len(text) == 30_000
        assert (len(text.decode("utf-8").split()) > 1) == (name == "prose")


def test_a_file_is_measured_and_compared(script: Any, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny")
    path = tmp_path / "text.txt"
    path.write_bytes(script.base64_text(60_000))
    row = script.measure(checkpoint, path, 60_000)
    assert row["same_ids"] is True
    assert 20_000 < row["tokens"] <= 60_000
    assert row["seconds"] > 0
    assert script.measure(checkpoint, path, 59_999)["same_ids"] is None


def test_a_run_prints_a_table_and_one_line_of_json(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # where longgen is not installed
    checkpoint = make_checkpoint(tmp_path / "tiny")
    script.main([str(checkpoint), "--sizes", "0.1", "--kinds", "one letter", "--repeat", "1"])
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert [(row["text"], row["mb"], row["same_ids"]) for row in result["rows"]] == [("one letter", 0.1, True)]
    assert result["cpu"]
    assert "| one letter | 0.1 | " in captured.err


def test_faults_are_named(script: Any) -> None:
    fine = {"text": "prose", "mb": 4.0, "seconds": 2.0, "per_doubling": 2.99, "bytes_per_byte": 40.0, "same_ids": True}
    assert script.faults_of(fine) == []
    assert script.faults_of(fine | {"text": "CJK", "bytes_per_byte": 300.0, "per_doubling": None}) == []
    assert script.faults_of(fine | {"per_doubling": 3.0}) == ["prose, 4 MB: each doubling costs 3.00 times the seconds"]
    assert script.faults_of(fine | {"bytes_per_byte": 40.1}) == [
        "prose, 4 MB: 40.1 bytes of memory per byte, more than 40"
    ]
    assert script.faults_of(fine | {"same_ids": False}) == ["prose, 4 MB: the ids differ from transformers'"]
    assert script.per_doubling({"mb": 1.0, "seconds": 1.0}, {"mb": 4.0, "seconds": 9.0}) == pytest.approx(3)
