"""The request loop: requests one after another through one engine, each ended by a reset whatever happens.

Text prompts stream their answers; the records of a batch give a line each, see longgen.run.record_batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO, TextIO

from longgen.config import Settings
from longgen.errors import LongGenError, OutputError
from longgen.run.answering import RunOptions, answer, say_answer, say_failure, say_phases, say_run_stats
from longgen.run.jobs import Job
from longgen.run.phases import Phases
from longgen.run.preparation import chosen_stretch, make_planner, opened, read_checkpoint, run_options
from longgen.run.progress import TokenizingProgress
from longgen.run.record_batch import Judge, no_judge, run_records
from longgen.run.requests import Request

if TYPE_CHECKING:
    from longgen.engine import Engine
    from longgen.model.tokenizer import TextTokenizer


def run(
    model: str, requests: Iterable[Request], settings: Settings, out: BinaryIO, err: TextIO, judge: Judge = no_judge
) -> int:
    """Answer the requests from a checkpoint (folder, hub id or short name); notices go to `err`.

    Without `settings.output_format` the texts go to `out` as UTF-8, as they are generated. With it every request gives
    a line, see longgen.run.results, in the file `settings.output` if that is set, else in `out`; requests that cannot
    be run are lines too. Their ids must then differ, and `requests` is iterated twice. `judge` adds fields to the lines
    of answers.

    Everything that can be found wrong without the weights is found before they are loaded. Returns the exit code.
    Raises LongGenError for what is wrong with the run as a whole.
    """
    phases = Phases()
    from longgen.model.quiet import quiet_transformers

    with quiet_transformers():
        if settings.output is not None:
            settings = replace(settings, output_format=settings.output_format or "jsonl")
        if settings.output_format is None:
            return _run_texts(model, list(requests), settings, phases, out, err)
        return run_records(model, requests, settings, phases, out, err, judge)


def _run_texts(
    model: str, requests: Sequence[Request], settings: Settings, phases: Phases, out: BinaryIO, err: TextIO
) -> int:
    checkpoint = read_checkpoint(model, settings, phases)
    options = run_options(checkpoint, settings, err)
    planner = make_planner(checkpoint, settings)  # a wrong device or limit is said before prompts are encoded
    with TokenizingProgress(sum(each.chars for each in requests), shown=options.progress, stream=err) as bar:
        jobs = [checkpoint.maker.make(request, bar.update) for request in requests]
    checkpoint.say_template(err)
    sizes = [job.size(options.cap) for job in jobs]
    stretch = chosen_stretch(checkpoint.config, settings, sizes, err)
    phases.end("prompt")
    with opened(checkpoint, planner, stretch, sizes, sum(sizes[0]), settings, phases, err) as engine:
        code = run_jobs(engine, checkpoint.tokenizer, jobs, options, out, err)
        say_phases(engine, options, phases, err)
        return code


def run_jobs(
    engine: Engine,
    tokenizer: TextTokenizer,
    jobs: Sequence[Job],
    options: RunOptions,
    out: BinaryIO,
    err: TextIO,
) -> int:
    """Stream the jobs' texts in order, each exactly as generated and with one newline after it.

    A LongGenError of one is reported to `err` and ends that job only. Returns the exit code: 0, or that of the first
    job that failed. Any other exception, such as KeyboardInterrupt, or BrokenPipeError when nobody reads `out` any
    more, ends the run; so does an OutputError.
    """
    code = 0
    for job in jobs:
        text = _TextStream(out)
        try:
            result = answer(engine, tokenizer, job, options, text.write, err)
            text.end()
            say_answer(job, result, options, err)
        except OutputError:
            raise
        except LongGenError as error:
            text.end_begun()
            say_failure(job.request.source, str(error), err)
            code = code or error.exit_code
    say_run_stats(engine, options, err)
    return code


class _TextStream:
    """One job's text on its way out, flushed piece by piece."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self._begun = out, False

    def write(self, text: str) -> None:
        if not text:
            return
        self._begun = True
        try:
            self._out.write(text.encode("utf-8"))
            self._out.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(error) from error

    def end(self) -> None:
        self.write("\n")

    def end_begun(self) -> None:
        """After a failure: what comes next starts on a line of its own."""
        if self._begun:
            self.end()
