"""`longgen plan`, and the plan that `longgen run` makes and keeps to, as a user sees them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longgen.cli import main
from longgen.engine import Engine
from longgen.errors import CapacityError, UsageError
from longgen.kv.budget import MEMORY_GROWTH, DeviceBudget, total_memory
from longgen.kv.memory_plan import PlanOptions
from longgen.kv.plan import Planner
from longgen.kv.predict import Rates, reference_rates
from longgen.model_shape import ModelShape
from longgen.planning import machine as machines
from longgen.planning.machine import (
    Limits,
    device_rates,
    hold_to,
    parse_tflops,
    rated_planner,
    run_machine,
    this_machine,
)
from longgen.planning.plans import find_shape, summary
from longgen.run.jobs import JobMaker
from tests.checkpoints import Build
from tests.plan.machines import GIB, machine
from tests.plan.shapes import SMALL
from tests.plan.shapes import machine as sized


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


BIG = ("--gpu-memory", "24GiB", "--cpu-memory", "100GiB")


def test_a_plan_for_several_lengths_is_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "qwen", "--max-len", "4M,1M", *BIG]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[0].startswith("qwen3.5-2b: 1.88B weights in bfloat16, 24 layers, 12 KiB of KV a token")
    assert lines[1:3] == [
        "GPU memory: 24 GiB usable (--gpu-memory 24 GiB)",
        "host memory: 100 GiB usable (--cpu-memory 100 GiB; 0 B in reserve)",
    ]
    rows = {line.split("  ")[0].strip(): line for line in lines if "  " in line}
    assert rows["tokens"].split()[1:] == ["4M", "1M"]
    assert any(line.startswith("prefill ") for line in lines)
    assert lines[-2].startswith("4M: chunk ")


# As on a machine without the driver, whatever this one has.
PLAN_WITHOUT_A_DRIVER = """
import ctypes, sys
usual = ctypes.CDLL
def loaded(name, *rest, **more):
    if name == "libcuda.so.1":
        raise OSError(name)
    return usual(name, *rest, **more)
ctypes.CDLL = loaded
from longgen.cli import main
code = main(sys.argv[1:])
sys.exit(code or 10 * bool({"torch", "transformers"} & set(sys.modules)))
"""


@pytest.mark.parametrize("options", [[], ["--model", "qwen"], ["--model", "qwen", "--max-len", "1M", *BIG]])
def test_a_plan_without_a_gpu_imports_no_torch(options: list[str]) -> None:
    command = [sys.executable, "-c", PLAN_WITHOUT_A_DRIVER, "plan", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "qwen" in done.stdout


def test_a_gpu_that_torch_does_not_see_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: None)
    assert not machines._has_cuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert machines._has_cuda()


def test_a_plan_as_json_holds_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "qwen", "--max-len", "4M", "--json", *BIG]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["kv_bytes_per_token"] == 12288
    assert entry["tokens"] == 4 << 20
    held = entry["host_bytes"]["kv"] + entry["device_bytes"]["store"]["resident"]
    assert held == 48 * GIB
    assert entry["device_bytes"]["total"] <= entry["device_usable_bytes"] == 24 * GIB
    assert entry["prediction"]["decode_bound"] == "loading KV from host memory"


def test_a_length_that_does_not_fit_is_refused_and_the_others_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "qwen3-8b", "--max-len", "128K,16M", *BIG]) == 1
    captured = capsys.readouterr()
    assert "128K" in captured.out
    assert captured.err.startswith("longgen: error: qwen3-8b with 16,777,216 tokens needs ")
    assert captured.err.count("\n") == 1
    assert main(["plan", "--model", "qwen3-8b", "--max-len", "128K,16M", "--json", *BIG]) == 1
    entries = json.loads(capsys.readouterr().out)
    assert "refused" in entries[1]


def test_rates_that_are_given_change_the_times(capsys: pytest.CaptureFixture[str]) -> None:
    def decode(*flags: str) -> float:
        assert main(["plan", "--model", "qwen3-8b", "--max-len", "512K", "--json", *BIG, *flags]) == 0
        return json.loads(capsys.readouterr().out)[0]["prediction"]["decode_rate"]

    assert decode("--h2d-gbps", "25") == pytest.approx(decode() * 25 / 55.4, rel=0.02)


def test_without_a_gpu_or_a_cap_the_device_is_not_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "qwen3-235b-a22b-2507", "--max-len", "8K", "--cpu-memory", "900GiB"]) == 0
    assert "not checked: no GPU here and no --gpu-memory" in capsys.readouterr().out


def test_without_a_model_every_known_one_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *BIG]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("qwen3.5-2b qwen") and line.split()[-1][0].isdigit() for line in lines)
    assert any(line.startswith("qwen3-32b") and line.endswith("does not fit") for line in lines)
    assert main(["plan", "--json", *BIG]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(row["device_usable_bytes"], row["host_usable_bytes"] <= 100 * GIB) for row in rows} == {(24 * GIB, True)}
    longest = next(row["longest"] for row in rows if row["name"] == "qwen3-8b")
    shape = find_shape("qwen3-8b")
    limits = Limits(24 * GIB, 100 * GIB)
    planner = Planner(shape, this_machine(limits, 128), PlanOptions())
    assert planner.plan(longest - 256, 256).tokens == longest


def test_of_every_known_model_the_type_of_the_weights_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    def rows(*flags: str) -> list[dict[str, Any]]:
        assert main(["plan", "--json", *BIG, *flags]) == 0
        return list(json.loads(capsys.readouterr().out))

    own, wide = rows(), rows("--dtype", "float32")
    for name in ("weight_bytes", "kv_bytes_per_token"):
        assert [row[name] for row in wide] == [2 * row[name] for row in own]
    assert all(row["longest"] < other["longest"] for row, other in zip(wide, own, strict=True) if other["longest"])


def test_a_length_has_room_for_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--model", "qwen3-0.6b", *BIG, "--max-new-tokens", "1000", "--max-len"]
    assert main([*command, "4K,1000"]) == 2
    said = capsys.readouterr()
    wrong = "--max-len 1,000 has no room for a prompt beside --max-new-tokens 1,000; raise the one or lower the other"
    assert (said.out, said.err) == ("", f"longgen: error: {wrong}\n")
    assert main([*command, "1001"]) == 0


def test_more_host_memory_than_the_machine_could_grow_to_is_refused() -> None:
    there = total_memory()
    assert there is not None
    with pytest.raises(
        CapacityError, match=r"--cpu-memory .* is more than 16 times the .* that this machine has; lower"
    ):
        run_machine(Limits(cpu_memory=MEMORY_GROWTH * there + 1), torch.device("cpu"))
    assert run_machine(Limits(cpu_memory=MEMORY_GROWTH * there), torch.device("cpu")).host is not None


def test_a_length_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--max-len", "4M"]) == 2
    assert capsys.readouterr().err.startswith("longgen: error: --max-len needs a --model; ")


def test_slots_share_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """What each of four can hold is what one plan of four says fits, and no more."""
    flags = ["plan", "--model", "qwen3-8b", "--max-len", "64K", "--slots"]
    assert main([*flags, "4", *BIG]) == 0
    table = capsys.readouterr().out.splitlines()
    assert "slots of so many tokens 4" in [" ".join(line.split()) for line in table]
    assert main([*flags, "4", "--json", *BIG]) == 0
    (four,) = json.loads(capsys.readouterr().out)
    assert main([*flags, "1", "--json", *BIG]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["slots"], four["slots"], four["sizes"]["slots"]) == (1, 4, 4)
    assert four["longest_of_each"] < one["longest_of_each"]
    assert table[-1] == f"4 slots: each can hold up to {four['longest_of_each']:,} tokens"
    for more, code in ((0, 0), (1, 1)):
        longest = str(four["longest_of_each"] + more)
        assert main(["plan", "--model", "qwen3-8b", "--max-len", longest, "--slots", "4", *BIG]) == code
    capsys.readouterr()
    assert main([*flags, "1000000", *BIG]) == 1
    assert "slots: each" not in capsys.readouterr().out
    assert main([*flags, "0", *BIG]) == 2


def test_a_folder_is_planned_from_its_config_alone(
    build: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(build("qwen3_5_moe") / "config.json", tmp_path)
    assert main(["plan", "--model", str(tmp_path), "--json", "--max-len", "64K"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4


def test_warnings_of_a_config_stay_off_standard_error(build: Build, tmp_path: Path) -> None:
    """Outside this process, whose logging other tests may have changed. transformers warns of such a padding id."""
    config = json.loads((build("qwen3") / "config.json").read_text()) | {"pad_token_id": 99_999}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "longgen", "plan", "--model", str(tmp_path), "--max-len", "64K"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert ": 0.13M weights in float32, 3 layers" in done.stdout


def test_of_a_hub_id_only_the_config_is_fetched(build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def download(repo_id: str, **options: Any) -> str:
        asked.append((repo_id, options["filename"]))
        return str(build("qwen3") / "config.json")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert find_shape("someone/some-checkpoint").hidden == 64
    assert asked == [("someone/some-checkpoint", "config.json")]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--gpu-memory", "24"), "gpu_memory: '24' is not an amount of memory; write one such as 24GiB"),
        (("--gpu-memory", "0.5"), "--gpu-memory 0.5 is a fraction of a GPU, and there is none here"),
        (("--cpu-memory", "0.5"), "cpu_memory: '0.5' is not an amount of memory"),
        (("--max-len", "4M,1.5K"), "max_len: '1.5K' is not a length"),
        (("--max-len", ""), "max_len: '' is not a length"),
        (("--chunk-size", "1000"), "chunk size 1000 is not a multiple of the block size 1024"),
        (("--tflops", "fast"), "--tflops 'fast' must be one or two numbers above 0"),
        (("--h2d-gbps", "0"), "--h2d-gbps '0' must be a number above 0"),
        (("--h2d-gbps", "fast"), "--h2d-gbps 'fast' must be a number above 0, such as 55.4"),
        (("--h2d-gbps", "25,50"), "--h2d-gbps '25,50' must be a number above 0"),
        (("--tflops", "692,"), "--tflops '692,' must be one or two numbers above 0"),
        (("--model", "nowhere.yaml"), "the model shape nowhere.yaml cannot be read"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    assert main(["plan", "--model", "qwen", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("longgen: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_tflops_of_attention_and_of_products() -> None:
    assert parse_tflops(None) == (None, None)
    assert parse_tflops("165") == (165e12, None)
    assert parse_tflops("692,790") == (692e12, 790e12)
    with pytest.raises(UsageError):
        parse_tflops("1,2,3")


def test_the_machine_is_read_from_its_files(tmp_path: Path) -> None:
    found = this_machine(Limits(gpu_memory=8 * GIB), 128, machine(tmp_path, available=50 * GIB), cuda=False)
    assert found.host is not None
    assert found.device is not None
    assert (found.host.usable, found.device.usable) == (48 * GIB, 8 * GIB)


def test_a_gpu_cap_on_the_cpu_is_refused() -> None:
    with pytest.raises(UsageError, match="limits a GPU, and this run is on the CPU"):
        run_machine(Limits(gpu_memory=1 << 30), torch.device("cpu"))


@pytest.mark.parametrize("asked", [24 * GIB, None])
def test_a_cap_holds_from_when_the_card_is_first_asked_for_memory(
    monkeypatch: pytest.MonkeyPatch, asked: int | None
) -> None:
    """Of a card of 100 GiB: what is left of the cap for torch's own memory, before and after the rest is measured."""
    shares: list[float] = []
    budget = DeviceBudget(asked or 100 * GIB, 100 * GIB, "a card")
    monkeypatch.setattr(machines, "device_budget", lambda *_: budget)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share))
    device = torch.device("cuda", 0)
    assert run_machine(Limits(gpu_memory=asked), device).device is budget
    plan = Planner(SMALL, replace(sized(24), device=budget)).plan(1000, 10)
    measured = replace(plan, device=replace(plan.device, runtime=2 * GIB))
    hold_to(measured, asked, device)
    hold_to(plan, asked, device)
    assert shares == ([(24 - 0.75) / 100, (24 - 2) / 100, (24 - 0.75) / 100] if asked else [])


@pytest.mark.parametrize(("gpu", "prompt", "measures"), [(24, 1000, False), (24, 100_000, True), (2.5, 1000, True)])
def test_rates_are_measured_only_where_they_can_change_the_plan(
    monkeypatch: pytest.MonkeyPatch, gpu: float, prompt: int, measures: bool
) -> None:
    measured = replace(reference_rates(128), source="measured here")
    unrated = Planner(SMALL, replace(sized(gpu), rates=None))

    def rates(device: torch.device, shape: ModelShape, host_bytes: int) -> Rates:
        assert host_bytes == unrated.plan(prompt, 10).host.kv
        return measured

    monkeypatch.setattr(machines, "device_rates", rates)
    plan = rated_planner(unrated, prompt, 10, torch.device("cuda")).plan(prompt, 10)
    assert plan.machine.rates == (measured if measures else None)
    assert plan.roomy == (not measures) and plan.sizes == Planner(SMALL, sized(gpu)).plan(prompt, 10).sizes
    assert ("no rates are measured" in summary(plan)[2]) == (not measures)
    assert rated_planner(unrated, 100_000, 10, torch.device("cpu")) is unrated


# The plan of a run.

TEXT = "The quick brown fox jumps over the lazy dog, and then the other dogs think.\n" * 8


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("output", [(), ("--output-format", "jsonl")])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--gpu-memory", "8GiB"), "gpu_memory limits a GPU, and this run is on the CPU"),
        (("--device", "cuda:77"), "cuda:77"),
    ],
)
def test_a_wrong_limit_or_device_is_refused_before_prompts_are_encoded(
    build: Build,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    message: str,
    output: tuple[str, ...],
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("x" * 400, encoding="utf-8")
    made = _noting(monkeypatch, JobMaker, "make")
    assert main([*_run(build("qwen3"), prompt, *output), *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err.splitlines()[-1] and not made and not captured.out


def _run(folder: Path, prompt: Path, *flags: str) -> list[str]:
    fixed = ("--device", "cpu", "--dtype", "float32", "--max-new-tokens", "2", "--raw", "--block-size", "16")
    return ["run", "--model", str(folder), "--prompt", str(prompt), *fixed, *flags]


def _noting(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[Any]:
    """What a method returns from now on, call by call."""
    returned: list[Any] = []
    original = getattr(owner, name)

    def note(*args: Any, **named: Any) -> Any:
        returned.append(original(*args, **named))
        return returned[-1]

    monkeypatch.setattr(owner, name, note)
    return returned


def test_a_run_says_its_plan_in_three_lines_and_keeps_to_it(
    build: Build, prompt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = _noting(monkeypatch, Engine, "load")
    plans = _noting(monkeypatch, Planner, "plan")
    folder = build("qwen3")
    assert main(_run(folder, prompt, "--chunk-size", "64", "--resident-blocks", "2")) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines[1:4]] == ["memory", "host", "chunk"]
    assert lines[3].startswith("longgen: chunk 64, ring ")
    (engine,), (plan,) = engines, plans
    assert engine.store.sizes == plan.sizes
    assert engine.store.sizes.resident_blocks == 2
    assert engine.store.layout.shape == plan.kv
    assert sum(p.nbytes for p in engine.provider.model.parameters()) == plan.device.weights


def test_a_run_that_does_not_fit_is_refused_before_weights_load(
    build: Build, prompt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "load", lambda *_, **__: pytest.fail("the engine was loaded"))
    assert main(_run(build("qwen3"), prompt, "--cpu-memory", "100MiB")) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith("longgen: error: ")
    assert "--cpu-memory 100 MiB" in captured.err


def test_a_broken_checkpoint_is_refused_before_anything_is_tokenised(
    build: Build, prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(build("qwen3"), tmp_path / "broken")
    (folder / "model.safetensors").write_bytes(b"")
    assert main(_run(folder, prompt)) == 2
    captured = capsys.readouterr()
    assert captured.err == f"longgen: error: {folder / 'model.safetensors'} is empty; get it again\n"


def test_weights_that_do_not_fit_the_config_are_refused_before_a_plan_is_made_of_it(
    build: Build, prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(build("qwen3"), tmp_path / "broken")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5, "layer_types": None}))
    monkeypatch.setattr("longgen.model.checkpoint._from_pretrained", lambda *_: pytest.fail("weights were loaded"))
    assert main(_run(folder, prompt)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("longgen: error: missing 22 weights that config.json calls for in")


def test_the_longest_of_several_prompts_is_planned(
    build: Build, prompt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("dogs")
    asked = []

    def refuse(self: Planner, count: int, new_tokens: int) -> None:
        asked.append((count, new_tokens))
        raise CapacityError("enough seen")

    monkeypatch.setattr(Planner, "plan", refuse)
    assert main(_run(build("qwen3"), short, "--prompt", str(prompt))) == 1
    assert asked[0][0] > 100
    assert asked[0][1] == 2


def test_a_card_without_room_to_measure_takes_the_reference_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("longgen.planning.measure.measure_rates", run_out)
    shape = find_shape("qwen")
    assert device_rates(torch.device("cpu"), shape) == reference_rates(shape.head_dim)
