"""The doctor's report on a machine without a GPU, and what it says of rates."""

from __future__ import annotations

import json
import re

import pytest
import torch

from longgen.cli import main
from longgen.kv.transfer import CpuTransfer
from longgen.planning import doctor
from longgen.planning.doctor import copies_finding, examine, merge_finding, pinned_finding
from longgen.planning.measure import CopyRates


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_every_line_has_a_value_and_a_meaning() -> None:
    findings = list(examine())
    names = [finding.name for finding in findings]
    expected = {"Python", "torch", "host memory", "cgroup limits", "locked memory", "disk", "GPU"}
    assert expected <= set(names)
    assert {"prefill, heads of 128", "decode, heads of 256"} <= set(names)
    assert all(finding.value and finding.meaning for finding in findings)
    assert {finding.state for finding in findings} <= {"ok", "note", "missing"}
    backend = next(finding for finding in findings if finding.name == "prefill, heads of 128")
    assert backend.value == "torch-flash-cpu"
    assert next(finding for finding in findings if finding.name == "merge").value == "torch"


@pytest.mark.usefixtures("no_gpu")
def test_the_report_is_text_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr()
    assert text.err == ""
    assert "host memory" in text.out
    assert main(["doctor", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert all(set(entry) == {"name", "state", "value", "meaning"} for entry in entries)
    assert len(text.out.splitlines()) == 2 * len(entries)


def test_a_merge_without_triton_is_pointed_out_on_a_gpu() -> None:
    absent, there = [("triton", "not importable"), ("torch", None)], [("triton", None), ("torch", None)]
    found = merge_finding(absent, torch.device("cuda"))
    assert (found.state, found.value) == ("note", "torch (not triton: not importable)")
    assert merge_finding(there, torch.device("cuda")).state == "ok"


def test_slow_copies_and_pageable_memory_are_pointed_out() -> None:
    fast = CopyRates(55.4e9, 55.0e9, 50.8e9, 50.8e9, None)
    slow = CopyRates(9e9, 9e9, 5e9, 5e9, "CUDA refused to pin 8 bytes")
    assert copies_finding(fast).state == pinned_finding(fast).state == "ok"
    assert "to the GPU 55.4 GB/s, from it 55.0, both at once 50.8 and 50.8" in copies_finding(fast).value
    assert copies_finding(slow).state == "note"
    assert pinned_finding(slow).state == "missing"
    assert "refused" in pinned_finding(slow).value


def test_copies_are_measured_through_the_transfer_that_runs_use(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[torch.device] = []

    def noted(device: torch.device) -> CpuTransfer:
        opened.append(device)
        return CpuTransfer()

    monkeypatch.setattr(doctor, "open_transfer", noted)
    pinned, copies = doctor._copies(torch.device("cpu"))
    assert opened == [torch.device("cpu")]
    assert (pinned.name, pinned.state, copies.name) == ("pinned memory", "ok", "PCIe")
    assert all(float(number) > 0 for number in re.findall(r"([0-9.]+)(?: GB/s|,| and|$)", copies.value))


@pytest.mark.cuda
def test_on_a_gpu_every_part_of_it_is_found() -> None:
    findings = {finding.name: finding for finding in examine()}
    for name in (
        "GPU",
        "GPU memory",
        "prefill, heads of 128",
        "decode, heads of 256",
        "merge",
        "pinned memory",
        "PCIe",
    ):
        assert findings[name].state != "missing", findings[name]
    assert findings["GPU"].value.startswith(torch.cuda.get_device_name())
    assert "GB/s" in findings["PCIe"].value


@pytest.mark.parametrize(
    ("version", "state"), [("5.17.0", "ok"), ("6.0", "ok"), ("5.2.1", "missing"), ("5.24.0", "ok")]
)
def test_a_transformers_that_is_too_old_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch, version: str, state: str
) -> None:
    monkeypatch.setattr(doctor, "package_version", lambda _: version)
    (finding,) = (each for each in examine() if each.name == "transformers")
    assert (finding.state, finding.value) == (state, version)


def test_a_gpu_that_fails_does_not_end_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error:\nout of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name in ("get_device_properties", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, fail)
    for name in ("default_kernels", "open_transfer"):
        monkeypatch.setattr(doctor, name, fail)
    findings = {finding.name: finding for finding in examine()}
    for name in ("GPU", "attention", "pinned memory"):
        assert findings[name].state == "missing"
        assert findings[name].value == "failed: RuntimeError: CUDA error: out of memory"


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("driver", "said"), [("unknown", "no NVIDIA driver is loaded"), ("580.65", "driver 580.65 is")]
)
def test_without_a_gpu_it_says_whether_there_is_a_driver(
    monkeypatch: pytest.MonkeyPatch, driver: str, said: str
) -> None:
    monkeypatch.setattr(doctor, "driver_version", lambda: driver)
    (finding,) = (each for each in examine() if each.name == "GPU")
    assert said in finding.value
