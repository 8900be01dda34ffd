"""RULER's scripts as they are run: data made, answered, scored and compared, on the CPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ruler.solving import solve_niah

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
FIELDS = [
    "index",
    "input",
    "outputs",
    "length",
    "length_w_model_temp",
    "answer_prefix",
    "max_new_tokens",
    "task",
    "haystack",
]


def _script(*command: str | Path, timeout: int = 1800) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHON": sys.executable}
    line = [str(part) for part in command]
    return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=timeout, check=False)


def _make(out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return _script(sys.executable, SCRIPTS / "make_ruler.py", "--model", "demo", "--out", out, *flags)


def _records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def _write(file: Path, records: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")


def test_data_of_all_tasks_is_made_and_what_does_not_fit_is_named(tmp_path: Path) -> None:
    done = _make(tmp_path, "--lengths", "1K,2K", "--samples", "2")
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout.splitlines()[-1])
    assert list(written) == ["1024", "2048"] and "niah_single_2" not in written["2048"] and len(written["2048"]) == 10
    assert written["1024"].keys() < written["2048"].keys()
    assert "1,024 cwe: left out: 1,024 tokens are too few for cwe" in done.stderr
    for length, tasks in written.items():
        assert {file.stem for file in (tmp_path / length).iterdir()} == set(tasks)
        for name in tasks:
            records = _records(tmp_path / length / f"{name}.jsonl")
            assert [record["index"] for record in records] == [0, 1]
            assert all(list(record) == FIELDS and record["length"] <= int(length) for record in records)


def test_an_essay_makes_the_haystack_of_the_tasks_that_want_one(tmp_path: Path) -> None:
    essay = tmp_path / "essay.txt"
    essay.write_text("It was a long winter. The river froze twice.\n\nNobody came to the mill. " * 9, "utf-8")
    done = _make(tmp_path, "--lengths", "2K", "--samples", "1", "--tasks", "niah_single_2", "--essay", str(essay))
    assert done.returncode == 0, done.stderr
    (record,) = _records(tmp_path / "2048" / "niah_single_2.jsonl")
    assert record["haystack"] == "essay" and record["input"].count("The river froze twice.") > 10
    assert solve_niah(record["input"]) == set(record["outputs"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lengths", "4K", "--tasks", "qa_1"], "there is no task 'qa_1'"),
        (["--lengths", "512", "--tasks", "vt"], "512 tokens are too few for vt"),
        (["--lengths", "4K", "--essay", "nowhere.txt"], "the essay nowhere.txt cannot be read"),
        (["--lengths", "4 thousand"], "'4 thousand' is not a length"),
        (["--lengths", "4K", "--samples", "0"], "--samples is 0"),
    ],
)
def test_what_is_wrong_with_the_data_is_one_line(tmp_path: Path, flags: list[str], message: str) -> None:
    done = _make(tmp_path, *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr.splitlines()[-1]


def test_scores_are_ruler_s(tmp_path: Path) -> None:
    _write(
        tmp_path / "4096" / "vt.jsonl",
        [
            {"index": 0, "outputs": ["ABCDE", "FGHIJ"], "pred": " abcde, XXXXX", "finish_reason": "stop"},
            {"index": 1, "outputs": ["ABCDE", "FGHIJ"], "pred": "FGHIJ ABCDE", "finish_reason": "length"},
        ],
    )
    _write(tmp_path / "8192" / "vt.jsonl", [{"outputs": ["ABCDE"], "pred": "ABCD"}])
    _write(tmp_path / "8192" / "niah_single_1.jsonl", [{"outputs": ["1234567"], "pred": " 1234567."}])
    _write(tmp_path / "8192" / "qa_1.jsonl", [{"outputs": ["Paris", "the capital"], "pred": "paris"}])
    done = _script(sys.executable, SCRIPTS / "score_ruler.py", tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    scores = {
        task: {length: cell["score"] for length, cell in cells.items()} for task, cells in report["tasks"].items()
    }
    assert scores == {"niah_single_1": {"8192": 100}, "vt": {"4096": 75, "8192": 0}, "qa_1": {"8192": 100}}
    assert report["average"] == {"4096": 75, "8192": 66.67}
    assert [line.split() for line in done.stderr.splitlines()] == [
        ["task", "4,096", "8,192"],
        ["niah_single_1", "-", "100.0"],
        ["vt", "75.0", "0.0"],
        ["qa_1", "-", "100.0"],
        ["average", "75.0", "66.7"],
    ]


def test_answers_that_failed_count_as_wrong_and_the_exit_code_says_so(tmp_path: Path) -> None:
    right: dict[str, Any] = {"outputs": ["1234567"], "pred": "1234567"}
    failed = [{**right, "finish_reason": "error"}, {**right, "pred": None}]
    _write(tmp_path / "4096" / "niah_single_1.jsonl", [right, right, *failed])
    done = _script(sys.executable, SCRIPTS / "score_ruler.py", tmp_path)
    assert done.returncode == 1 and "2 answers failed" in done.stderr
    cell = json.loads(done.stdout)["tasks"]["niah_single_1"]["4096"]
    assert cell == {"score": 50, "samples": 4, "failed": 2}


@pytest.mark.parametrize("text", [None, "", "no JSON\n", '{"pred": "1"}\n', "[1]\n"])
def test_what_is_no_result_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "4096").mkdir()
        (tmp_path / "4096" / "vt.jsonl").write_text(text)
    done = _script(sys.executable, SCRIPTS / "score_ruler.py", tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


def test_longgen_and_transformers_answer_alike(tmp_path: Path) -> None:
    assert _make(tmp_path, "--lengths", "2K", "--samples", "1", "--tasks", "niah_single_1,vt").returncode == 0
    flags = ("--device", "cpu", "--block-size", "64", "--chunk-size", "256", "--new-tokens", "12")
    done = _script(sys.executable, SCRIPTS / "compare_ruler.py", "demo", tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["equal"] and [row["task"] for row in report["rows"]] == ["niah_single_1", "vt"]
    for row in report["rows"]:
        assert row["equal"] and row["prompt_ids_equal"] and row["comparison"]["logit_difference"] < 1e-2
        assert row["score"] == row["transformers_score"]
    assert report["rows"][0]["score"] == 1


def _batches_are_there() -> bool:
    done = _script(sys.executable, "-m", "longgen", "run", "--help")
    return "--output" in done.stdout


def test_the_shell_script_makes_answers_and_scores_the_whole_table(tmp_path: Path) -> None:
    if not _batches_are_there():
        pytest.skip("longgen run has no --output yet")
    flags = ("--samples", "2", "--tasks", "niah_multiquery", "--out", tmp_path, "--device", "cpu", "--raw")
    command = (SCRIPTS / "run_ruler.sh", "demo", "1.8k,2K", *flags)
    done = _script(*command)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert list(report["average"]) == ["1800", "2048"] and report["failed"] == 0
    for length, cell in report["tasks"]["niah_multiquery"].items():
        data = _records(tmp_path / "data" / length / "niah_multiquery.jsonl")
        results = _records(tmp_path / "results" / length / "niah_multiquery.jsonl")
        assert [result["outputs"] for result in results] == [record["outputs"] for record in data]
        assert [result["settings"]["max_new_tokens"] for result in results] == [128, 128]
        prompts = [record["length"] - 128 for record in data]
        assert [result["prompt_tokens"] for result in results] == prompts
        pairs = list(zip(results, data, strict=True))
        found = [sum(output in result["pred"] for output in solve_niah(record["input"])) for result, record in pairs]
        assert cell == {"score": round(100 * sum(found) / 8, 2), "samples": 2, "failed": 0}
    again = _script(*command)
    assert (again.returncode, again.stdout) == (0, done.stdout)
    fewer = _script(SCRIPTS / "run_ruler.sh", "demo", "2K", "--samples", "1", *flags[2:])
    cells = json.loads(fewer.stdout.splitlines()[-1])["tasks"]["niah_multiquery"]
    assert fewer.returncode == 0 and {length: cell["samples"] for length, cell in cells.items()} == {"2048": 1}
    shutil.copytree(ROOT / "longgen" / "data" / "demo", tmp_path / "other")
    other = _script(SCRIPTS / "run_ruler.sh", tmp_path / "other", "2K", *flags)
    assert (other.returncode, other.stdout) == (2, "")
    assert "has an answer of the model demo, and this run is of" in other.stderr
    assert len(_records(tmp_path / "data" / "2048" / "niah_multiquery.jsonl")) == 1  # data is left alone too


def test_only_what_was_made_is_scored_and_has_to_be_there(tmp_path: Path) -> None:
    right = {"outputs": ["1234567"], "pred": "1234567"}
    _write(tmp_path / "4096" / "vt.jsonl", [{**right, "index": 0}, {**right, "index": 1, "pred": "no"}])
    _write(tmp_path / "8192" / "vt.jsonl", [{**right, "index": 0}])
    score = (sys.executable, SCRIPTS / "score_ruler.py", tmp_path, "--made")
    done = _script(*score, json.dumps({"4096": {"vt": 1}}))
    assert json.loads(done.stdout)["tasks"] == {"vt": {"4096": {"score": 100, "samples": 1, "failed": 0}}}
    for made, message in (({"4096": {"vt": 3}}, "answers to 2 of 3 samples"), ({"1": {"vt": 1}}, "cannot be read")):
        done = _script(*score, json.dumps(made))
        assert (done.returncode, done.stdout) == (2, "") and message in done.stderr


def test_the_shell_script_explains_itself(tmp_path: Path) -> None:
    done = _script(SCRIPTS / "run_ruler.sh", "--help")
    assert done.returncode == 0 and "MODEL LENGTHS" in done.stdout
    done = _script(SCRIPTS / "run_ruler.sh", "demo")
    assert (done.returncode, done.stdout) == (2, "") and "MODEL LENGTHS" in done.stderr
    done = _script(SCRIPTS / "run_ruler.sh", "demo", "4K", "--out")
    assert done.returncode == 2 and "--out needs a value" in done.stderr
    done = _script(SCRIPTS / "run_ruler.sh", "demo", "512", "--tasks", "vt", "--out", tmp_path)
    assert done.returncode == 2 and "too few for vt" in done.stderr
