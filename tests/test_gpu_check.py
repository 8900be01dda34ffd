"""gpu_check.py with tiny sizes on the CPU: what it measures means nothing there, but it must run and tell."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def gpucheck(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the script's package, as the script does."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return lambda name: importlib.import_module(f"gpucheck.{name}")


def test_sections_run_and_the_last_line_is_json(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), "--small", "--device", "cpu", "--json", str(file)]
    sections = ["memory", "merge", "speed", "slots", "stress", "plan"]
    done = subprocess.run([*command, "--only", ",".join(sections)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads(file.read_text())
    assert list(result["sections"]) == sections
    assert all(section["ok"] for section in result["sections"].values())
    assert result["sections"]["stress"]["passed"] == 10
    for prompt in result["sections"]["memory"]["prompts"]:
        assert prompt["host_bytes"] == prompt["kv_bytes"]
    merged = result["sections"]["merge"]["rows"]
    assert [row["rows"] for row in merged if row["kernel"] == "torch"] == [1, 1, 16, 16, 64, 64]
    assert all(0 < row["error"] <= 1e-6 for row in merged)
    assert [row["slots"] for row in result["sections"]["slots"]["rows"]] == [1, 2, 4, 8]
    planned = result["sections"]["plan"]
    assert [(row["model"], row["tokens"]) for row in planned["rows"]] == [
        (model, tokens) for model in ("qwen3-0.6b", "qwen2.5-7b") for tokens in (256, 512, 1024)
    ]
    assert all(row["host_bytes"] == row["kv"] for row in planned["rows"])
    assert [row["begun"] for row in planned["pinning"]] == ["before", "with the plan", "with the prefill"] * 2
    assert len(planned["refusals"]) == 2 and not planned["missed"]
    speed = result["sections"]["speed"]["rows"]
    assert [(row["tokens"], row["resident_blocks"], row["code"]) for row in speed] == [
        (300, 0, "eager"),
        (300, 19, "eager"),
    ]
    assert all(row["ceilings"]["attention_tflops"] > 0 and row["decode"]["ms_per_token"] > 0 for row in speed)


def test_unknown_sections_and_missing_devices_are_refused() -> None:
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), "--only"]
    done = subprocess.run([*command, "speed,sped"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "sped" in done.stderr
    if not torch.cuda.is_available():
        done = subprocess.run([*command, "speed"], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and "torch sees 0 CUDA devices" in done.stderr


def test_a_report_of_tests_is_read(gpucheck: Any, tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="good"/>'
        '<testcase classname="a" name="bad"><failure message="assert 1 == 2&#10;more"/></testcase>'
        '<testcase classname="a" name="broken"><error message="boom"/></testcase>'
        '<testcase classname="a" name="left"><skipped message="no tool"/></testcase></testsuite></testsuites>'
    )
    data = gpucheck("suite").read_report(report)
    assert (data["passed"], data["failed"], data["skipped"]) == (1, 2, 1)
    assert data["failures"] == [
        {"test": "a.bad", "message": "assert 1 == 2"},
        {"test": "a.broken", "message": "boom"},
    ]
    assert data["skip_reasons"] == {"no tool": 1}


def test_bytes_of_a_merge_are_counted(gpucheck: Any) -> None:
    """Nine parts: three at once, then two more each time, the last two with the output."""
    merge = gpucheck("merge")

    class Three:
        name, most_parts = "three", 3

    assert merge.step_bytes(Three()) == 8 + 2 * 2
    assert merge.all_bytes(Three()) == (3 * 2 + 4) + 12 + 12 + (4 + 2 * 2 + 2)
    assert merge.all_bytes(merge.TorchMerge()) == 6 + 8 * 26 + 6


def test_the_case_for_the_memory_checker_agrees_with_the_reference() -> None:
    command = [sys.executable, str(SCRIPTS / "gpucheck" / "sanitizer_case.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "agrees with the reference" in done.stdout, done.stdout + done.stderr


def test_plans_that_are_wrong_miss_their_bars(gpucheck: Any) -> None:
    plan, gib = gpucheck("plan"), 1 << 30
    good = {
        "model": "m",
        "tokens": 65_536,
        "cap": 24 * gib,
        "planned": 23 * gib,
        "used": 23 * gib + (200 << 20),
        "kv": 10 * gib,
        "host_rss": 10 * gib + (100 << 20),
        "prefill_s": 10.0,
        "predicted_s": 12.0,
        "first_s": 8.0,
        "decode_rate": 10.0,
        "predicted_rate": 8.0,
        "first_rate": 12.0,
    }
    pinned = {"tokens": 65_536, "begun": "with the plan", "which": "short", "slower": 0.08}

    def missed(**changes: Any) -> list[str]:
        return list(plan._missed([good, good | {"tokens": 524_288} | changes], [pinned]))

    assert missed() == []
    for change, word in (
        ({"used": 22 * gib}, "planned"),
        ({"used": 24 * gib + 1}, "over the cap"),
        ({"used": 23 * gib + (200 << 20) - gib // 3}, "from length to length"),
        ({"host_rss": 10 * gib + (300 << 20)}, "of KV"),
        ({"host_rss": 9 * gib}, "of KV"),
        ({"predicted_s": 13.0}, "prefill_s"),
        ({"first_s": 7.0}, "first_s"),
        ({"predicted_rate": 7.0}, "decode_rate"),
        ({"first_rate": 13.0}, "first_rate"),
    ):
        assert any(word in line for line in missed(**change)), change
    assert list(plan._missed([good], [pinned | {"slower": 0.11}]))
    assert list(plan._missed([good], [pinned | {"which": "long"}]))
    assert not list(plan._missed([good], [pinned | {"begun": "with the prefill", "slower": 0.5}]))


def test_works_slower_than_their_bars_miss_them(gpucheck: Any) -> None:
    """Prefill's bar is kept by one of the ways to run a work, decoding's by eager code."""
    speed = gpucheck("speed")

    def row(code: str, prefill: float, decode: float | None) -> dict[str, Any]:
        measured = {"prefill": {"times_roofline": prefill}, "decode": {"of_wire": decode}}
        return {"work": "w", "code": code, "prefill_bar": 1.15, "decode_bar": decode and 0.97} | measured

    def missed(*rows: dict[str, Any]) -> list[str]:
        return list(speed._missed(rows))

    fast, slow = row("eager", 1.14, 0.98), row("eager", 1.16, 0.98)
    assert missed(fast) == missed(slow, row("compiled", 1.14, 0.96)) == missed(row("eager", 1.15, None)) == []
    assert missed(slow, row("compiled", 1.17, 0.98)) == ["w: prefill at 1.160 times its roofline, over 1.15"]
    assert missed(row("eager", 1.1, 0.96)) == ["w: decoding at 96.0% of copies, under 97%"]
    failed = row("compiled", 1.1, 0.98) | {"prefill": None, "decode": None, "failed": 1}
    assert missed(fast, failed) == ["w, compiled: exit code 1"]


def test_a_work_that_cannot_run_has_a_row_without_figures(gpucheck: Any) -> None:
    report, speed = gpucheck("report"), gpucheck("speed")
    row = speed._row(speed._work("--shape nothing"), False, report.Settings(torch.device("cpu"), small=True))
    assert row["failed"] == 2 and row["prefill"] is row["decode"] is row["ceilings"] is None
    assert list(speed._missed([row])) == ["--shape nothing, eager: exit code 2"]
