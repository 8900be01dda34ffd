"""The scripts that measure beside `longgen bench`, small and on the CPU: the same code path, meaningless figures."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarking.test_command import DENSE

SCRIPTS = Path(__file__).parents[1] / "scripts"


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(SCRIPTS / name), *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_transformers_beside_longgen(tmp_path: Path) -> None:
    shape = tmp_path / "shape.yaml"
    shape.write_text(DENSE, encoding="utf-8")
    sizes = ("--tokens", "200", "--block-size", "16", "--repeats", "1", "--steps", "2")
    done = run_script("bench_peers.py", "--shape", str(shape), "--device", "cpu", *sizes)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    rows = {(row["engine"], row["cache"]): row for row in result["rows"]}
    ours = [rows["longgen", cache] for cache in ("none", "all")]
    peer = rows["transformers", "dynamic"]
    assert all(row["prefill_s"] > 0 and row["decode_ms"] > 0 and row["refused"] is None for row in (*ours, peer))
    assert "this run is on the CPU" in rows["transformers", "offloaded"]["refused"]
    for name in ("prefill_s", "decode_ms"):
        assert result["ratios"]["dynamic"][name] == pytest.approx(peer[name] / ours[1][name])
        assert result["ratios"]["offloaded"][name] is None
    assert "offloaded" in done.stderr


@pytest.mark.parametrize("name", ["bench_peers.py", "bench_cold_start.py"])
def test_devices_that_are_not_there_are_one_line(name: str) -> None:
    done = run_script(name, "--device", "cuda:99")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert "device cuda:99 is not there" in done.stderr


@pytest.mark.slow
def test_a_cold_start_is_timed_beside_its_imports() -> None:
    done = run_script("bench_cold_start.py", "--device", "cpu", "--repeats", "1", "--max-new-tokens", "2")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["phases"]) == {"import", "prompt", "plan", "load", "prefill", "decode"}
    assert sum(result["phases"].values()) < result["run_s"]
    assert result["ratio"] == pytest.approx(result["run_s"] / result["imports_and_weights_s"])
    assert {kind: len(times) for kind, times in result["runs"].items()} == dict.fromkeys(result["runs"], 1)


def test_medians_of_several_cold_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script: Any = importlib.import_module("bench_cold_start")
    times = {kind: [(n + i, 2.0 * n) for n in (3.0, 1.0, 2.0)] for i, kind in enumerate(script.KINDS)}
    phases = [{"import": n} for n in (5.0, 7.0, 6.0)]
    summary = script._summary(times, phases, script._parse(["--repeats", "3"]))
    assert (summary["imports_s"], summary["imports_and_weights_s"], summary["run_s"]) == (2.0, 3.0, 4.0)
    assert summary["ratio"] == 4 / 3 and summary["cpu_ratio"] == 1 and summary["phases"] == {"import": 6.0}
    said = 'longgen: x\nlonggen: stats {"run": {}}\nlonggen: stats {"phases": {"import": 1.5}}\n'
    assert script._phases(said) == {"import": 1.5}
