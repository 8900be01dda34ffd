"""A batch of records: what is to be done of it, and a line for each in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from longgen.config import Settings, parse_shard
from longgen.errors import CapacityError, LongGenError, PromptLengthError, UsageError
from longgen.run.answering import Answer, answer, say_answer, say_failure, say_phases, say_run_stats
from longgen.run.interrupts import check_interrupted, uninterrupted
from longgen.run.jobs import Job
from longgen.run.output import Output, open_output
from longgen.run.phases import Phases
from longgen.run.preparation import Checkpoint, chosen_stretch, make_planner, opened, read_checkpoint, run_options
from longgen.run.progress import TokenizingProgress
from longgen.run.requests import Request
from longgen.run.results import Result, Written, result_line
from longgen.run.truncation import Cut
from longgen.units import show_count

if TYPE_CHECKING:
    from longgen.engine import Engine
    from longgen.kv.memory_plan import MemoryPlan
    from longgen.kv.plan import Planner

Size = tuple[int, int]  # tokens of a prompt, and the most that it may generate
Judge = Callable[[Request, str], Mapping[str, Any]]  # fields for the line of an answer, of its text
FAILED = 1  # the exit code where a record failed


def no_judge(request: Request, pred: str) -> Mapping[str, Any]:
    """Adds nothing."""
    return {}


@dataclass(frozen=True, slots=True)
class Head:
    """What is kept of every record from the beginning. chars: of its prompt."""

    id: str
    source: str
    prompt_hash: str
    chars: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A record that cannot be run.

    error: why not, in words; the exception itself would keep the texts that it was raised among.
    """

    request: Request
    error: str
    prompt_tokens: int | None = None
    cut: Cut | None = None


Outcome = tuple[Result, Callable[[], None]]  # of a record, and what says it once its line is written


def run_records(
    model: str,
    requests: Iterable[Request],
    settings: Settings,
    phases: Phases,
    out: BinaryIO,
    err: TextIO,
    judge: Judge = no_judge,
) -> int:
    """See longgen.run.batch.run."""
    heads = read_heads(requests)
    shard, shards = parse_shard(settings.shard) if settings.shard else (1, 1)
    mine = {head.id: head for head in heads[shard - 1 :: shards]}
    if not mine:
        count = show_count(len(heads), "record")
        print(f"longgen: note: nothing is in shard {settings.shard}, since the batch has {count}", file=err)
    with open_output(settings, out, list(mine), err) as output:
        _check_prompts(output, list(mine.values()), settings.output, err)
        checkpoint = read_checkpoint(model, settings, phases)
        checkpoint.say_template(err)
        batch = _Batch(checkpoint, settings, mine, output, phases, err, judge)
        try:
            code = batch.run(requests)
        except KeyboardInterrupt:
            if settings.output is not None:
                print(f"longgen: {batch.state}{output.going_on}", file=err)
            raise
        output.finish()
    return code


def read_heads(requests: Iterable[Request]) -> list[Head]:
    """Reads all records once. Raises UsageError for what is no record, and for ids that are there twice."""
    heads: dict[str, Head] = {}
    for request in requests:
        first = heads.get(request.id)
        if first is not None:
            raise UsageError(
                f"two records have the id {request.id[:80]!r}: {first.source} and {request.source}; give each an "
                'id of its own, as "id" (one without has the number of its line, a text the name of its file), or run '
                "the files one by one"
            )
        heads[request.id] = Head(request.id, request.source, request.prompt_hash(), request.chars)
    if not heads:
        raise UsageError("the prompts hold no record")
    return list(heads.values())


def _check_prompts(output: Output, heads: Sequence[Head], name: str | None, err: TextIO) -> None:
    """Says of how many answers that are there the prompts have changed.

    Raises UsageError if all have: they are answers to another batch with the same ids, such as the numbers of lines.
    """
    found = [(head, line) for head in heads if (line := output.written(head.id)) is not None and not line.failed]
    changed = [head for head, line in found if line.prompt_hash != head.prompt_hash]
    if not changed:
        return
    if len(changed) == len(found):
        raise UsageError(
            f"the output {name} holds answers to other prompts: {show_count(len(found), 'answer')} under ids of this "
            f"batch, none to the prompt of that id, such as {changed[0].source}; give another --output, or --overwrite "
            "to replace the file"
        )
    print(f"longgen: note: replacing {show_count(len(changed), 'result')} whose prompt has changed", file=err)


class _Batch:
    """The records of one run. heads: by id, in the order of the batch."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: Settings,
        heads: Mapping[str, Head],
        output: Output,
        phases: Phases,
        err: TextIO,
        judge: Judge,
    ) -> None:
        self._checkpoint, self._settings, self._heads = checkpoint, settings, heads
        self._output, self._phases, self._err, self._judge = output, phases, err, judge
        self._options = run_options(checkpoint, settings, err)
        self._ready: dict[str, Job | Failed] = {}  # what is to be done
        self._sizes: dict[str, Size] = {}  # of what is done and of what can be
        self._yarn_factor: float | None = None
        self._done = {id_: line for id_ in heads if (line := self._finished(id_)) is not None}
        self._good, self._bad = len(self._done), 0

    @property
    def state(self) -> str:
        """How far the batch is, in words."""
        failed = f", {self._bad:,} failed" if self._bad else ""
        return f"{self._good:,} of {len(self._heads):,} records are done{failed}"

    def run(self, requests: Iterable[Request]) -> int:
        """Does what is to be done. Returns the exit code."""
        left = len(self._done) < len(self._heads)
        if self._done:
            rest = "going on with the others" if left else "nothing is left to do"
            print(f"longgen: {self.state}; {rest}", file=self._err)
        # Before prompts are encoded, so that a wrong device or limit is said at once.
        planner = make_planner(self._checkpoint, self._settings) if left else None
        self._get_ready(requests)
        if planner is not None and any(isinstance(item, Job) for item in self._ready.values()):
            self._answer_all(planner)
        else:
            self._write_all(None)
        if left:
            print(f"longgen: {self.state}", file=self._err)
        return FAILED if self._bad else 0

    def _finished(self, record_id: str) -> Written | None:
        """What an earlier run wrote of a record, if it need not be done again."""
        line = self._output.written(record_id)
        if line is None or line.failed or line.prompt_hash != self._heads[record_id].prompt_hash:
            return None
        return line

    def _get_ready(self, requests: Iterable[Request]) -> None:
        """Makes jobs of the records that are not done."""
        total = sum(head.chars for head in self._heads.values() if head.id not in self._done)
        differing: list[str] = []
        with TokenizingProgress(total, shown=self._options.progress, stream=self._err) as bar:
            for request in self._again(requests):
                line = self._done.get(request.id)
                if line is not None:
                    differing += self._take_over(request, line)
                    continue
                item = self._make(request, bar.update)
                self._ready[request.id] = item
                if isinstance(item, Job):
                    self._sizes[request.id] = item.size(self._options.cap)
        if differing:
            print(
                f"longgen: note: keeping {show_count(len(differing), 'result')} of other settings: "
                f"{differing[0]}; --overwrite does them anew",
                file=self._err,
            )

    def _again(self, requests: Iterable[Request]) -> Iterator[Request]:
        """This run's records, read for the second time."""
        count = 0
        for request in requests:
            head = self._heads.get(request.id)
            if head is not None:
                if request.prompt_hash() != head.prompt_hash:
                    break
                count += 1
                yield request
        if count != len(self._heads):
            raise UsageError("the prompts changed while they were read; run again")

    def _make(self, request: Request, on_chars: Callable[[int], None]) -> Job | Failed:
        try:
            return self._checkpoint.maker.make(request, on_chars)
        except LongGenError as error:
            tokens = error.tokens if isinstance(error, PromptLengthError) else None
            return Failed(replace(request, text="", messages=None), str(error), tokens)

    def _take_over(self, request: Request, line: Written) -> list[str]:
        """Counts a record that is done among the sizes, so that plan and angles are those of the whole batch.

        Returns what differs in its settings from what would hold now, in words; nothing if nothing does.
        """
        try:
            now = self._described(request)
        except UsageError:
            return []
        room = self._options.cap - (line.prompt_tokens or 0)
        if line.prompt_tokens and room > 0:
            self._sizes[request.id] = line.prompt_tokens, min(now["max_new_tokens"], room)
        was = line.settings or {}
        names = [name for name in now if name != "yarn_factor" and now[name] != was.get(name)]
        return [f"{request.source} with {name} {was.get(name)}, now {now[name]}" for name in names[:1]]

    def _described(self, request: Request) -> dict[str, Any]:
        """The settings in effect for a record, by name. Raises UsageError for some that are not allowed."""
        settings, checkpoint = self._settings, self._checkpoint
        return {
            "model": checkpoint.name,
            "chat": checkpoint.chat,
            **checkpoint.maker.settings(request).described(),
            "max_len": checkpoint.cap,
            "truncate": settings.truncate,
            "rope": settings.rope,
            "yarn_factor": self._yarn_factor,
            "dtype": settings.dtype,
        }

    def _answer_all(self, planner: Planner) -> None:
        """Plans for the longest record that fits, loads the model and writes all lines."""
        most = _most_tokens(planner, list(self._sizes.values()))
        fitting = [size for size in self._sizes.values() if sum(size) <= most]
        for item in list(self._ready.values()):
            if isinstance(item, Job) and sum(size := self._sizes[item.request.id]) > most:
                self._ready[item.request.id] = Failed(item.request, str(_refusal(planner, size)), size[0], item.cut)
        order = self._output.in_turn(list(self._ready))
        first = next((id_ for id_ in order if isinstance(self._ready[id_], Job)), None)
        if first is None:
            self._write_all(None)
            return
        stretch = chosen_stretch(self._checkpoint.config, self._settings, fitting, self._err)
        self._yarn_factor = stretch.factor
        if stretch.factor is not None and self._settings.shard and ":" not in self._settings.rope:
            print(
                "longgen: note: each shard takes the angles that its own longest record needs; give --rope "
                f"yarn:{stretch.factor:.10g}, or the factor of the whole batch, to all of them",
                file=self._err,
            )
        self._phases.end("prompt")
        begun = sum(self._sizes[first])
        opening = opened(self._checkpoint, planner, stretch, fitting, begun, self._settings, self._phases, self._err)
        with opening as engine:
            self._write_all(engine)
            say_run_stats(engine, self._options, self._err)
            say_phases(engine, self._options, self._phases, self._err)

    def _write_all(self, engine: Engine | None) -> None:
        """Writes the line of every record that is to be done. engine: None if none of them is a job."""
        for record_id in self._output.in_turn(list(self._ready)):
            self._do(engine, self._ready.pop(record_id))

    def _do(self, engine: Engine | None, item: Job | Failed) -> None:
        """Writes a record's line, then says so."""
        result, say = self._failure(item) if isinstance(item, Failed) else self._tried(engine, item)
        check_interrupted()  # which may be what made it fail
        line = result_line(result, self._settings.output_format or "jsonl")
        with uninterrupted():  # what is counted is what is written
            self._output.write(result.request.id, line)
            if result.error is None:
                self._good += 1
            else:
                self._bad += 1
        say()

    def _tried(self, engine: Engine | None, job: Job) -> Outcome:
        assert engine is not None
        try:
            return self._answer(engine, job)
        except LongGenError as error:
            return self._failure(Failed(job.request, str(error), len(job.prompt), job.cut))

    def _answer(self, engine: Engine, job: Job) -> Outcome:
        pieces: list[str] = []
        got = answer(engine, self._checkpoint.tokenizer, job, self._options, pieces.append, self._err)
        pred = "".join(pieces)
        result = Result(
            job.request,
            self._heads[job.request.id].prompt_hash,
            pred=pred,
            finish_reason=got.finish_reason,
            prompt_tokens=len(job.prompt),
            generated_tokens=got.generated,
            cut=job.cut,
            settings=self._described(job.request),
            timings=_timings(len(job.prompt), got),
            stats=asdict(got.stats) if self._options.stats and got.stats else None,
            judgement=self._judge(job.request, pred),
        )

        def say() -> None:
            place = f"{self._good + self._bad:,}/{len(self._heads):,} "
            say_answer(job, got, self._options, self._err, place)

        return result, say

    def _failure(self, item: Failed) -> Outcome:
        try:
            settings = self._described(item.request)
        except UsageError:
            settings = None
        result = Result(
            item.request,
            self._heads[item.request.id].prompt_hash,
            error=item.error,
            prompt_tokens=item.prompt_tokens,
            cut=item.cut,
            settings=settings,
        )
        return result, partial(say_failure, item.request.source, item.error, self._err)


def _timings(count: int, got: Answer) -> dict[str, float | None]:
    """Seconds, and tokens a second."""
    decoded = got.generated - 1 if got.generated > 1 and got.decode > 0 else None
    return {
        "prefill_seconds": round(got.prefill, 6),
        "decode_seconds": round(got.decode, 6),
        "prefill_tokens_per_second": round(count / max(got.prefill, 1e-9), 3),
        "decode_tokens_per_second": None if decoded is None else round(decoded / got.decode, 3),
    }


def _most_tokens(planner: Planner, sizes: Sequence[Size]) -> int:
    """Tokens of the longest of the requests that fit; 0 if none does.

    Raises CapacityError if nothing would, however short.
    """
    ascending = sorted(set(sizes), key=sum)
    low, high = 0, len(ascending)  # of which the first `low` fit, and what is from `high` on does not
    at = high - 1  # most often all of them do
    while low < high:
        if isinstance(_plan(planner, ascending[at]), CapacityError):
            high = at
        else:
            low = at + 1
        at = (low + high) // 2
    if not low and not planner.longest_prompt(1):
        raise _refusal(planner, ascending[0])
    return sum(ascending[low - 1]) if low else 0


def _plan(planner: Planner, size: Size) -> MemoryPlan | CapacityError:
    try:
        return planner.plan(*size)
    except CapacityError as error:
        return error


def _refusal(planner: Planner, size: Size) -> CapacityError:
    """Why a request of this size, which does not fit, does not."""
    refused = _plan(planner, size)
    assert isinstance(refused, CapacityError)
    return refused
