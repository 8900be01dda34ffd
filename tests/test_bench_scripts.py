"""The scripts that measure beside `longgen bench`, small and on the CPU: the same code path, meaningless figures."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from longgen.model.from_shape import random_provider
from tests.benchmarking.test_command import DENSE
from tests.benchmarking.test_rows import SHAPE

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
    assert all(row["pin_s"] > 0 for row in ours) and peer["pin_s"] is None
    assert "this run is on the CPU" in rows["transformers", "offloaded"]["refused"]
    for name in ("prefill_s", "decode_ms"):
        assert result["ratios"]["dynamic"][name] == pytest.approx(peer[name] / ours[1][name])
        assert result["ratios"]["offloaded"][name] is None
    with_pinning = peer["prefill_s"] / (ours[1]["prefill_s"] + ours[1]["pin_s"])
    assert result["ratios"]["dynamic"]["prefill_and_pin"] == pytest.approx(with_pinning)
    assert result["ratios"]["offloaded"]["prefill_and_pin"] is None
    assert "offloaded" in done.stderr


@pytest.mark.parametrize("name", ["bench_peers.py", "bench_cold_start.py"])
def test_devices_that_are_not_there_are_one_line(name: str) -> None:
    done = run_script(name, "--device", "cuda:99")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert "device cuda:99 is not there" in done.stderr


@pytest.mark.parametrize(
    ("name", "option"),
    [("bench_peers.py", "--repeats"), ("bench_peers.py", "--steps"), ("bench_cold_start.py", "--repeats")],
)
def test_nothing_to_measure_is_one_line(name: str, option: str) -> None:
    done = run_script(name, "--device", "cpu", option, "0")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert option in done.stderr and "must be 1 or more" in done.stderr


def test_transformers_model_has_the_weights_of_ours_and_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script: Any = importlib.import_module("bench_peers")
    device = torch.device("cpu")
    provider = random_provider(SHAPE, device)
    peer = script._peer_model(provider, SHAPE, device)
    places = [{name: weight.data_ptr() for name, weight in m.state_dict().items()} for m in (provider.model, peer)]
    assert places[0] == places[1] and "lm_head.weight" in places[0]
    assert not any(weight.requires_grad for weight in peer.parameters())


@pytest.mark.slow
def test_a_cold_start_is_timed_beside_its_imports() -> None:
    done = run_script("bench_cold_start.py", "--device", "cpu", "--repeats", "1", "--max-new-tokens", "2")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["phases"]) == {"import", "prompt", "plan", "load", "prefill", "decode"}
    assert sum(result["phases"].values()) < result["run_s"]
    assert result["ratio"] == pytest.approx(result["run_s"] / result["imports_and_weights_s"])
    assert 0 < result["weights_s"] < result["imports_and_weights_s"]  # a part of what such a process does
    assert result["bare_ratio"] == pytest.approx(result["run_s"] / (result["imports_s"] + result["weights_s"]))
    assert {kind: len(times) for kind, times in result["runs"].items()} == dict.fromkeys(result["runs"], 1)


def test_medians_of_several_cold_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script: Any = importlib.import_module("bench_cold_start")
    times = {kind: [(n + i, 2.0 * n) for n in (3.0, 1.0, 2.0)] for i, kind in enumerate(script.KINDS)}
    phases = [{"import": n} for n in (5.0, 7.0, 6.0)]
    summary = script._summary(times, [0.25, 0.5, 4.0], phases, script._parse(["--repeats", "3"]))
    assert (summary["imports_s"], summary["imports_and_weights_s"], summary["run_s"]) == (2.0, 3.0, 4.0)
    assert (summary["weights_s"], summary["bare_ratio"]) == (0.5, 4 / 2.5)
    assert summary["ratio"] == 4 / 3 and summary["cpu_ratio"] == 1 and summary["phases"] == {"import": 6.0}
    said = 'longgen: x\nlonggen: stats {"run": {}}\nlonggen: stats {"phases": {"import": 1.5}}\n'
    assert script._phases(said) == {"import": 1.5}
