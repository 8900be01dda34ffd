"""One job from its prompt to the end of its answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, TextIO

from longgen.run.interrupts import check_interrupted
from longgen.run.jobs import Job
from longgen.run.phases import Phases
from longgen.run.progress import PrefillProgress
from longgen.run.stopping import StopStrings
from longgen.sampling import Sampler, record_seed
from longgen.units import show_count

if TYPE_CHECKING:
    from longgen.engine import Engine
    from longgen.metrics import RequestStats
    from longgen.model.tokenizer import DecodeStream, TextTokenizer


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What holds for every job of a run.

    cap: most tokens of a prompt and its answer together.   progress: whether to draw the prefill's bar.
    stats: whether to print the figures of every request and of the run.
    """

    cap: int
    progress: bool
    stats: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """How a job's answer ended.

    finish_reason: stop or length.   generated: its tokens.   stats: see longgen.metrics.
    prefill, decode: seconds; the first token is the prefill's.
    """

    finish_reason: str
    generated: int
    prefill: float
    decode: float
    stats: RequestStats | None


def answer(
    engine: Engine,
    tokenizer: TextTokenizer,
    job: Job,
    options: RunOptions,
    write: Callable[[str], None],
    err: TextIO,
) -> Answer:
    """Gives one job's text to `write` piece by piece, exactly as it is generated; draws on `err`.

    Raises LongGenError if the job fails, and whatever `write` raises. The job's slot is empty when this is over,
    however it ended: its generation sees to that.
    """
    count, new = job.size(options.cap)
    sampler = Sampler(job.settings.sampling, record_seed(job.settings.seed, job.request.id))
    started = time.monotonic()
    with ExitStack() as stack:
        with PrefillProgress(count, shown=options.progress, stream=err) as bar:

            def prefilled_to(tokens: int) -> None:
                check_interrupted()
                bar.update(tokens)

            generation = engine.generate(
                job.prompt, max_new_tokens=new, stop_ids=job.stop_ids, sampler=sampler, on_prefill=prefilled_to
            )
            tokens = stack.enter_context(closing(iter(generation)))
            token = next(tokens, None)
        prefilled = time.monotonic()
        stops = StopStrings(job.settings.stops)
        all_tokens = tokens if token is None else chain((token,), tokens)
        generated = _stream(all_tokens, tokenizer.decode_stream(), stops, write)
        reason = "stop" if stops.found else generation.finish_reason or "length"
        ended = time.monotonic()
    return Answer(reason, generated, prefilled - started, ended - prefilled, generation.stats)


def say_answer(job: Job, result: Answer, options: RunOptions, err: TextIO, place: str = "") -> None:
    """Prints a job's figures; `place` comes before its source."""
    print(f"longgen: {place}{job.request.source}: {_figures(job, result)}", file=err)
    if options.stats and result.stats is not None:
        figures = {"request": job.request.id, **asdict(result.stats)}
        print(f"longgen: stats {json.dumps(figures)}", file=err)


def say_failure(source: str, error: str, err: TextIO) -> None:
    """Prints why a job failed."""
    print(f"longgen: error: {source}: {error}", file=err)


def say_run_stats(engine: Engine, options: RunOptions, err: TextIO) -> None:
    """Prints the figures of the run where they are asked for."""
    if options.stats:
        print(f"longgen: stats {json.dumps({'run': asdict(engine.observer.run())})}", file=err)


def say_phases(engine: Engine, options: RunOptions, phases: Phases, err: TextIO) -> None:
    """Prints where the time of the run went where figures are asked for."""
    if options.stats:
        figures = phases.seconds() | engine.observer.phases()
        print(f"longgen: stats {json.dumps({'phases': figures})}", file=err)


def _figures(job: Job, result: Answer) -> str:
    count = len(job.prompt)
    rates = f"prefill {count / max(result.prefill, 1e-9):,.0f} tok/s"
    if result.generated > 1:
        rates += f", decode {(result.generated - 1) / max(result.decode, 1e-9):,.1f} tok/s"
    cut = f" ({job.cut})" if job.cut else ""
    return f"{show_count(count, 'prompt token')}{cut}, {result.generated:,} generated ({result.finish_reason}), {rates}"


def _stream(tokens: Iterable[int], decoder: DecodeStream, stops: StopStrings, write: Callable[[str], None]) -> int:
    """Writes the tokens' text as they come, up to a stop string; returns how many there were."""
    generated = 0
    for token in tokens:
        check_interrupted()
        generated += 1
        write(stops.push(decoder.push(token)))
        if stops.found:
            return generated
    write(stops.push(decoder.flush()))
    write(stops.flush())
    return generated
