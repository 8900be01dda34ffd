"""What `longgen bench` does: plans each length as `run` would, measures it, prints a table and a line of JSON."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from longgen.benchmarking.ceilings import Ceilings, measure_ceilings
from longgen.benchmarking.measuring import bench_tokens, measure_length, record_end
from longgen.benchmarking.plot import check_plot, draw
from longgen.benchmarking.rows import COLUMNS, cell, make_row
from longgen.benchmarking.subject import Subject, find_subject
from longgen.benchmarking.tables import table_lines
from longgen.config import Settings
from longgen.engine import Engine, EngineOptions
from longgen.errors import CapacityError, UsageError
from longgen.kv.memory_plan import MemoryPlan, PlanOptions
from longgen.kv.plan import Planner
from longgen.kv.supply import HostSupply
from longgen.kv.transfer import make_current, open_transfer
from longgen.model.provider import Provider
from longgen.model.quiet import quiet_transformers
from longgen.planning.facts import machine_facts, versions
from longgen.planning.machine import Limits, device_rates, hold_to, run_machine
from longgen.planning.opening import meter_of, options_of, plan_again
from longgen.planning.plans import summary
from longgen.run.preparation import engine_options
from longgen.shortage import shortage_reported
from longgen.tracing import Trace, TraceError, trace_path, traced

LONG_TOKENS = 512 << 10  # from here on one run is enough, and takes long enough
USUAL_REPEATS = 3


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What is measured.

    Attributes:
        lengths: tokens of the prompts.
        resident: blocks of each layer that stay on the device: a number, "all", or None for what fits.
        repeats: prefills of each length, of which the median counts; None: three, one from 512K tokens on.
        steps: decoded tokens of each length.
        random_kv: fills the cache with random K and V instead of running the prompt.
        plot: a picture file to write; None writes none.
    """

    lengths: tuple[int, ...]
    resident: int | str | None = None
    repeats: int | None = None
    steps: int = 8
    random_kv: bool = False
    plot: Path | None = None

    def repeats_of(self, tokens: int) -> int:
        return self.repeats or (1 if tokens >= LONG_TOKENS else USUAL_REPEATS)


def parse_resident(text: str | None) -> int | str | None:
    """The value of --resident-blocks: "all", a number, or None. Raises UsageError."""
    if text is None or text == "all":
        return text
    if re.fullmatch("0|[1-9][0-9]{0,8}", text):
        return int(text)
    raise UsageError(f"--resident-blocks {text!r} must be all, or a whole number of blocks such as 0")


def bench(
    model: str | None,
    shape: str | None,
    options: BenchOptions,
    settings: Settings,
    command: str,
    out: TextIO,
    err: TextIO,
) -> int:
    """Measures a model (as for `run`) or a shape (as for `plan`): a table to `err`, one line of JSON to `out`.

    command: what the user wrote, for the JSON.

    Returns the exit code: 1 if a length does not fit or its trace cannot be written. Raises LongGenError for what is
    wrong with all of them. What was measured before an interrupt is printed all the same.
    """
    if (model is None) == (shape is None):
        raise UsageError("give either --model, to load its weights, or --shape, for random ones")
    if options.plot is not None:
        check_plot(options.plot)
    trace = trace_path(settings.trace, plot=options.plot) if settings.trace is not None else None
    engine_options(settings).chunk_tokens()  # raises for a chunk that is not a multiple of the block
    with quiet_transformers():
        device = engine_options(settings).torch_device()
        make_current(device)
        subject = find_subject(model, shape, settings)
        found = Bench(subject, options, settings, device, err, trace)
        try:
            found.measure()
        finally:
            if found.rows or found.complete:
                facts = {"command": command, "machine": machine_facts(device), "versions": versions()}
                print(json.dumps(facts | found.result()), file=out, flush=True)
    if options.plot is not None and found.rows:
        draw(options.plot, f"{subject.shape.name} on {machine_facts(device).get('gpu', 'the CPU')}", found.rows)
    return CapacityError.exit_code if found.failed else 0


class Bench:
    """All lengths of one model on one device.

    Attributes:
        rows: what was measured so far, a length each.
        refused: of the lengths that do not fit, why.
        failed: whether anything went wrong with one length, and was said.
        complete: whether every length was measured or refused.
    """

    def __init__(
        self,
        subject: Subject,
        options: BenchOptions,
        settings: Settings,
        device: torch.device,
        err: TextIO,
        trace: Path | None = None,
    ) -> None:
        """`trace`: a file for that of the longest."""
        self._subject, self._options, self._settings = subject, options, settings
        self._device, self._err = device, err
        self._trace = trace
        self.rows: list[dict[str, Any]] = []
        self.refused: list[str] = []
        self.failed = self.complete = False
        # The budget is read before the ceilings are measured: what that leaves behind is this process's own.
        self._machine = run_machine(Limits(settings.gpu_memory, settings.cpu_memory), device)
        if device.type == "cuda":
            self._machine = replace(self._machine, rates=device_rates(device, subject.shape))
        with shortage_reported("measuring the ceilings", device):
            self._ceilings = measure_ceilings(device, subject.shape)

    def measure(self) -> None:
        """Runs every length that fits. The table is complete, or ends where the run was interrupted."""
        shape = self._subject.shape
        self._say(f"{shape.name}, {self._subject.weights}, {shape.dtype}; {_shown(self._ceilings)}")
        plans = []
        for tokens in self._options.lengths:
            with self._noting():
                plans.append(self._planner(tokens).plan(tokens, bench_tokens(tokens, self._options.steps) - tokens))
        try:
            if plans:
                with shortage_reported("loading the model", self._device):
                    provider = self._subject.load(self._device)
                if self._settings.compile:
                    provider.compile({plan.sizes.chunk_tokens for plan in plans})
            longest = max(plans, key=lambda plan: plan.prompt, default=None)
            for plan in plans:
                self._say("; ".join(summary(plan)))
                with self._noting():  # what is measured may not fit after all
                    self._measure(provider, plan, self._trace if plan is longest else None)
            self.complete = True
        finally:
            if self.rows:
                self._table(self.rows)

    def result(self) -> dict[str, Any]:
        """What is known so far, as plain values. docs/benchmarks.md explains them."""
        shape = self._subject.shape
        return {
            "model": asdict(shape) | {"weights": self._subject.weights, "parameters": shape.parameters},
            "random_kv": self._options.random_kv,
            "compiled": self._settings.compile,
            "ceilings": asdict(self._ceilings),
            "rows": self.rows,
            "refused": self.refused,
            "complete": self.complete,
        }

    def _planner(self, tokens: int) -> Planner:
        """`all` resident blocks are those of this length."""
        settings, resident = self._settings, self._options.resident
        if resident == "all":
            resident = -(-bench_tokens(tokens, self._options.steps) // settings.block_size)
        blocks = resident if isinstance(resident, int) else None
        choices = PlanOptions(settings.block_size, settings.chunk_size, blocks, compiled=settings.compile)
        return Planner(self._subject.shape, self._machine, choices)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Notes and says what does not fit, and what is wrong with a trace; the other lengths are still measured."""
        try:
            yield
        except (CapacityError, TraceError) as error:
            self._say(f"error: {error}")
            self.failed = True
            if isinstance(error, CapacityError):
                self.refused.append(str(error))

    def _measure(self, provider: Provider, plan: MemoryPlan, trace_file: Path | None) -> None:
        """A row of one length, through an engine that is planned and measured as that of `run`; then its end is traced
        to a file. Raises CapacityError, without a row, or TraceError, with one."""
        gc.collect()  # the engine before it, and its host memory
        options = replace(engine_options(self._settings), dtype=self._subject.shape.dtype)
        plan = self._fitted(provider, plan, options)
        repeats = self._options.repeats_of(plan.prompt)
        doing = f"measuring {plan.prompt:,} tokens"
        with (
            traced(trace_file, self._device, self._err, chunks=self._settings.trace_chunks, armed=False) as trace,
            closing(HostSupply(open_transfer(self._device))) as supply,
            shortage_reported(doing, self._device),
        ):
            engine = Engine.over(provider, options_of(plan, options), None, supply, trace)
            chosen = self._options
            measured = measure_length(
                engine, plan.prompt, repeats=repeats, steps=chosen.steps, random_kv=chosen.random_kv
            )
            meter = meter_of(self._device, plan)
            used = meter.outside() + meter.reserved() if meter else None
            row = make_row(self._subject.shape, plan.kv, plan.sizes, measured, self._ceilings)
            self.rows.append(row | {"device_used_bytes": used})
            if trace:
                self._record(engine, plan, trace)
            engine.close()

    def _record(self, engine: Engine, plan: MemoryPlan, trace: Trace) -> None:
        """Raises TraceError: what was measured fitted, and the profiler takes memory of its own."""
        try:
            with shortage_reported("recording the trace", self._device):
                record_end(engine, plan.prompt, self._options.steps, trace)
        except CapacityError as error:
            raise TraceError(f"no trace: {error}") from None

    def _fitted(self, provider: Provider, plan: MemoryPlan, options: EngineOptions) -> MemoryPlan:
        """The plan once a chunk is measured, on a GPU."""
        planner = self._planner(plan.prompt)
        final = plan_again(planner, plan, provider, options, meter_of(self._device, plan))
        hold_to(final, self._settings.gpu_memory, self._device)
        return final

    def _table(self, rows: Sequence[dict[str, Any]]) -> None:
        cells = [[cell(row, path) for _, path in COLUMNS] for row in rows]
        for line in table_lines([title for title, _ in COLUMNS], cells):
            print(line, file=self._err)

    def _say(self, text: str) -> None:
        print(f"longgen: {text}", file=self._err, flush=True)


def _shown(ceilings: Ceilings) -> str:
    return (
        f"copies {ceilings.h2d_gbps:,.1f} and {ceilings.d2h_gbps:,.1f} GB/s, at once {ceilings.both_gbps:,.1f} each; "
        f"attention {ceilings.attention_tflops:,.3g} TFLOP/s ({ceilings.attention_backend}), matrix products "
        f"{ceilings.matmul_tflops:,.3g}; device memory {ceilings.device_gbps:,.0f} GB/s"
    )
