"""The request loop: requests one after another through one engine, each ended by a reset whatever happens."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from longgen.config import Settings, sampling_settings
from longgen.errors import CheckpointError, LongGenError, OutputError, UsageError
from longgen.names import checkpoint_name
from longgen.progress import PrefillProgress, TokenizingProgress
from longgen.requests import Request
from longgen.sampling import Sampler, SamplingSettings, record_seed
from longgen.stopping import StopStrings
from longgen.tracing import trace_path, traced
from longgen.truncation import Cut, truncate

if TYPE_CHECKING:
    import torch

    from longgen.engine import Engine, EngineOptions
    from longgen.kv.plan import MemoryPlan, Planner
    from longgen.model.provider import Provider
    from longgen.model.tokenizer import DecodeStream, TextTokenizer
    from longgen.model.window import Stretch


@dataclass(frozen=True, slots=True)
class Job:
    """A request made ready for the engine. prompt: its token ids, int32 [n]; cut: what was left out of its text."""

    request: Request
    prompt: torch.Tensor
    cut: Cut | None = None


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What holds for every job of a run.

    cap: most tokens of a prompt and its text together.   max_new_tokens: most tokens of the text alone.
    stop_ids, stops: token ids and strings that end a text.   seed: see longgen.sampling.record_seed.
    progress: whether to draw the prefill's bar.   stats: whether to print the figures of every request and of the run.
    """

    cap: int
    max_new_tokens: int
    stop_ids: Collection[int]
    sampling: SamplingSettings
    seed: int
    progress: bool
    stops: tuple[str, ...] = ()
    stats: bool = False


def run(model: str, requests: Sequence[Request], settings: Settings, out: BinaryIO, err: TextIO) -> int:
    """Answer the requests from a checkpoint (folder, hub id or short name): texts to `out` as UTF-8, notices to `err`.

    Everything that can be found wrong without the weights is found before they are loaded. Returns the exit code.
    Raises LongGenError for what is wrong with the run as a whole.
    """
    from longgen.model.quiet import quiet_transformers

    with quiet_transformers():
        return _run(model, requests, settings, out, err)


def _run(model: str, requests: Sequence[Request], settings: Settings, out: BinaryIO, err: TextIO) -> int:
    from longgen.engine import Engine
    from longgen.model.checkpoint import read_config, resolve_checkpoint
    from longgen.model.recurrence import slow_recurrence_note
    from longgen.model.rope import trained_window
    from longgen.model.shards import check_shards
    from longgen.model.tokenizer import TextTokenizer, generation_settings
    from longgen.opening import begin_host_memory, options_of

    engine_options(settings).chunk_tokens()  # raises for a chunk that is not a multiple of the block
    trace_file = trace_path(settings.trace) if settings.trace is not None else None
    folder = resolve_checkpoint(checkpoint_name(model))
    config = read_config(folder)
    check_shards(folder)
    sampling = sampling_settings(settings, generation_settings(folder))
    tokenizer = TextTokenizer.load(folder)
    chat = tokenizer.has_chat_template if settings.chat is None else settings.chat
    stops = settings.stop or ()
    control_ids = {id_ for stop in stops if (id_ := tokenizer.control_id(stop)) is not None}
    options = RunOptions(
        cap=settings.max_len or trained_window(config),
        max_new_tokens=settings.max_new_tokens,
        stop_ids=tokenizer.eos_ids(folder) | control_ids,
        sampling=sampling,
        seed=settings.seed,
        progress=err.isatty() if settings.progress is None else settings.progress,
        stops=stops,
        stats=settings.stats,
    )
    jobs = encode_jobs(tokenizer, requests, chat, options, settings.truncate, err)
    check_lengths(jobs, options.cap, trained=settings.max_len is None)
    check_vocabulary(jobs, config.vocab_size)
    sizes = request_sizes(jobs, options.max_new_tokens, options.cap)
    stretch = chosen_stretch(config, settings, *max(sizes, key=sum))
    print(f"longgen: {'chat template of the checkpoint' if chat else 'raw prompt, no chat template'}", file=err)
    if stretch.notice:
        print(f"longgen: {stretch.notice}", file=err)
    planner, plan = make_plan(model, config, sizes, settings, err)
    chosen = options_of(plan, replace(engine_options(settings), yarn_factor=stretch.factor))
    device = chosen.torch_device()
    with (
        traced(trace_file, device, err, chunks=settings.trace_chunks) as trace,
        closing(begin_host_memory(plan, sum(sizes[0]), device)) as supply,
    ):
        resize = partial(refit, planner, plan, settings, err)
        engine = Engine.load(folder, chosen, supply=supply, resize=resize, trace=trace)
        if note := slow_recurrence_note(config, engine.provider.device):
            print(f"longgen: note: {note}", file=err)
        return run_jobs(engine, tokenizer, jobs, options, out, err)


def encode_jobs(
    tokenizer: TextTokenizer,
    requests: Sequence[Request],
    chat: bool,
    options: RunOptions,
    place: str | None,
    err: TextIO,
) -> list[Job]:
    """The requests as token ids. place: where texts are cut that leave no room for the new tokens; None cuts nothing.

    Raises UsageError if a text is to be cut and nothing of it would be left.
    """
    jobs = []
    total = sum(len(request.text) for request in requests)
    with TokenizingProgress(total, shown=options.progress, stream=err) as bar:
        for request in requests:
            prompt = tokenizer.encode_prompt(request.text, chat, bar.update)
            if place is None:
                jobs.append(Job(request, prompt.ids))
                continue
            room = options.cap - options.max_new_tokens
            try:
                ids, cut = truncate(prompt, room, place, tokenizer.begins_inside)
            except UsageError as error:
                raise UsageError(
                    f"the prompt {request.source} cannot be cut to --max-len, {options.cap:,}, less --max-new-tokens, "
                    f"{options.max_new_tokens:,}: {error}"
                ) from None
            jobs.append(Job(request, ids, cut))
    return jobs


def chosen_stretch(config: Any, settings: Settings, prompt: int, new: int) -> Stretch:
    """The rotary angles for all jobs, which the longest one decides: `prompt` tokens, and `new` that may follow."""
    from longgen.model.rope import trained_window
    from longgen.model.window import choose_stretch

    beyond = settings.max_len is not None and settings.max_len > trained_window(config)
    return choose_stretch(config, settings.rope, prompt, new, beyond=beyond)


def request_sizes(jobs: Sequence[Job], max_new_tokens: int, cap: int) -> list[tuple[int, int]]:
    """Tokens of each job's prompt, and the most that it may generate."""
    return [(len(job.prompt), min(max_new_tokens, cap - len(job.prompt))) for job in jobs]


def engine_options(settings: Settings) -> EngineOptions:
    """How the engine is built as far as the settings say."""
    from longgen.engine import EngineOptions

    return EngineOptions(
        device=settings.device,
        dtype=settings.dtype,
        block_size=settings.block_size,
        chunk_size=settings.chunk_size,
        compile=settings.compile,
        scrub=settings.scrub,
    )


def make_plan(
    model: str, config: Any, sizes: Sequence[tuple[int, int]], settings: Settings, err: TextIO
) -> tuple[Planner, MemoryPlan]:
    """Plans memory for the longest job, and says so in three lines on `err`. sizes: see `request_sizes`.

    Raises CapacityError if it does not fit.
    """
    from longgen.kv.plan import Planner, PlanOptions
    from longgen.kv.transfer import make_current
    from longgen.model.shape import model_shape
    from longgen.planning import Limits, hold_to, run_machine, summary

    options = engine_options(settings)
    device = options.torch_device()
    make_current(device)
    shape = model_shape(config, Path(model).name or model, None if settings.dtype == "auto" else settings.dtype)
    machine = run_machine(Limits(settings.gpu_memory, settings.cpu_memory), shape, device)
    choices = PlanOptions(
        settings.block_size, settings.chunk_size, settings.resident_blocks, options.slots, settings.compile
    )
    planner = Planner(shape, machine, choices)
    plan = planner.plan(*max(sizes, key=sum))
    for line in summary(plan):
        print(f"longgen: {line}", file=err)
    hold_to(plan, settings.gpu_memory, device)
    return planner, plan


def refit(
    planner: Planner, plan: MemoryPlan, settings: Settings, err: TextIO, provider: Provider, options: EngineOptions
) -> EngineOptions:
    """Plans again once the weights are loaded and a chunk is measured; says on `err` what that changes.

    Raises CapacityError if it does not fit after all.
    """
    from longgen.opening import meter_of, options_of, plan_again
    from longgen.planning import correction, hold_to

    final = plan_again(planner, plan, provider, options, meter_of(provider.device, plan))
    if line := correction(plan, final):
        print(f"longgen: {line}", file=err)
    hold_to(final, settings.gpu_memory, provider.device)
    return options_of(final, options)


def check_lengths(jobs: Sequence[Job], cap: int, *, trained: bool) -> None:
    """Raise UsageError if a prompt leaves no room for one token under `cap`, the trained window or the user's own."""
    for job in jobs:
        count = len(job.prompt)
        if count == 0:
            raise UsageError(f"the prompt {job.request.source} comes to no tokens; there is nothing to continue")
        if count + 1 > cap:
            limit, remedy = (
                (f"the {cap:,} that the checkpoint was trained for", "give --max-len to go beyond that")
                if trained
                else (f"--max-len, {cap:,}", f"raise it to {count + 1:,} or more")
            )
            raise UsageError(
                f"the prompt {job.request.source} has {count:,} tokens, with one generated {count + 1:,}, "
                f"which is more than {limit}; {remedy}, or shorten the prompt, or give --truncate"
            )


def check_vocabulary(jobs: Sequence[Job], vocab_size: int) -> None:
    """Raise CheckpointError if the tokenizer gave a prompt a token that the model has no embedding for."""
    for job in jobs:
        if (largest := int(job.prompt.max())) >= vocab_size:
            raise CheckpointError(
                f"the tokenizer is not this model's: the prompt {job.request.source} has a token with the id "
                f"{largest:,}, and the model has {vocab_size:,} of them"
            )


def run_jobs(
    engine: Engine,
    tokenizer: TextTokenizer,
    jobs: Sequence[Job],
    options: RunOptions,
    out: BinaryIO,
    err: TextIO,
) -> int:
    """Run the jobs in order. A LongGenError of one is reported to `err` and ends that job only.

    Returns the exit code: 0, or that of the first job that failed. Any other exception, such as KeyboardInterrupt, or
    BrokenPipeError when nobody reads `out` any more, ends the run; so does an OutputError. Every job's slot is empty
    when the job is over, however it ended: its generation sees to that.
    """
    code = 0
    for job in jobs:
        try:
            _run_job(engine, tokenizer, job, options, out, err)
        except OutputError:
            raise
        except LongGenError as error:
            print(f"longgen: error: {job.request.source}: {error}", file=err)
            code = code or error.exit_code
    if options.stats:
        print(f"longgen: stats {json.dumps({'run': asdict(engine.observer.run())})}", file=err)
    return code


def _run_job(
    engine: Engine, tokenizer: TextTokenizer, job: Job, options: RunOptions, out: BinaryIO, err: TextIO
) -> None:
    """Stream one job's text to `out`, exactly as generated and with one newline after it, and its figures to `err`."""
    count = len(job.prompt)
    sampler = Sampler(options.sampling, record_seed(options.seed, job.request.id))
    started = time.monotonic()
    with ExitStack() as stack:
        with PrefillProgress(count, shown=options.progress, stream=err) as bar:
            generation = engine.generate(
                job.prompt,
                max_new_tokens=min(options.max_new_tokens, options.cap - count),
                stop_ids=options.stop_ids,
                sampler=sampler,
                on_prefill=bar.update,
            )
            tokens = stack.enter_context(closing(iter(generation)))
            token = next(tokens, None)
        prefilled = time.monotonic()
        stops = StopStrings(options.stops)
        generated = _stream(tokens if token is None else chain((token,), tokens), tokenizer.decode_stream(), stops, out)
        reason = "stop" if stops.found else generation.finish_reason
        ended = time.monotonic()
    prefill_rate = count / max(prefilled - started, 1e-9)
    rates = f"prefill {prefill_rate:,.0f} tok/s"
    if generated > 1:  # the first token is the prefill's
        rates += f", decode {(generated - 1) / max(ended - prefilled, 1e-9):,.1f} tok/s"
    print(
        f"longgen: {job.request.source}: {count:,} prompt tokens{f' ({job.cut})' if job.cut else ''}, "
        f"{generated:,} generated ({reason}), {rates}",
        file=err,
    )
    if options.stats and generation.stats is not None:
        figures = {"request": job.request.id, **asdict(generation.stats)}
        print(f"longgen: stats {json.dumps(figures)}", file=err)


def _stream(tokens: Iterable[int], decoder: DecodeStream, stops: StopStrings, out: BinaryIO) -> int:
    """Write the tokens' text as they come up to a stop string, and a newline after it; returns how many there were.

    If the request fails after some text, the newline ends that text too: the next one starts on a line of its own.
    """
    generated = 0
    written = False
    try:
        for token in tokens:
            generated += 1
            text = stops.push(decoder.push(token))
            _write(out, text)
            written = written or bool(text)
            if stops.found:
                break
    except LongGenError:
        if written:
            _write(out, "\n")
        raise
    if not stops.found:
        _write(out, stops.push(decoder.flush()))
    _write(out, stops.flush() + "\n")
    return generated


def _write(out: BinaryIO, text: str) -> None:
    if not text:
        return
    try:
        out.write(text.encode("utf-8"))
        out.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error) from error
