"""`longgen eval needle` as a user runs it, on the CPU."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longgen.config import Settings
from longgen.evaluation import needle_run, request_loop
from longgen.evaluation.haystack import Kind
from longgen.evaluation.request_loop import Answer
from longgen.model.checkpoint import resolve_checkpoint
from longgen.model.tokenizer import TextTokenizer
from tests.checkpoints import Build

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
DEMO = ("--model", "demo", "--device", "cpu")
FIELDS = ["index", "input", "outputs", "length", "depth", "kind", "pred", "finish_reason", "score"]


def _needle(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "longgen", "eval", "needle", *flags]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


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
        assert list(record) == FIELDS and record["index"] == index and record["kind"] == kind
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
        (["--lengths", "4K"], "give --model"),
        (["--model", "demo"], "give --lengths"),
        (["--model", "demo", "--lengths", "4K,x"], "'x' is not a length"),
        (["--model", "demo", "--lengths", "4K", "--output", str(tmp_path / "there.jsonl")], "exists; give another"),
        (["--model", "demo", "--lengths", "4K", "--output", str(tmp_path / "no" / "a")], "its folder is not there"),
        (["--model", "demo", "--lengths", "4K", "--output", str(tmp_path)], "it is a folder"),
        (["--model", "demo", "--lengths", "4K", "--plot", "map.pdf"], "give a name that ends in .png"),
        (["--model", "demo", "--lengths", "64"], "a length of 64 is too short for the needles"),
        (["--model", "demo", "--lengths", "2K", "--max-len", "1K"], "which is more than --max-len, 1,024"),
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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "2 False\n"
    assert done.stderr == (
        "longgen: error: --plot needs matplotlib, which is not installed; run pip install 'longgen[plot]'\n"
    )


class Flushes(io.BytesIO):
    """Standard output that keeps what it held at every flush."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes] = []

    def flush(self) -> None:
        self.seen.append(self.getvalue())


def _answered(monkeypatch: pytest.MonkeyPatch, texts: list[str], reasons: list[str]) -> tuple[int, Flushes, str]:
    """Runs two prompts whose answers are given; `{}` in one stands for the number that is right."""

    def answers(model: str, requests: Any, settings: Settings, err: Any) -> Iterator[Answer]:
        for request, text, reason in zip(requests, texts, reasons, strict=True):
            number = request.text.partition("The pass key is ")[2].partition(".")[0]
            yield Answer(request, text.format(number), reason)

    monkeypatch.setattr(request_loop, "answers", answers)
    out, err = Flushes(), io.StringIO()
    options = needle_run.NeedleOptions((500,), depths=2)
    return needle_run.run("demo", options, Settings(), out, err), out, err.getvalue()


def test_scores_are_string_matches_and_every_line_is_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = _answered(monkeypatch, ["I say {}!", "12345678"], ["stop", "length"])
    assert code == 0
    assert [record["score"] for record in _records(out.getvalue().decode())] == [1, 0]
    assert [seen.count(b"\n") for seen in out.seen] == [1, 2]
    assert [line.split() for line in err.splitlines()] == [
        ["depth", "500"],
        ["0%", "100"],
        ["100%", "0"],
        ["mean", "50"],
    ]


def test_a_request_that_failed_has_no_score_and_the_exit_code_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = _answered(monkeypatch, ["", "{}"], ["error", "stop"])
    assert code == 1
    assert [(r["score"], r["finish_reason"]) for r in _records(out.getvalue().decode())] == [
        (None, "error"),
        (1, "stop"),
    ]
    assert [line.split() for line in err.splitlines()][1:] == [["0%", "failed"], ["100%", "100"], ["mean", "failed"]]
