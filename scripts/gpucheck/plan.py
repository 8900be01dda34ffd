"""What was planned against what was measured: device and host memory, times, pinning in the background, refusals."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from gpucheck import context, refusals
from gpucheck.report import Result, Settings, say, seconds, synchronize, table
from gpucheck.shape import NEW_TOKENS, larger_shape, make_provider, random_prompt, usual_shape
from longgen.benchmarking.measuring import resident_bytes
from longgen.engine import Engine, EngineOptions
from longgen.kv.budget import device_budget
from longgen.kv.extents import PIECE_BYTES
from longgen.kv.memory_plan import MemoryPlan, PlanOptions
from longgen.kv.plan import Planner
from longgen.kv.supply import HostSupply
from longgen.kv.transfer import open_transfer
from longgen.model.provider import Provider
from longgen.model_shape import ModelShape
from longgen.planning.machine import Limits, device_rates, hold_to, run_machine
from longgen.planning.opening import begin_host_memory, meter_of, options_of, plan_again

CAP = 24 << 30
WARM_UP, STEPS = 2, 4
USE_PART, USE_BYTES = 0.03, 256 << 20  # planned against measured device use: the larger of the two
HOST_PART, HOST_FROM = 0.02, 4 << 30
SAME_PART = 0.01  # device use from length to length, where resident blocks fill the cap
TIME_PART = 0.25
COLD_PART = {"short": 0.10, "long": 0.03}
MEMORY = ("model", "tokens", "estimated", "planned", "used", "cap", "kv", "host_bytes", "host_rss", "resident")
INSIDE = ("model", "tokens", "runtime", "activations", "gaps", "left", "estimated_activations", "outside", "unused")
TIMES = (
    "model",
    "tokens",
    "chunk",
    "prefill_s",
    "predicted_s",
    "bound",
    "first_s",
    "decode_rate",
    "predicted_rate",
    "first_rate",
    "decode_bound",
)
# Measured, and predicted once a chunk was measured (predicted) and before anything was loaded (first).
JUDGED = (
    ("prefill_s", "predicted_s"),
    ("prefill_s", "first_s"),
    ("decode_rate", "predicted_rate"),
    ("decode_rate", "first_rate"),
)
PINNING = ("tokens", "begun", "lead_s", "prefill_s", "slower")
BEGUN = ("before", "with the plan", "with the prefill")  # when host memory is made; the first is compared against


@dataclass(frozen=True, slots=True)
class Subject:
    """A model of random weights, and its planner under the cap."""

    name: str
    shape: ModelShape
    planner: Planner


def run(settings: Settings) -> Result:
    """Both models at three lengths under a cap, then pinning, then refusals. Alone (`--only plan`) it is most exact:
    sections before it leave memory of this process on the card that cannot be told from that of others."""
    missed: list[str] = []
    refused = refusals.check(settings)
    table(refusals.COLUMNS, [[row[column] for column in refusals.COLUMNS] for row in refused])
    missed += [f"refusal: {row['case']}" for row in refused if not row["ok"]]
    others, steps = _others(settings)
    rows: list[dict[str, Any]] = []
    pinned: list[dict[str, Any]] = []
    layers: dict[str, float | None] = {}
    rate = _pin_rate(settings)
    say(f"  pinning in the background: {rate / 2**30:.2f} GiB/s")
    for name, shape in (("qwen3-0.6b", usual_shape), ("qwen2.5-7b", larger_shape)):
        subject = _subject(name, shape(settings.small), settings)
        rates = subject.planner.machine.rates
        layers[name] = rates.layer if rates else None
        rows += _lengths(subject, settings, others)
        if name == "qwen3-0.6b":
            pinned += _pinning(subject, settings)
    if not settings.small:
        missed += _missed(rows, pinned)
    for bar in missed:
        say(f"  MISSED {bar}")
    if settings.device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, settings.device)
    data = {"rows": rows, "pinning": pinned, "pin_bytes_per_s": rate, "refusals": refused, "context": steps}
    return Result(not missed, data | {"layer_s": layers, "others": others, "missed": missed})


def _others(settings: Settings) -> tuple[int, list[dict[str, Any]]]:
    """Bytes of the card that other processes hold, and what a fresh process takes step by step."""
    if settings.device.type != "cuda":
        return 0, []
    index = settings.device.index
    fresh = not torch._C._cuda_hasPrimaryContext(index)  # type: ignore[attr-defined]
    try:
        others, steps = context.probe(settings.device)
    except ValueError as error:  # of a line that is no JSON: the process said on standard error what was wrong
        say(f"  what a fresh process takes could not be measured: {error}")
        return device_budget(None, index).others, []
    columns = ("step", "used", "reserved", "allocated")
    table(columns, [[row[column] for column in columns] for row in steps])
    others = others if fresh else device_budget(None, index).others
    say(f"  {others:,} bytes of the card are held by others{'' if fresh else ', or by the sections before this one'}")
    return others, steps


def _subject(name: str, shape: ModelShape, settings: Settings) -> Subject:
    limits = Limits(gpu_memory=CAP if settings.device.type == "cuda" else None)
    planner = Planner(shape, run_machine(limits, settings.device), _choices(settings))
    if settings.device.type == "cuda":
        planner = planner.rated(device_rates(settings.device, shape))
    return Subject(name, shape, planner)


def _choices(settings: Settings, resident_blocks: int | None = None) -> PlanOptions:
    return PlanOptions(block_size=16 if settings.small else 1024, resident_blocks=resident_blocks)


def _options(settings: Settings) -> EngineOptions:
    return EngineOptions(device=str(settings.device), block_size=_choices(settings).block_size)


def _lengths(subject: Subject, settings: Settings, others: int) -> Iterator[dict[str, Any]]:
    """A row for each length, shown as it comes."""
    prompts = (256, 512, 1024) if settings.small else (65_536, 262_144, 524_288)
    plans = [subject.planner.plan(tokens, NEW_TOKENS) for tokens in prompts]
    provider = make_provider(settings, subject.shape)
    for plan in plans:
        row = _length(subject, plan, provider, settings, others)
        for columns in (MEMORY, INSIDE, TIMES):
            table(columns, [[row[column] for column in columns]])
        yield row


def _length(subject: Subject, plan: MemoryPlan, provider: Provider, settings: Settings, others: int) -> dict[str, Any]:
    """Plans again once a chunk is measured, as `run` does, and runs a request by it."""
    device, options = settings.device, _options(settings)
    meter = meter_of(device, plan)
    final = plan_again(subject.planner, plan, provider, options, meter)
    hold_to(final, CAP, device)
    with closing(HostSupply(open_transfer(device))) as supply:
        measured = _request(Engine.over(provider, options_of(final, options), None, supply), plan, device)
        measured |= {
            "used": _used(device) - others,
            "outside": meter.outside() if meter else None,
            "unused": meter.reserved() - meter.peak() if meter else None,
        }
    _settle(device)
    budget, needs, times, first = final.machine.device, final.device, final.prediction, plan.prediction
    return measured | {
        "model": subject.name,
        "tokens": plan.prompt,
        "chunk": final.sizes.chunk_tokens,
        "estimated": plan.device.total,
        "planned": needs.total,
        "cap": budget.usable if budget else None,
        "left": budget.usable - needs.total if budget else None,
        "kv": final.host.kv,
        "resident": final.resident_blocks,
        "estimated_resident": plan.resident_blocks,
        "runtime": needs.runtime,
        "activations": needs.activations,
        "estimated_activations": plan.device.activations,
        "gaps": needs.allocator,
        "predicted_s": times.prefill_seconds if times else None,
        "bound": times.prefill_bound if times else None,
        "predicted_rate": times.decode_rate if times else None,
        "first_s": first.prefill_seconds if first else None,  # what is said before anything is loaded
        "first_rate": first.decode_rate if first else None,
        "decode_bound": times.decode_bound if times else None,
    }


def _request(engine: Engine, plan: MemoryPlan, device: torch.device) -> dict[str, Any]:
    """A short request for what is made on first use, then the planned one."""
    _warm_up(engine, plan)
    _settle(device)
    bare, prompt = resident_bytes() - engine.store.host_bytes, random_prompt(plan.prompt)
    prefill = seconds(lambda: engine.prefill(prompt, new_tokens=NEW_TOKENS), device)
    steps = [seconds(lambda: engine.decode_step(3), device) for _ in range(WARM_UP + STEPS)][WARM_UP:]
    return {
        "prefill_s": prefill,
        "decode_rate": 1 / statistics.median(steps),
        "host_bytes": engine.store.host_bytes,
        "host_rss": resident_bytes() - bare,
    }


def _settle(device: torch.device) -> None:
    gc.collect()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _used(device: torch.device) -> int:
    """Bytes of the card in use by all processes."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _pin_rate(settings: Settings) -> float:
    """Bytes a second of four pieces for each thread."""
    size = 1 << 16 if settings.small else PIECE_BYTES
    with closing(HostSupply(open_transfer(settings.device))) as supply:
        count = 4 * supply.threads
        return count * size / seconds(lambda: supply.collect(supply.order([size] * count)), settings.device)


def _pinning(subject: Subject, settings: Settings) -> Iterator[dict[str, Any]]:
    """First prefills whose host memory is made meanwhile, against those that found it made; nothing stays on the
    device."""
    short, long = (256, 1024) if settings.small else (65_536, 262_144)
    planner = Planner(subject.planner.model, subject.planner.machine, _choices(settings, resident_blocks=0))
    with TemporaryDirectory() as folder:
        make_provider(settings, subject.shape).model.save_pretrained(folder)
        for which, tokens in (("short", short), ("long", long)):
            plan = planner.plan(tokens, NEW_TOKENS)
            made: dict[str, Any] = {}
            for begun in BEGUN:
                row = _first_prefill(planner, plan, Path(folder), settings, begun)
                _settle(settings.device)
                made = made or row
                row |= {"which": which, "slower": row["prefill_s"] / made["prefill_s"] - 1}
                table(PINNING, [[row[column] for column in PINNING]])
                yield row


def _first_prefill(planner: Planner, plan: MemoryPlan, folder: Path, settings: Settings, begun: str) -> dict[str, Any]:
    """The first prefill of an engine that is opened as `run` opens it, with host memory begun at one of BEGUN.

    A short request of another engine comes before it all, so that the difference is not that of first uses.
    """
    device, options = settings.device, options_of(plan, _options(settings))

    _warm_up(Engine.load(folder, options), plan)
    _settle(device)
    with closing(begin_host_memory(plan, 0 if begun == "with the prefill" else plan.tokens, device)) as supply:

        def resize(provider: Provider, options: EngineOptions) -> EngineOptions:
            return options_of(plan_again(planner, plan, provider, options, meter_of(device, plan), supply), options)

        started = time.perf_counter()
        engine = Engine.load(folder, options, supply=supply, resize=resize)
        synchronize(device)
        lead, prompt = time.perf_counter() - started, random_prompt(plan.prompt)
        if begun == "before":
            engine.store.announce(0, plan.tokens)
            engine.store.grow(0, plan.tokens)
        prefill = seconds(lambda: engine.prefill(prompt, new_tokens=NEW_TOKENS), device)
    return {"tokens": plan.prompt, "begun": begun, "lead_s": lead, "prefill_s": prefill}


def _warm_up(engine: Engine, plan: MemoryPlan) -> None:
    engine.prefill(random_prompt(min(plan.prompt, 3 * engine.chunk_tokens)), new_tokens=NEW_TOKENS)
    engine.decode_step(3)
    engine.reset()


def _missed(rows: list[dict[str, Any]], pinned: list[dict[str, Any]]) -> Iterator[str]:
    """What has a bar and did not meet it, in words."""
    for row in rows:
        where = f"{row['model']} at {row['tokens']:,}"
        if row["cap"] is not None:
            if abs(row["used"] - row["planned"]) > max(USE_PART * row["planned"], USE_BYTES):
                yield f"{where}: {row['used']:,} bytes of the device used, {row['planned']:,} planned"
            if row["used"] > row["cap"]:
                yield f"{where}: {row['used']:,} bytes of the device used, over the cap"
        if row["kv"] >= HOST_FROM and abs(row["host_rss"] / row["kv"] - 1) > HOST_PART:
            yield f"{where}: {row['host_rss']:,} bytes of host memory more, for {row['kv']:,} of KV"
        if row["predicted_s"] is not None and row["tokens"] != 262_144:
            for got, said in JUDGED:
                if abs(row[said] / row[got] - 1) > TIME_PART:
                    yield f"{where}: {got} is {row[got]:.3g}, {said} {row[said]:.3g}"
    for model in dict.fromkeys(row["model"] for row in rows):
        used = [row["used"] for row in rows if row["model"] == model and row["kv"]]
        if used and max(used) > (1 + SAME_PART) * min(used):
            yield f"{model}: device use differs from length to length, {used}"
    for row in pinned:
        if row["begun"] == "with the plan" and row["slower"] > COLD_PART[row["which"]]:
            yield f"pinning: {row['tokens']:,} tokens take {row['slower']:.1%} longer with it"
