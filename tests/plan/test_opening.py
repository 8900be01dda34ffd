"""From a plan to an engine: what is prepared while weights load, and what a measured chunk changes."""

from __future__ import annotations

import io
import json
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longgen.cli import main
from longgen.config import Settings
from longgen.costs import started_layers
from longgen.engine import Engine, EngineOptions
from longgen.errors import CapacityError
from longgen.kv.budget import DeviceBudget, HostBudget
from longgen.kv.memory_plan import Machine, MeasuredUse, MemoryPlan, PlanOptions
from longgen.kv.passes import Pass
from longgen.kv.plan import Planner
from longgen.kv.predict import LAYER_SECONDS, reference_rates
from longgen.kv.supply import HostSupply
from longgen.kv.transfer import CpuTransfer
from longgen.model.checkpoint import read_config
from longgen.model.provider import Provider
from longgen.model.shape import model_shape
from longgen.planning import opening
from longgen.planning.opening import begin_host_memory, measure_use, meter_of, options_of, plan_again
from longgen.planning.plans import correction
from longgen.run.preparation import refit
from tests.checkpoints import Build, random_ids
from tests.plan.machines import GIB
from tests.plan.shapes import SMALL, machine

CPU = torch.device("cpu")
OPTIONS = EngineOptions(device="cpu", dtype="float32", block_size=16)


class FakeMeter:
    """Tells numbers of its own."""

    def __init__(self, activations: int, runtime: int) -> None:
        self.activations, self.runtime, self.settled = activations, runtime, 0

    def settle(self) -> None:
        self.settled += 1

    def allocated(self) -> int:
        return 1000

    def peak(self) -> int:
        return 1000 + self.activations

    def reserved(self) -> int:
        return self.peak() + 70

    def outside(self) -> int:
        return self.runtime


def tiny_planner(folder: Path, gpu: int, **options: Any) -> Planner:
    """Of a GPU of so many bytes beside what CUDA takes."""
    rates = reference_rates(64)
    device = DeviceBudget(gpu, 140 * GIB, "a test")
    choices = PlanOptions(block_size=16, chunk_size=64, **options)
    return Planner(
        model_shape(read_config(folder), "tiny", "float32"),
        Machine(HostBudget(GIB * 8, 0, "a test", ()), device, rates),
        choices,
    )


def load(folder: Path) -> Provider:
    return Provider.load(folder, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
def test_resident_blocks_are_cut_from_what_a_measured_chunk_leaves(
    build: Build, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = build(kind)
    provider, planner = load(folder), tiny_planner(folder, 900 << 20)
    before = planner.plan(250_000, 10)
    # A faster host would get a smaller ring, which leaves room for more blocks: it takes as long as was planned.
    real, planned = opening._step_seconds, LAYER_SECONDS * started_layers(planner.model)
    monkeypatch.setattr(opening, "_step_seconds", lambda *args: real(*args) and planned)
    fewer = planner.again(before, MeasuredUse(before.device.runtime + (20 << 20), 0, before.device.activations))
    meter = FakeMeter(before.device.activations, before.device.runtime + (20 << 20) - 70)
    after = plan_again(planner, before, provider, OPTIONS, meter)
    assert after.resident_blocks == fewer.resident_blocks < before.resident_blocks
    assert after.device.total <= 900 << 20
    line = correction(before, after)
    assert line is not None and f"{after.resident_blocks:,} resident blocks a layer instead of" in line
    assert correction(before, before) is None
    # What was run to measure it leaves nothing behind.
    options = replace(options_of(after, OPTIONS), resident_blocks=2)
    ids = random_ids(100)[0].tolist()
    expected = Engine.over(load(folder), options).prefill(ids)
    assert torch.equal(Engine.over(provider, options).prefill(ids), expected)


def test_a_plan_with_room_to_spare_is_not_measured(build: Build) -> None:
    folder = build("qwen3")
    planner, meter = tiny_planner(folder, 8 * GIB), FakeMeter(1 << 20, 1 << 20)
    plan = planner.plan(50, 10)
    assert plan.roomy and not planner.plan(100, 10).roomy  # two chunks
    assert plan_again(planner, plan, load(folder), OPTIONS, meter) is plan and meter.settled == 0
    tight = tiny_planner(folder, 900 << 20).plan(50, 10)
    assert tight.resident_blocks == 4 and not tight.roomy


def test_a_chunk_of_the_planned_size_is_run_after_some_blocks_and_before_a_token(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, passes, forward = load(build("qwen3")), [], Provider.forward

    def noted(self: Provider, pass_: Pass, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        passes.append((ids.shape[1], *pass_.lengths))
        return forward(self, pass_, ids, *rest)

    monkeypatch.setattr(Provider, "forward", noted)  # of every engine's copy
    meter = FakeMeter(5000, 300)
    use = measure_use(provider, replace(OPTIONS, chunk_size=64, resident_blocks=9), meter)
    assert passes[:3] == [(64, 0), (64, 64), (1, 128)]  # for memory
    assert passes[3:] == [(6, 0), *((1, length) for length in range(6, 16))]  # for time
    assert use.step_seconds is not None and use.step_seconds > 0
    assert replace(use, step_seconds=None) == MeasuredUse(runtime=300, allocator=70, activations=5000)
    assert meter.settled == 2


def test_nothing_is_made_while_a_step_is_timed(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host memory of the first request is on its way meanwhile, and goes on after it."""
    supply = HostSupply(CpuTransfer(), threads=2)
    real, timed = opening._step_seconds, []

    def slowly(self: CpuTransfer, nbytes: int) -> torch.Tensor:
        if nbytes == 64:
            time.sleep(0.01)
        return torch.empty(nbytes, dtype=torch.uint8)

    def noted(*args: Any) -> float:
        before = supply.prepared_bytes
        seconds = real(*args)
        timed.append((len(supply._workshop.threads), supply.prepared_bytes - before))
        return seconds

    monkeypatch.setattr(CpuTransfer, "allocate_host", slowly)
    monkeypatch.setattr(opening, "_step_seconds", noted)
    planner = tiny_planner(build("qwen3"), 900 << 20)
    plan = planner.plan(250_000, 10)
    with closing(supply):
        supply.prepare([64] * 100_000)
        meter = FakeMeter(plan.device.activations, plan.device.runtime)
        plan_again(planner, plan, load(build("qwen3")), OPTIONS, meter, supply)
        assert timed == [(0, 0)]
        assert len(supply._workshop.threads) == 2


def test_a_run_lets_its_supply_rest_while_it_measures(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    planner, rested, held = tiny_planner(build("qwen3"), 900 << 20), [], []
    plan = planner.plan(250_000, 10)

    def measured(*args: Any) -> MeasuredUse:
        rested.append(args[-1])
        return MeasuredUse(plan.device.runtime, 0, plan.device.activations)

    monkeypatch.setattr(opening, "measure_use", measured)
    monkeypatch.setattr(opening, "meter_of", lambda *_: FakeMeter(1, 1))
    monkeypatch.setattr("longgen.planning.machine.hold_to", lambda final, *_: held.append(final.device.runtime))
    with closing(HostSupply(CpuTransfer())) as supply:
        refit(planner, plan, Settings(), supply, io.StringIO(), load(build("qwen3")), OPTIONS)
        assert rested == [supply] and held == [plan.device.runtime]


def test_a_run_keeps_to_what_is_planned_after_measuring(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("All the words of a text, one after another. " * 20, encoding="utf-8")

    def planned(planner: Planner, plan: MemoryPlan, *_: object) -> MemoryPlan:
        return replace(plan, sizes=replace(plan.sizes, resident_blocks=3))

    monkeypatch.setattr(opening, "plan_again", planned)
    monkeypatch.setattr("longgen.model.recurrence.slow_recurrence_note", lambda *_: "as slow as can be")
    arguments = ["--block-size", "16", "--chunk-size", "64", "--device", "cpu", "--max-new-tokens", "2", "--stats"]
    folder = build("qwen3")
    assert main(["run", "--model", str(folder), "-f", str(prompt), *arguments]) == 0
    err = capsys.readouterr().err
    assert err.count("longgen: note: as slow as can be\n") == 1
    figures = [json.loads(line.removeprefix("longgen: stats ")) for line in err.splitlines() if ": stats {" in line]
    (request,) = (each for each in figures if "request" in each)
    (phases,) = (each["phases"] for each in figures if "phases" in each)
    assert request["blocks"]["resident"] == 3 * read_config(folder).num_hidden_layers
    assert 0 < phases["load"] < phases["import"] + phases["plan"] + phases["load"]


def test_what_does_not_fit_after_all_is_one_error_with_numbers(build: Build) -> None:
    folder = build("qwen3")
    planner = tiny_planner(folder, 900 << 20)
    with pytest.raises(
        CapacityError, match=r"of GPU memory at least .* 400 MiB activations.* more than the 900 MiB that are"
    ):
        plan_again(planner, planner.plan(5000, 10), load(folder), OPTIONS, FakeMeter(400 << 20, 768 << 20))


def test_on_the_cpu_nothing_is_measured(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build("qwen3")
    plan = tiny_planner(folder, 900 << 20).plan(5000, 10)
    assert meter_of(CPU, plan) is None
    monkeypatch.setattr(Engine, "over", lambda *_: pytest.fail("an engine was made"))
    assert plan_again(tiny_planner(folder, 900 << 20), plan, load(folder), OPTIONS, None) is plan


def begun(monkeypatch: pytest.MonkeyPatch, plan: MemoryPlan, tokens: int) -> list[int]:
    """Bytes of the pieces that are asked for while weights load."""
    asked: list[int] = []

    def note(self: Any, nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return torch.empty(0, dtype=torch.uint8)

    monkeypatch.setattr(CpuTransfer, "allocate_host", note)
    supply = begin_host_memory(plan, tokens, CPU)
    supply.collect(tuple(supply._prepared))
    supply.close()
    return asked


def test_host_memory_is_begun_as_far_as_it_fits_beside_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    options = PlanOptions(resident_blocks=0)
    roomy = Planner(SMALL, machine(24, 120), options).plan(100_000, 10)
    assert sum(begun(monkeypatch, roomy, roomy.tokens)) == roomy.host.kv
    assert sum(begun(monkeypatch, roomy, 20_000)) == roomy.sizes.host_bytes(roomy.kv, 20_000)  # the first is shorter
    tight = Planner(SMALL, machine(24, 12), options).plan(100_000, 10)
    early = sum(begun(monkeypatch, tight, tight.tokens))
    assert tight.host.kv > tight.early_host_bytes == 12 * GIB - tight.host.process - tight.host.first
    assert tight.early_host_bytes - (256 << 20) < early <= tight.early_host_bytes


def test_a_run_measures_between_loading_and_the_buffers(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """`resize` gets the model and the options, and what it gives sizes the store."""
    seen: list[EngineOptions] = []

    def resize(provider: Provider, options: EngineOptions) -> EngineOptions:
        assert isinstance(provider, Provider)
        seen.append(options)
        return replace(options, resident_blocks=3)

    engine = Engine.load(build("qwen3"), replace(OPTIONS, chunk_size=32), resize=resize)
    assert seen == [replace(OPTIONS, chunk_size=32)]
    assert engine.store.sizes.resident_blocks == 3
