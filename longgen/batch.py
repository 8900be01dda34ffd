"""The request loop: requests one after another through one engine, each ended by a reset whatever happens."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from longgen.config import Settings, sampling_settings
from longgen.errors import CheckpointError, LongGenError, OutputError, UsageError
from longgen.names import checkpoint_name
from longgen.progress import PrefillProgress
from longgen.requests import Request
from longgen.sampling import Sampler, SamplingSettings, record_seed

if TYPE_CHECKING:
    from longgen.engine import Engine, EngineOptions
    from longgen.kv.plan import MemoryPlan, Planner
    from longgen.model.provider import Provider
    from longgen.model.tokenizer import DecodeStream, TextTokenizer

_SLOT = 0


@dataclass(frozen=True, slots=True)
class Job:
    """A request made ready for the engine. prompt: its token ids."""

    request: Request
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What holds for every job of a run.

    cap: most tokens of a prompt and its text together.   max_new_tokens: most tokens of the text alone.
    stop_ids: token ids that end a text.   seed: see longgen.sampling.record_seed.
    progress: whether to draw the prefill's bar.
    """

    cap: int
    max_new_tokens: int
    stop_ids: Collection[int]
    sampling: SamplingSettings
    seed: int
    progress: bool


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
    folder = resolve_checkpoint(checkpoint_name(model))
    config = read_config(folder)
    check_shards(folder)
    sampling = sampling_settings(settings, generation_settings(folder))
    tokenizer = TextTokenizer.load(folder)
    chat = tokenizer.has_chat_template if settings.chat is None else settings.chat
    jobs = [Job(request, tuple(tokenizer.encode(request.text, chat))) for request in requests]
    options = RunOptions(
        cap=settings.max_len or trained_window(config),
        max_new_tokens=settings.max_new_tokens,
        stop_ids=tokenizer.eos_ids(folder),
        sampling=sampling,
        seed=settings.seed,
        progress=err.isatty() if settings.progress is None else settings.progress,
    )
    check_lengths(jobs, options.cap, trained=settings.max_len is None)
    check_vocabulary(jobs, config.vocab_size)
    print(f"longgen: {'chat template of the checkpoint' if chat else 'raw prompt, no chat template'}", file=err)
    planner, plan = make_plan(model, config, jobs, settings, options, err)
    chosen = options_of(plan, engine_options(settings))
    with closing(begin_host_memory(plan, sum(job_tokens(jobs[0], options)), chosen.torch_device())) as supply:
        resize = partial(refit, planner, plan, settings, err)
        engine = Engine.load(folder, chosen, supply=supply, resize=resize)
        if note := slow_recurrence_note(config, engine.provider.device):
            print(f"longgen: note: {note}", file=err)
        return run_jobs(engine, tokenizer, jobs, options, out, err)


def job_tokens(job: Job, options: RunOptions) -> tuple[int, int]:
    """Tokens of a job's prompt, and the most that may follow them."""
    count = len(job.prompt)
    return count, min(options.max_new_tokens, options.cap - count)


def engine_options(settings: Settings) -> EngineOptions:
    """How the engine is built as far as the settings say."""
    from longgen.engine import EngineOptions

    return EngineOptions(
        device=settings.device, dtype=settings.dtype, block_size=settings.block_size, chunk_size=settings.chunk_size
    )


def make_plan(
    model: str, config: Any, jobs: Sequence[Job], settings: Settings, running: RunOptions, err: TextIO
) -> tuple[Planner, MemoryPlan]:
    """Plans memory for the longest job, and says so in three lines on `err`.

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
    choices = PlanOptions(settings.block_size, settings.chunk_size, settings.resident_blocks, options.slots)
    planner = Planner(shape, machine, choices)
    plan = planner.plan(*max((job_tokens(job, running) for job in jobs), key=sum))
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
                f"which is more than {limit}; {remedy}, or shorten the prompt"
            )


def check_vocabulary(jobs: Sequence[Job], vocab_size: int) -> None:
    """Raise CheckpointError if the tokenizer gave a prompt a token that the model has no embedding for."""
    for job in jobs:
        if (largest := max(job.prompt)) >= vocab_size:
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
    BrokenPipeError when nobody reads `out` any more, ends the run after the reset; so does an OutputError.
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
        finally:
            engine.reset(_SLOT)
    return code


def _run_job(
    engine: Engine, tokenizer: TextTokenizer, job: Job, options: RunOptions, out: BinaryIO, err: TextIO
) -> None:
    """Stream one job's text to `out`, exactly as generated and with one newline after it, and its figures to `err`."""
    count = len(job.prompt)
    sampler = Sampler(options.sampling, record_seed(options.seed, job.request.id))
    started = time.monotonic()
    with PrefillProgress(count, shown=options.progress, stream=err) as bar:
        generation = engine.generate(
            job.prompt,
            max_new_tokens=min(options.max_new_tokens, options.cap - count),
            stop_ids=options.stop_ids,
            sampler=sampler,
            slot_id=_SLOT,
            on_prefill=bar.update,
        )
        tokens = iter(generation)
        token = next(tokens, None)
    prefilled = time.monotonic()
    generated = _stream(tokens if token is None else chain((token,), tokens), tokenizer.decode_stream(), out)
    ended = time.monotonic()
    prefill_rate = count / max(prefilled - started, 1e-9)
    rates = f"prefill {prefill_rate:,.0f} tok/s"
    if generated > 1:  # the first token is the prefill's
        rates += f", decode {(generated - 1) / max(ended - prefilled, 1e-9):,.1f} tok/s"
    print(
        f"longgen: {job.request.source}: {count:,} prompt tokens, {generated:,} generated "
        f"({generation.finish_reason}), {rates}",
        file=err,
    )


def _stream(tokens: Iterable[int], decoder: DecodeStream, out: BinaryIO) -> int:
    """Write the tokens' text as they come, and a newline after it; returns how many there were.

    If the request fails after some text, the newline ends that text too: the next one starts on a line of its own.
    """
    generated = 0
    written = False
    try:
        for token in tokens:
            generated += 1
            text = decoder.push(token)
            _write(out, text)
            written = written or bool(text)
    except LongGenError:
        if written:
            _write(out, "\n")
        raise
    _write(out, decoder.flush() + "\n")
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
