"""What comes before the first request of a run: checkpoint, angles, plan, engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from longgen.config import Settings
from longgen.names import checkpoint_name
from longgen.run.answering import RunOptions
from longgen.run.jobs import JobMaker
from longgen.run.phases import Phases
from longgen.tracing import trace_path, traced

if TYPE_CHECKING:
    from longgen.engine import Engine, EngineOptions
    from longgen.kv.memory_plan import MemoryPlan
    from longgen.kv.plan import Planner
    from longgen.kv.supply import HostSupply
    from longgen.model.checkpoint import CheckedFolder
    from longgen.model.provider import Provider
    from longgen.model.tokenizer import TextTokenizer
    from longgen.model.window import Stretch


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as far as it is known without its weights, and where its run is traced.

    name: as the user gave it; cap: see RunOptions; trace: a file for a trace, see longgen.tracing.
    """

    name: str
    checked: CheckedFolder
    tokenizer: TextTokenizer
    chat: bool
    cap: int
    maker: JobMaker
    trace: Path | None

    @property
    def config(self) -> Any:
        """Of the text model, see longgen.model.checkpoint.read_config."""
        return self.checked.config

    def say_template(self, err: TextIO) -> None:
        """Says how prompts are taken."""
        how = "chat template of the checkpoint" if self.chat else "raw prompt, no chat template"
        print(f"longgen: {how}", file=err)


def read_checkpoint(model: str, settings: Settings, phases: Phases) -> Checkpoint:
    """Finds and checks a checkpoint, after the phase "import". Raises UsageError or CheckpointError."""
    import longgen.planning.opening  # noqa: F401 -- needed later in any case
    from longgen.model.checkpoint import check_folder, resolve_checkpoint
    from longgen.model.rope import trained_window
    from longgen.model.tokenizer import TextTokenizer, generation_settings

    phases.end("import")
    engine_options(settings).chunk_tokens()  # raises for a chunk that is not a multiple of the block
    trace = trace_path(settings.trace, output=settings.output) if settings.trace is not None else None
    checked = check_folder(resolve_checkpoint(checkpoint_name(model)))
    folder, config = checked.path, checked.config
    tokenizer = TextTokenizer.load(folder)
    chat = tokenizer.has_chat_template if settings.chat is None else settings.chat
    cap = settings.max_len or trained_window(config)
    maker = JobMaker(
        tokenizer,
        settings,
        generation_settings(folder),
        chat=chat,
        cap=cap,
        eos_ids=tokenizer.eos_ids(folder),
        vocab_size=config.vocab_size,
    )
    return Checkpoint(model, checked, tokenizer, chat, cap, maker, trace)


def run_options(checkpoint: Checkpoint, settings: Settings, err: TextIO) -> RunOptions:
    """What holds for every job."""
    progress = err.isatty() if settings.progress is None else settings.progress
    return RunOptions(checkpoint.cap, progress, settings.stats)


def chosen_stretch(config: Any, settings: Settings, sizes: Sequence[tuple[int, int]], err: TextIO) -> Stretch:
    """The rotary angles for all jobs, which the longest one decides, and what is said of them.

    sizes: tokens of each job's prompt, and the most that it may generate.
    """
    from longgen.model.rope import trained_window
    from longgen.model.window import choose_stretch, window_note

    beyond = settings.max_len is not None and settings.max_len > trained_window(config)
    stretch = choose_stretch(config, settings.rope, *max(sizes, key=sum), beyond=beyond)
    for line in filter(None, (window_note(config), stretch.notice)):
        print(f"longgen: {line}", file=err)
    return stretch


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


def make_planner(checkpoint: Checkpoint, settings: Settings) -> Planner:
    """What plans memory on this machine, without its rates: see `opened`."""
    from longgen.kv.memory_plan import PlanOptions
    from longgen.kv.plan import Planner
    from longgen.kv.transfer import make_current
    from longgen.model.shape import model_shape
    from longgen.planning.machine import Limits, run_machine

    options = engine_options(settings)
    device = options.torch_device()
    make_current(device)
    name, dtype = Path(checkpoint.name).name or checkpoint.name, None if settings.dtype == "auto" else settings.dtype
    shape = model_shape(checkpoint.config, name, dtype)
    machine = run_machine(Limits(settings.gpu_memory, settings.cpu_memory), device)
    choices = PlanOptions(
        settings.block_size, settings.chunk_size, settings.resident_blocks, options.slots, settings.compile
    )
    return Planner(shape, machine, choices)


@contextmanager
def opened(
    checkpoint: Checkpoint,
    planner: Planner,
    stretch: Stretch,
    sizes: Sequence[tuple[int, int]],
    first: int,
    settings: Settings,
    phases: Phases,
    err: TextIO,
) -> Iterator[Engine]:
    """The engine for jobs of these sizes, planned for the longest, which is said in three lines on `err`.

    first: tokens of the first job, which host memory is made for at once. phases: "plan" and "load" end here.

    Raises CapacityError if it does not fit.
    """
    from longgen.engine import Engine
    from longgen.model.recurrence import slow_recurrence_note
    from longgen.planning.machine import rated_planner
    from longgen.planning.opening import begin_host_memory, options_of
    from longgen.planning.plans import summary

    options = replace(engine_options(settings), yarn_factor=stretch.factor)
    device, longest = options.torch_device(), max(sizes, key=sum)
    planner = rated_planner(planner, *longest, device)
    plan = planner.plan(*longest)
    for line in summary(plan):
        print(f"longgen: {line}", file=err)
    phases.end("plan")
    chosen = options_of(plan, options)
    with (
        traced(checkpoint.trace, device, err, chunks=settings.trace_chunks) as trace,
        closing(begin_host_memory(plan, first, device)) as supply,
    ):
        resize = partial(refit, planner, plan, settings, supply, err)
        engine = Engine.load(checkpoint.checked, chosen, supply=supply, resize=resize, trace=trace)
        phases.end("load")
        provider = engine.provider
        if note := slow_recurrence_note(checkpoint.config, provider.dtype, provider.device):
            print(f"longgen: note: {note}", file=err)
        yield engine


def refit(
    planner: Planner,
    plan: MemoryPlan,
    settings: Settings,
    supply: HostSupply,
    err: TextIO,
    provider: Provider,
    options: EngineOptions,
) -> EngineOptions:
    """Plans again once the weights are loaded and a chunk is measured; says on `err` what that changes.

    supply: of the engine, at work already.

    Raises CapacityError if it does not fit after all.
    """
    from longgen.planning.machine import hold_to
    from longgen.planning.opening import meter_of, options_of, plan_again
    from longgen.planning.plans import correction

    final = plan_again(planner, plan, provider, options, meter_of(provider.device, plan), supply)
    if line := correction(plan, final):
        print(f"longgen: {line}", file=err)
    hold_to(final, settings.gpu_memory, provider.device)
    return options_of(final, options)
