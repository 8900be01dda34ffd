"""One request from its prompt to its end."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from longgen.allocation import Ticket
from longgen.errors import UsageError
from longgen.metrics import RequestStats
from longgen.sampling import Sampler

if TYPE_CHECKING:
    from longgen.engine import Engine
    from longgen.token_ids import TokenIds


class Generation:
    """The answer of one request as it is made: iterate for token ids, then read `finish_reason` and `stats`.

    The iteration ends the request, which empties its slot, however the iteration ends: at its last token, by an
    exception, or closed early. Close it to be sure of when (`contextlib.closing`); else it is closed when it is no
    longer referenced.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: TokenIds,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        sampler: Sampler,
        slot_id: int,
        on_prefill: Callable[[int], None] | None,
    ) -> None:
        self._engine, self._prompt, self._slot_id = engine, prompt, slot_id
        self._max_new_tokens, self._stop_ids = max_new_tokens, stop_ids
        self._sampler, self._on_prefill = sampler, on_prefill
        self._begun = False
        self.finish_reason: str | None = None  # "stop" (a stop id came) or "length", once the iteration is over
        self.stats: RequestStats | None = None  # once the iteration is over, unless the slot was taken from it

    def __iter__(self) -> Generator[int, None, None]:
        """The tokens. Raises UsageError the second time: the sampler, random numbers and all, is used up."""
        if self._begun:
            raise UsageError("a generation is iterated once: Engine.generate, with a new sampler, gives another")
        self._begun = True
        return self._tokens()

    def _tokens(self) -> Generator[int, None, None]:
        engine, ticket = self._engine, Ticket(self._slot_id)
        prompt = engine.token_ids(self._prompt)
        try:
            logits = engine.begin_request(ticket, prompt, self._max_new_tokens, self._on_prefill)
            self._sampler.observe(prompt)
            for produced in range(self._max_new_tokens):
                token = self._sampler.sample(logits.cpu())
                engine.slots.seen(ticket)
                if token in self._stop_ids:
                    self.finish_reason = "stop"
                    return
                yield token
                engine.slots.check(ticket)
                if produced + 1 < self._max_new_tokens:
                    logits = engine.decode_requests([ticket], [token])[0]
            self.finish_reason = "length"
        finally:
            self.stats = engine.end_request(ticket)
