"""Several requests at once: each in its own slot, all in one forward pass a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from longgen.allocation import RequestId, Ticket
from longgen.ends import do_all
from longgen.errors import LongGenError, SlotError, UsageError
from longgen.metrics import RequestStats
from longgen.sampling import Sampler, SamplingSettings, record_seed

if TYPE_CHECKING:
    from longgen.engine import Engine
    from longgen.token_ids import TokenIds


@dataclass(slots=True, eq=False)
class BatchedRequest:
    """One request of a batch, and what has become of it so far.

    Attributes:
        request_id: text or number, as given to `Engine.allocate_slot`.
        prompt_tokens: token ids, at least one.
        slot_id: what `Engine.allocate_slot` returned.
        sampling: how tokens are chosen; each request has random numbers of its own, from `seed` and its id.
        seq_len: tokens in its slot.
        last_token: the newest token chosen, which the next step runs; a stop id at the end.
        generated_tokens: the answer so far, without a stop id.
        finished: whether the request has ended. Its slot is then empty, and its own until it is released.
        max_new_tokens: most tokens to generate.
        stop_ids: ids that end the answer.
        finish_reason: "stop", "length" or "error", once finished.
        error: what went wrong in choosing a token or in the prefill.
        stats: its figures, once finished.
        ticket: what tells it from any other request of this slot and id, once its prefill has begun.
    """

    request_id: RequestId
    prompt_tokens: TokenIds
    slot_id: int
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    seq_len: int = 0
    last_token: int | None = None
    generated_tokens: list[int] = field(default_factory=list)
    finished: bool = False
    max_new_tokens: int = 256
    stop_ids: frozenset[int] = frozenset()
    seed: int = 0
    finish_reason: str | None = None
    error: LongGenError | None = None
    stats: RequestStats | None = None
    ticket: Ticket | None = field(default=None, init=False, repr=False)
    sampler: Sampler = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"request {self.request_id!r} asks for {self.max_new_tokens} tokens: one is the least")
        self.sampler = Sampler(self.sampling, record_seed(self.seed, str(self.request_id)))


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave one request.

    Attributes:
        token: the token chosen; of a request that had finished before, its last one again. None: it has none.
        finished, finish_reason, error, seq_len: as in the request, after the step.
        logits: what the token was chosen from, float32 [vocab]; None where the request did not run.
    """

    request_id: RequestId
    slot_id: int
    token: int | None
    seq_len: int
    finished: bool
    finish_reason: str | None = None
    error: LongGenError | None = None
    logits: torch.Tensor | None = None


def prefill(engine: Engine, requests: Sequence[BatchedRequest]) -> list[StepResult]:
    """See Engine.batch_prefill."""
    alive = _alive(engine, requests)
    prompts: dict[int, torch.Tensor | LongGenError] = {}
    for place, request in alive.items():
        if request.ticket is not None:
            raise SlotError(f"request {request.request_id!r} was prefilled in slot {request.slot_id} already")
        prompts[place] = prompt = _prompt(engine, request)
        count = len(prompt) if isinstance(prompt, torch.Tensor) else 0
        engine.slots.check_begin(_ticket(request), count + request.max_new_tokens)
    logits = {}
    for place, request in alive.items():
        try:
            logits[place] = _advance(engine, [request], partial(_prefill_one, engine, request, prompts[place]))[0]
        except LongGenError as error:
            request.error = _bare(error)
    return [_result(request, logits.get(place)) for place, request in enumerate(requests)]


def decode_step(engine: Engine, requests: Sequence[BatchedRequest]) -> list[StepResult]:
    """See Engine.batch_decode_step."""
    alive = _alive(engine, requests)
    tickets, tokens = [], []
    for request in alive.values():
        if request.ticket is None or request.last_token is None:
            raise SlotError(f"decode of request {request.request_id!r} in slot {request.slot_id} before prefill")
        tickets.append(request.ticket)
        tokens.append(request.last_token)
    engine.slots.check_step(tickets)
    logits: Mapping[int, torch.Tensor] = {}
    if alive:
        rows = _advance(engine, list(alive.values()), partial(engine.decode_requests, tickets, tokens))
        logits = dict(zip(alive, rows, strict=True))
    return [_result(request, logits.get(place)) for place, request in enumerate(requests)]


def _alive(engine: Engine, requests: Sequence[BatchedRequest]) -> dict[int, BatchedRequest]:
    """The requests that are not finished, by their place in the batch. Raises SlotError for a slot not theirs."""
    alive = {place: request for place, request in enumerate(requests) if not request.finished}
    users: dict[int, RequestId] = {}
    for request in alive.values():
        if request.slot_id in users:
            raise SlotError(
                f"slot {request.slot_id} is twice in one batch, in requests {users[request.slot_id]!r} and "
                f"{request.request_id!r}"
            )
        users[request.slot_id] = request.request_id
        engine.slots.check_owner(request.slot_id, request.request_id)
    return alive


def _ticket(request: BatchedRequest) -> Ticket:
    return Ticket(request.slot_id, request.request_id)


def _prompt(engine: Engine, request: BatchedRequest) -> torch.Tensor | LongGenError:
    """The prompt's token ids, int64 [n], or why it cannot be run."""
    try:
        return engine.token_ids(request.prompt_tokens)
    except LongGenError as error:
        return error


def _prefill_one(engine: Engine, request: BatchedRequest, prompt: torch.Tensor | LongGenError) -> torch.Tensor:
    """Logits after the prompt, float32 [1, vocab]."""
    if isinstance(prompt, LongGenError):
        raise prompt
    request.ticket = _ticket(request)
    logits = engine.begin_request(request.ticket, prompt, request.max_new_tokens)
    request.sampler.observe(prompt)
    return logits[None]


def _advance(engine: Engine, requests: Sequence[BatchedRequest], run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Runs a pass for the requests and chooses each one's next token; returns the logits, on the CPU.

    Whatever goes wrong, none of them is left between the two: a request that did not get its token has ended, unless
    nothing ran at all.
    """
    try:
        logits = run().cpu()
        for request, row in zip(requests, logits, strict=True):
            engine.observer.seen(request.slot_id)
            length = engine.store.length(request.slot_id)
            _choose(engine, request, row)
            request.seq_len = length
    except BaseException:
        with suppress(Exception):
            do_all(*(partial(_finish, engine, each, "error") for each in requests if not _untouched(engine, each)))
        raise
    return logits


def _untouched(engine: Engine, request: BatchedRequest) -> bool:
    """Whether a request is as it was after its last step."""
    going_on = request.ticket is not None and engine.slots.holds(request.ticket)
    return request.finished or (going_on and engine.store.length(request.slot_id) == request.seq_len)


def _choose(engine: Engine, request: BatchedRequest, logits: torch.Tensor) -> None:
    """Chooses a request's next token. An error ends this request only."""
    try:
        token = request.sampler.sample(logits)
    except LongGenError as error:
        request.error = _bare(error)
        _finish(engine, request, "error")
        return
    request.last_token = token
    if token in request.stop_ids:
        _finish(engine, request, "stop")
        return
    request.generated_tokens.append(token)
    if len(request.generated_tokens) == request.max_new_tokens:
        _finish(engine, request, "length")


def _finish(engine: Engine, request: BatchedRequest, reason: str) -> None:
    request.finished, request.finish_reason = True, reason
    if request.ticket is not None:
        request.stats = engine.end_request(request.ticket)


def _bare(error: LongGenError) -> LongGenError:
    """The error without the frames it came through: these would keep the prompt and the engine alive."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _result(request: BatchedRequest, logits: torch.Tensor | None) -> StepResult:
    return StepResult(
        request_id=request.request_id,
        slot_id=request.slot_id,
        token=request.last_token,
        seq_len=request.seq_len,
        finished=request.finished,
        finish_reason=request.finish_reason,
        error=request.error,
        logits=logits,
    )
