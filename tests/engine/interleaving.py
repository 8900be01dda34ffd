"""Requests interleaved over the slots of one engine, each beside the same request alone in an engine of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from longgen.batching import BatchedRequest, StepResult
from longgen.engine import Engine, Snapshot
from longgen.errors import SlotError
from longgen.model.provider import Provider
from longgen.options import EngineOptions
from tests.checkpoints import random_ids

SLOTS = 4
OPERATIONS = ("start", "start", "decode", "decode", "decode", "one", "extend", "truncate", "mark", "reset", "release")
Operation = tuple[str, int, int]  # its name, a choice of requests, and an amount
BATCH_TOLERANCE = 1e-5  # of the largest logit
LONGEST = 150


@dataclass
class Twin:
    """A request in the engine under test, and alone.

    exact: whether every pass of it had the shape of the one alone, so that both agree bit for bit.
    marks: snapshots of both.
    """

    request: BatchedRequest
    alone: Engine
    exact: bool = True
    marks: tuple[Snapshot, Snapshot] | None = None
    log: list[str] = field(default_factory=list)


class Interleaving:
    """Does operations and compares after each. AssertionError at the first difference.

    Args:
        provider: the weights.
        options: of both engines, but for the number of slots.
        tolerance: of logits that came out of a batch, relative to the largest.
    """

    def __init__(self, provider: Provider, options: EngineOptions, *, tolerance: float = BATCH_TOLERANCE) -> None:
        self._provider, self._options, self._tolerance = provider, options, tolerance
        self.engine = Engine.over(provider, options)
        self.engine.allocate_batch_slots(SLOTS)
        self._twins: dict[int, Twin] = {}  # by slot
        self._names = 0
        self.batches = 0  # decode steps of several requests

    def run(self, operations: Sequence[Operation]) -> None:
        for name, choice, amount in operations:
            getattr(self, f"_{name}")(choice, amount)

    def _start(self, choice: int, amount: int) -> None:
        """A new request in a free slot, or in place of one."""
        if len(self._twins) == SLOTS:
            self._release(choice, amount)
        self._names += 1
        name = self._names if amount % 2 else f"request {self._names}"
        self._prefill(BatchedRequest(name, (), self.engine.allocate_slot(name)), amount)

    def _prefill(self, blank: BatchedRequest, amount: int) -> None:
        prompt = random_ids(1 + amount % LONGEST, seed=amount)[0].tolist()
        request = BatchedRequest(blank.request_id, prompt, blank.slot_id, max_new_tokens=1000)
        twin = Twin(request, Engine.over(self._provider, self._options))
        (result,) = self.engine.batch_prefill([request])
        self._twins[request.slot_id] = twin
        self._compare(twin, result, twin.alone.prefill(prompt, new_tokens=1000))

    def _decode(self, choice: int, amount: int) -> None:
        """A step of some requests at once, in an order of their own."""
        chosen = [twin for slot, twin in sorted(self._twins.items()) if choice >> slot & 1]
        if amount % 2:
            chosen.reverse()
        tokens = [twin.request.last_token for twin in chosen]
        results = self.engine.batch_decode_step([twin.request for twin in chosen])
        self.batches += len(chosen) > 1
        for twin, token, result in zip(chosen, tokens, results, strict=True):
            twin.exact &= len(chosen) == 1
            assert token is not None
            self._compare(twin, result, twin.alone.decode_step(token))

    def _one(self, choice: int, amount: int) -> None:
        """A step of one request through the engine's plain call."""
        if (twin := self._chosen(choice)) is not None:
            token = 3 + amount % 290
            logits = self.engine.decode_step(token, twin.request.slot_id)
            self._compare_logits(twin, logits, twin.alone.decode_step(token))

    def _extend(self, choice: int, amount: int) -> None:
        if (twin := self._chosen(choice)) is not None:
            ids = random_ids(1 + amount % 80, seed=amount + 1)[0].tolist()
            logits = self.engine.extend(ids, twin.request.slot_id)
            self._compare_logits(twin, logits, twin.alone.extend(ids))

    def _truncate(self, choice: int, amount: int) -> None:
        """Cuts a request, or takes it back to its mark where the model cannot be cut."""
        if (twin := self._chosen(choice)) is None:
            return
        slot_id = twin.request.slot_id
        if self.engine.provider.is_recurrent:
            if twin.marks is not None:
                self.engine.restore(twin.marks[0], slot_id)
                twin.alone.restore(twin.marks[1])
            return
        length = max(1, self.engine.store.length(slot_id) - amount % 40)
        refusals = []
        for engine, slot in ((self.engine, slot_id), (twin.alone, 0)):
            try:
                engine.truncate(length, slot)
            except SlotError as error:  # a sliding window no longer has what came before
                refusals.append(str(error).partition("tokens:")[2])
        assert len(set(refusals)) <= 1 and len(refusals) != 1
        twin.marks = None

    def _mark(self, choice: int, _: int) -> None:
        if (twin := self._chosen(choice)) is not None and self.engine.provider.is_recurrent:
            twin.marks = self.engine.snapshot(twin.request.slot_id), twin.alone.snapshot()

    def _reset(self, choice: int, amount: int) -> None:
        """The slot is emptied and its owner starts again."""
        if (twin := self._chosen(choice)) is not None:
            self.engine.reset(twin.request.slot_id)
            del self._twins[twin.request.slot_id]
            self._poison()
            self._prefill(twin.request, amount)

    def _release(self, choice: int, _: int) -> None:
        if (twin := self._chosen(choice)) is not None:
            self.engine.release_slot(twin.request.slot_id)
            del self._twins[twin.request.slot_id]
            self._poison()

    def _chosen(self, choice: int) -> Twin | None:
        slots = sorted(self._twins)
        return self._twins[slots[choice % len(slots)]] if slots else None

    def _poison(self) -> None:
        """NaN in everything that holds nothing of a request: slots, returned host blocks, shared buffers, states."""
        store = self.engine.store
        store.poison()
        self.engine.provider.poison([slot for slot in range(SLOTS) if store.length(slot) == 0])

    def _compare(self, twin: Twin, result: StepResult, expected: torch.Tensor) -> None:
        assert result.request_id == twin.request.request_id and result.error is None and not result.finished
        assert result.seq_len == twin.alone.store.length(0) == self.engine.store.length(result.slot_id)
        assert result.logits is not None
        self._compare_logits(twin, result.logits, expected)
        assert result.token == int(expected.argmax())

    def _compare_logits(self, twin: Twin, logits: torch.Tensor, expected: torch.Tensor) -> None:
        logits, expected = logits.cpu(), expected.cpu()
        assert expected.isfinite().all()
        if twin.exact:
            assert torch.equal(logits, expected)
        else:
            allowed = self._tolerance * float(expected.abs().max())
            torch.testing.assert_close(logits, expected, atol=allowed, rtol=0)
