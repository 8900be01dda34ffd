"""The engine: requests go through chunked prefill and token-by-token decode over a KV store, each in a slot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from longgen import batching
from longgen.allocation import RequestId, Ticket
from longgen.attention.backends import default_kernels
from longgen.batching import BatchedRequest, StepResult
from longgen.ends import do_all, ended_on_failure
from longgen.errors import SlotError, UsageError
from longgen.generation import Generation
from longgen.kv.layout import KVLayout
from longgen.kv.sizes import StoreSizes
from longgen.kv.store import KVStore
from longgen.kv.supply import HostSupply
from longgen.kv.transfer import Event, Queue, make_current, open_transfer
from longgen.metrics import Observer, RequestStats
from longgen.model.checkpoint import CheckedFolder
from longgen.model.provider import Provider, StateSnapshot
from longgen.options import EngineOptions
from longgen.sampling import Sampler
from longgen.shortage import shortage_reported
from longgen.slot_manager import SlotManager
from longgen.sparse.base import Phase, SparsePolicy
from longgen.token_ids import TokenIds, as_token_ids
from longgen.tracing import Trace, unlabelled
from longgen.turns import Turns
from longgen.units import show_count

__all__ = ["BatchedRequest", "Engine", "EngineOptions", "Generation", "Snapshot", "StepResult", "TokenIds"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where a request was: its length, how often it had been cut, and recurrent states. Restoring it undoes everything
    after, as long as the request is in its slot and was not cut below that length meanwhile."""

    ticket: Ticket
    length: int
    cuts: int
    state: StateSnapshot


class Engine:
    """Runs requests in slots. A slot's tokens reach nothing outside it, and the end of a request empties its slot.

    A slot is used under its number alone, or allocated to a request id, whose batched requests it then serves.
    An exception in a pass empties the slots that the pass served and no others. Misuse of a slot is a SlotError, and
    changes nothing.

    Threads: calls take turns, a prefill chunk by chunk, so threads that drive different slots get what each would get
    alone. One slot belongs to one thread at a time. All threads must have the same current CUDA stream, which they do
    unless they choose another.
    """

    def __init__(
        self,
        provider: Provider,
        open_store: Callable[[StoreSizes], KVStore],
        sizes: StoreSizes,
        slot_tokens: int | None = None,
        trace: Trace | None = None,
    ) -> None:
        """Made by `load` or `over`. `slot_tokens`: see EngineOptions."""
        self.chunk_tokens = sizes.chunk_tokens
        self._trace = trace
        self._label = trace.label if trace else unlabelled
        self.slots = SlotManager(provider, open_store, sizes, slot_tokens)
        self._turns = Turns(provider.device)

    @property
    def provider(self) -> Provider:
        """The model, with the recurrent states of this engine's slots."""
        return self.slots.provider

    @property
    def store(self) -> KVStore:
        """The KV of this engine's slots."""
        return self.slots.store

    @property
    def observer(self) -> Observer:
        """The figures of every request and of the run."""
        return self.slots.observer

    @classmethod
    def load(
        cls,
        folder: Path | CheckedFolder,
        options: EngineOptions,
        policy: SparsePolicy | None = None,
        supply: HostSupply | None = None,
        resize: Callable[[Provider, EngineOptions], EngineOptions] | None = None,
        trace: Trace | None = None,
    ) -> Engine:
        """Loads a checkpoint folder and allocates the store's buffers.

        Args:
            supply: may have been making host memory for some time; None: it begins with the first request.
            resize: told of the loaded model, gives the options that hold for the buffers; None: `options`.
            trace: told of every pass, to record some of them.

        Raises:
            UsageError: options that contradict each other or name a device that is not there.
            CheckpointError: a folder that is broken or of an unsupported kind.
            CapacityError: weights and buffers do not fit on the device.
        """
        device = options.torch_device()
        options.chunk_tokens()  # what is wrong with it is said before the weights are loaded
        dtype = None if options.dtype == "auto" else options.torch_dtype()
        with shortage_reported("loading the model", device):
            provider = Provider.load(folder, dtype=dtype, device=device, yarn_factor=options.yarn_factor)
            if options.compile:
                provider.compile((options.chunk_tokens(),))
            options = resize(provider, options) if resize else options
            return cls.over(provider, options, policy, supply, trace)

    @classmethod
    def over(
        cls,
        provider: Provider,
        options: EngineOptions,
        policy: SparsePolicy | None = None,
        supply: HostSupply | None = None,
        trace: Trace | None = None,
    ) -> Engine:
        """An engine over a model that is loaded already; its device and dtype hold, not those of `options`.

        Of the provider it takes the weights, which are never written. Engines over the same weights must not run at
        the same time.
        """
        layout = KVLayout(
            provider.layer_specs(), provider.kv_heads, provider.head_dim, provider.dtype, options.block_size
        )
        make_current(provider.device)  # kernels are tried on the device that is current
        kernels = default_kernels(provider.device)
        groups = provider.config.num_attention_heads // provider.kv_heads
        windowed = bool(layout.window_layers)
        kernels.prepare(provider.dtype, provider.head_dim, groups, provider.device, windowed=windowed)
        transfer = supply.transfer if supply else open_transfer(provider.device)
        open_store = partial(
            KVStore,
            layout,
            transfer=transfer,
            kernels=kernels,
            policy=policy,
            supply=supply,
            scrub=options.scrub,
            label=trace.label if trace else unlabelled,
        )
        return cls(provider, open_store, options.store_sizes(), options.slot_tokens, trace)

    # One request

    def generate(
        self,
        prompt: TokenIds,
        *,
        max_new_tokens: int,
        stop_ids: Collection[int],
        sampler: Sampler,
        slot_id: int = 0,
        on_prefill: Callable[[int], None] | None = None,
    ) -> Generation:
        """Starts a request in a slot. Nothing runs before the first token is asked for.

        Args:
            prompt: token ids, at least one.
            max_new_tokens: most tokens to generate.
            stop_ids: ids that end the answer and are not part of it.
            on_prefill: called with the prompt tokens done, after each chunk.
        """
        return Generation(self, prompt, max_new_tokens, frozenset(stop_ids), sampler, slot_id, on_prefill)

    def prefill(
        self,
        tokens: TokenIds,
        slot_id: int = 0,
        *,
        new_tokens: int = 0,
        on_chunk: Callable[[int], None] | None = None,
        request_id: RequestId | None = None,
    ) -> torch.Tensor:
        """Runs a prompt. A slot that no request id owns is started afresh; one that is owned must be empty.

        Args:
            tokens: the prompt's token ids.
            new_tokens: tokens that will follow, so that host memory is cut to fit exactly.
            on_chunk: called with the tokens done, after each chunk.
            request_id: whose prompt it is; refused where the slot is not its own.

        Returns:
            Logits after the last token, float32 [vocab].
        """
        return self.begin_request(Ticket(slot_id, request_id), self.token_ids(tokens), new_tokens, on_chunk)

    def extend(
        self, tokens: TokenIds, slot_id: int = 0, *, on_chunk: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Appends tokens to a slot, chunk by chunk; returns the logits after the last one, float32 [vocab]."""
        ids = self.token_ids(tokens)
        with self._turns.turn():
            ticket = self.slots.use(slot_id, len(ids))
        with ended_on_failure(partial(self.end_request, ticket)):
            return self._extend(ids, ticket, on_chunk)

    def fill_random(self, tokens: int, slot_id: int = 0, *, new_tokens: int = 0, seed: int = 0) -> None:
        """Makes a slot hold `tokens` tokens of random K, V and recurrent states, for decoding at a depth without a
        prefill; see KVStore.fill_random. In the figures it counts as one. new_tokens: as in `prefill`."""
        ticket = Ticket(slot_id)
        with self._turns.turn(), ended_on_failure(partial(self.slots.end, ticket)):
            self.slots.begin(ticket, tokens + new_tokens)
            generator = torch.Generator(self.provider.device).manual_seed(seed)
            self.store.fill_random(slot_id, tokens, generator)
            self.provider.fill_random(slot_id, generator)
            self.observer.passed([slot_id], Phase.PREFILL, tokens)

    def decode_step(self, token: int, slot_id: int = 0) -> torch.Tensor:
        """Appends one token to a slot that holds some; returns the logits after it, float32 [vocab]."""
        return self.decode_slots([slot_id], [token])[0]

    def decode_slots(self, slot_ids: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Appends one token to each of several slots in one pass; logits after each, float32 [slots, vocab]."""
        if len(slot_ids) != len(tokens):
            raise UsageError(f"{len(slot_ids)} slots and {len(tokens)} tokens: a step appends one token to each slot")
        with self._turns.turn():
            tickets = self.slots.step_tickets(slot_ids)
        return self.decode_requests(tickets, tokens)

    def snapshot(self, slot_id: int = 0) -> Snapshot:
        """Marks where a slot is, for `restore`."""
        with self._turns.turn():
            ticket = self.slots.use(slot_id)
            cuts = self.slots.allocator[slot_id].cuts.count
            return Snapshot(ticket, self.store.length(slot_id), cuts, self.provider.snapshot(slot_id))

    def restore(self, snapshot: Snapshot, slot_id: int = 0) -> None:
        """Cuts a slot back to where it was at `snapshot`.

        Raises SlotError if that was of another request, or if the slot was cut to less meanwhile.
        """
        with self._turns.turn(), self.slots.naming(slot_id):
            if slot_id != snapshot.ticket.slot_id:
                raise SlotError(f"a snapshot of slot {snapshot.ticket.slot_id} cannot be restored in slot {slot_id}")
            self.slots.check(snapshot.ticket)
            self.slots.check_kept(slot_id, snapshot.length, snapshot.cuts)
            self.slots.cut(slot_id, snapshot.length)
            self.provider.restore(slot_id, snapshot.state)

    def truncate(self, length: int, slot_id: int = 0) -> None:
        """Cuts a slot to its first `length` tokens. Models with recurrent layers need `restore`."""
        with self._turns.turn(), self.slots.naming(slot_id):
            if self.provider.is_recurrent and length not in (0, self.store.length(slot_id)):
                raise SlotError(
                    f"{self.slots.named(slot_id)} cannot be cut to {length} tokens: this model has recurrent layers, "
                    "whose state cannot be cut: take a snapshot and restore it"
                )
            self.slots.cut(slot_id, length)
            if length == 0:
                self.provider.reset(slot_id)

    # Several requests

    def batch_prefill(self, requests: Sequence[BatchedRequest]) -> list[StepResult]:
        """Prefills each request in its slot, one after another, and chooses its first token.

        A request that fails has finished with its error, and the others are still prefilled.

        Returns:
            A result for each request, in their order.

        Raises:
            SlotError: before anything has run: a slot that is not the request's or is there twice, a request that was
                prefilled already, more tokens than its slot was planned for.
        """
        return batching.prefill(self, requests)

    def batch_decode_step(self, requests: Sequence[BatchedRequest]) -> list[StepResult]:
        """Runs the last token of every request that is not finished, in one pass, and chooses each one's next token.

        All layers but attention run once for the whole batch; attention runs slot by slot. A request that has
        finished does not run, and its last token is in its result again.

        Returns:
            A result for each request, in their order.

        Raises:
            SlotError: before anything has run: as batch_prefill, and for a request that was not prefilled.
        """
        return batching.decode_step(self, requests)

    def allocate_batch_slots(self, n: int) -> tuple[int, ...]:
        """Makes the engine hold `n` slots, all empty and free; returns their ids.

        Raises:
            SlotError: a slot belongs to a request or holds tokens.
            CapacityError: the device has no room for them; the engine then has the slots that it had.
        """
        with self._turns.turn():
            self.slots.reopen(n)
            return tuple(range(n))

    def allocate_slot(self, request_id: RequestId) -> int:
        """Gives a free slot to a request; returns its id. Raises SlotError if it has one, or none is free."""
        with self._turns.turn():
            return self.slots.allocator.allocate(request_id)

    def release_slot(self, slot_id: int) -> None:
        """Empties a slot and takes it from its request. Raises SlotError if it belongs to none."""
        with self._turns.turn():
            self.slots.release(slot_id)

    # Ends of requests

    def reset(self, slot_id: int = 0) -> None:
        """Ends a slot's request: nothing of it remains in the slot. A slot that is allocated stays so."""
        with self._turns.turn():
            self.slots.empty(slot_id)

    def close(self) -> None:
        """Ends every request, and the threads that make host memory.

        An engine that is dropped ends these by itself, a moment later.
        """
        with self._turns.turn():
            do_all(self.slots.empty_all, self.store.close)

    def reset_all(self) -> None:
        """Ends every request, takes every slot from its owner, and clears the run's figures."""
        with self._turns.turn():
            self.slots.clear()

    # For whoever keeps a request's ticket: it reaches that request and no other

    def begin_request(
        self, ticket: Ticket, ids: torch.Tensor, new_tokens: int, on_chunk: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """`prefill` of ids [n] for the request that this new ticket is of; a failure ends it."""
        with ended_on_failure(partial(self.end_request, ticket)):
            with self._turns.turn():
                self.slots.begin(ticket, len(ids) + new_tokens)
            return self._extend(ids, ticket, on_chunk)

    def decode_requests(self, tickets: Sequence[Ticket], tokens: Sequence[int]) -> torch.Tensor:
        """`decode_slots` for requests that must still be in their slots; a failure in the pass ends them."""
        if self._trace:
            self._trace.step()
        return self._run(tickets, self.token_ids(tokens)[:, None], Phase.DECODE)

    def end_request(self, ticket: Ticket) -> RequestStats | None:
        """Ends the request with this ticket, unless it has ended; returns its figures. Never waits for another call."""
        stats = self.observer.request(ticket.slot_id) if self.slots.holds(ticket) else None
        self._turns.later(partial(self.slots.end, ticket))
        return stats

    def token_ids(self, tokens: TokenIds) -> torch.Tensor:
        """Token ids as int64 [n]; see `as_token_ids`."""
        return as_token_ids(tokens, self.provider.vocab_size)

    def _extend(self, ids: torch.Tensor, ticket: Ticket, on_chunk: Callable[[int], None] | None) -> torch.Tensor:
        transfer = self.store.transfer
        running: Event = None
        for start in range(0, len(ids), self.chunk_tokens):
            if self._trace:
                self._trace.chunk(-(-(len(ids) - start) // self.chunk_tokens))
            logits = self._run([ticket], ids[None, start : start + self.chunk_tokens], Phase.PREFILL)
            # The host stays one chunk ahead of the device: enough to keep it busy, and the progress told is true.
            transfer.settle(running)
            running = transfer.record(Queue.COMPUTE)
            if on_chunk and start:
                on_chunk(start)
        transfer.settle(running)
        self.slots.seen(ticket)
        if on_chunk:
            on_chunk(len(ids))
        return logits[0]

    def _run(self, tickets: Sequence[Ticket], ids: torch.Tensor, phase: Phase) -> torch.Tensor:
        """One pass of ids [B, n] for the requests; returns the logits of each one's last token, float32 [B, vocab].

        A SlotError before the pass changes nothing; what fails in the pass ends its requests.
        """
        slot_ids, count = [ticket.slot_id for ticket in tickets], ids.shape[1]
        with self._turns.turn():
            if phase is Phase.DECODE:
                self.slots.check_step(tickets)
            else:
                self.slots.check(tickets[0])
            with ended_on_failure(partial(self.slots.end, *tickets)):
                doing = f"running {show_count(count, 'token')} after {self.store.length(slot_ids[0]):,}"
                requests = [(slot_id, count) for slot_id in slot_ids]
                with (
                    self._label(f"{phase.value}: {doing}"),
                    shortage_reported(doing, self.provider.device),
                    self.store.begin(requests, phase) as pass_,
                ):
                    upload = self.store.transfer.upload
                    positions = torch.tensor(pass_.lengths)[:, None] + torch.arange(count)
                    logits = self.provider.forward(pass_, upload(ids), upload(positions))
                    pass_.commit()
                self.observer.passed(slot_ids, phase, count)
        return logits[:, -1]
