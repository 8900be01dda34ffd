"""`longgen eval needle` as a user runs it, on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longgen.evaluation.haystack import Kind
from longgen.model.checkpoint import resolve_checkpoint
from longgen.model.tokenizer import TextTokenizer
from tests.checkpoints import Build

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
DEMO = ("--model", "demo", "--device", "cpu")
FIELDS = ["id", "index", "input", "outputs", "length", "depth", "kind", "score", "pred", "finish_reason"]


def _needle(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "longgen", "eval", "needle", *flags]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800, check=False)


def _records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("kind", [kind.value for kind in Kind])
def test_the_demo_checkpoint_answers_every_prompt(tmp_path: Path, kind: str) -> None:
    output, plot = tmp_path / "out.jsonl", tmp_path / "map.png"
    flags = ["--lengths", "2K,700", "--depths", "3", "--kind", kind, "--output", str(output)]
    done = _needle(*DEMO, *flags, "--block-size", "64", *(["--plot", str(plot)] if HAS_MATPLOTLIB else []))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    records = _records(output.read_text("utf-8"))
    tokenizer = TextTokenizer.load(resolve_checkpoint("demo"))
    assert [(record["length"], record["depth"]) for record in records] == [
        (length, depth) for length in (700, 2048) for depth in (0, 0.5, 1)
    ]
    for index, record in enumerate(records):
        assert list(record)[: len(FIELDS)] == FIELDS and record["index"] == index and record["kind"] == kind
        assert len(tokenizer.encode(record["input"], chat=True)) == record["length"]
        assert record["pred"].strip() == record["outputs"][0] and record["finish_reason"] == "stop"
        assert record["score"] == 1
    rows = [line.split() for line in done.stderr.splitlines()[-5:]]
    assert rows == [["depth", "700", "2,048"], *([name, "100", "100"] for name in ("0%", "50%", "100%", "mean"))]
    assert done.stderr.count("2,048 + 64 tokens") == 1  # planned once, for the longest
    if HAS_MATPLOTLIB:
        assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_random_weights_score_nothing_and_results_go_to_standard_output(build: Build) -> None:
    flags = ("--lengths", "300", "--depths", "2", "--no-inputs", "--max-new-tokens", "4", "--block-size", "16")
    done = _needle("--model", str(build("qwen3")), "--device", "cpu", *flags)
    assert done.returncode == 0, done.stderr
    records = _records(done.stdout)
    assert [record["score"] for record in records] == [0, 0]
    assert all("input" not in record and record["length"] == 300 for record in records)
    assert [line.split() for line in done.stderr.splitlines()[-2:]] == [["100%", "0"], ["mean", "0"]]


def test_what_is_wrong_is_said_in_one_line_before_anything_loads(tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("kept")
    for flags, message in (
        ([], "give --model and --lengths;"),
        (["--lengths", "4K"], "give --model;"),
        (["--model", "demo"], "give --lengths;"),
        (["--model", "demo", "--lengths", "4K,x"], "'x' is not a length"),
        (["--model", "demo", "--lengths", "4K", "--output", str(tmp_path / "there.jsonl")], "line 1 is no result of"),
        (["--model", "demo", "--lengths", "4K", "--output", str(tmp_path / "no" / "a")], "cannot be opened"),
        (["--model", "demo", "--lengths", "4K", "--plot", "map.pdf"], "give a name that ends in .png"),
        (["--model", "demo", "--lengths", "64"], "a length of 64 is too short for the needles"),
    ):
        done = _needle(*flags)
        errors = done.stderr.splitlines()
        assert (done.returncode, done.stdout, len(errors)) == (2, "", 1), done.stderr
        assert errors[0].startswith("longgen: error: ") and message in errors[0]
    assert (tmp_path / "there.jsonl").read_text() == "kept"


def test_a_plot_without_matplotlib_is_refused_before_anything_loads() -> None:
    script = (
        "import sys; sys.modules['matplotlib'] = None; from longgen.cli import main\n"
        "code = main(['eval', 'needle', '--model', 'demo', '--lengths', '4K', '--plot', 'a.png'])\n"
        "print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout == "2 False\n"
    assert done.stderr == (
        "longgen: error: --plot needs matplotlib, which is not installed; run pip install 'longgen[plot]'\n"
    )


def test_what_is_done_is_not_done_again_and_counts_in_the_table(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    flags = ["--lengths", "700", "--depths", "3", "--no-inputs", "--output", str(output)]
    assert _needle(*DEMO, *flags).returncode == 0
    lines = output.read_bytes().splitlines(keepends=True)
    wrong = lines[0].replace(b'"score": 1.0', b'"score": 0.0')
    output.write_bytes(wrong + lines[1] + lines[2][:50])  # killed while it wrote
    done = _needle(*DEMO, *flags)
    assert done.returncode == 0 and "2 of 3 records are done" in done.stderr
    records = _records(output.read_text("utf-8"))
    assert [(record["index"], record["score"]) for record in records] == [(0, 0), (1, 1), (2, 1)]
    assert [line.split() for line in done.stderr.splitlines()[-4:]] == [
        ["0%", "0"],
        ["50%", "100"],
        ["100%", "100"],
        ["mean", "67"],
    ]
    done = _needle(*DEMO, *flags, "--no-resume")
    assert done.returncode == 2 and "is there already" in done.stderr


def test_a_prompt_that_failed_has_no_score_and_the_exit_code_says_so() -> None:
    done = _needle(*DEMO, "--lengths", "700,2K", "--depths", "1", "--max-len", "1K", "--no-inputs")
    assert done.returncode == 1
    first, failed = _records(done.stdout)
    assert (first["score"], first["finish_reason"]) == (1, "stop")
    assert (failed["score"], failed["finish_reason"], failed["pred"]) == (None, "error", "")
    assert "2,048 tokens" in failed["error"]
    rows = [line.split() for line in done.stderr.splitlines()[-3:]]
    assert rows == [["depth", "700", "2,048"], ["50%", "100", "failed"], ["mean", "100", "failed"]]


def test_scores_of_another_model_or_another_kind_are_refused(tmp_path: Path) -> None:
    output, copy = tmp_path / "out.jsonl", tmp_path / "other"
    flags = ["--lengths", "700", "--depths", "2", "--no-inputs", "--device", "cpu", "--output", str(output)]
    shutil.copytree(resolve_checkpoint("demo"), copy)
    assert _needle("--model", "demo", *flags).returncode == 0
    before = output.read_bytes()
    done = _needle("--model", str(copy), *flags)
    assert (done.returncode, output.read_bytes()) == (2, before)
    assert done.stderr == (
        f"longgen: error: {output} line 1 has an answer of the model demo, and this run is of {copy}; give the "
        "results of this model a place of their own, or --overwrite to replace those\n"
    )
    done = _needle("--model", "demo", *flags, "--kind", "magic")
    assert (done.returncode, output.read_bytes()) == (2, before) and "answers to other prompts" in done.stderr
    assert _needle("--model", str(copy), *flags, "--overwrite").returncode == 0
    assert _needle("--model", f"{copy}/../{copy.name}", *flags).returncode == 0  # the same folder
    assert {record["settings"]["model"] for record in _records(output.read_text("utf-8"))} == {str(copy)}
