"""The engine: a request goes through chunked prefill and token-by-token decode over a KV store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from longgen.attention.backends import default_kernels
from longgen.errors import SlotError, UsageError
from longgen.kv.layout import KVLayout
from longgen.kv.sizes import StoreSizes
from longgen.kv.store import KVStore
from longgen.kv.supply import HostSupply
from longgen.kv.transfer import Event, Queue, open_transfer
from longgen.model.provider import Provider, StateSnapshot
from longgen.sampling import Sampler
from longgen.shortage import shortage_reported
from longgen.sparse.base import Phase, SparsePolicy

DEFAULT_CHUNK_TOKENS = 4096
TokenIds = Sequence[int] | torch.Tensor  # of a tensor: integers, one dimension


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine is built. Sizes are explained in `StoreSizes`; `auto` means what the machine and checkpoint offer.

    Attributes:
        device: auto, cpu, cuda or cuda:N.
        dtype: auto (the checkpoint's own), bfloat16, float16 or float32.
        block_size: tokens in a block.
        chunk_size: tokens in a prefill chunk, a multiple of the block size; None: about 4096.
        resident_blocks: first blocks of every layer kept on the device.
        ring_entries, ring_blocks: entries of the ring buffer and blocks in each.
        prefill_depth: layers whose chunk can wait for its offload.
        slots: requests alive at once.
        yarn_factor: how far YaRN stretches the trained window; None leaves that to the checkpoint.
    """

    device: str = "auto"
    dtype: str = "auto"
    block_size: int = 1024
    chunk_size: int | None = None
    resident_blocks: int = 0
    ring_entries: int = 4
    ring_blocks: int = 16
    prefill_depth: int = 2
    slots: int = 1
    yarn_factor: float | None = None

    def chunk_tokens(self) -> int:
        """The chunk size in effect. Raises UsageError if it is not a multiple of the block size."""
        if self.chunk_size is None:
            return max(1, DEFAULT_CHUNK_TOKENS // self.block_size) * self.block_size
        if self.chunk_size < 1 or self.chunk_size % self.block_size:
            raise UsageError(f"chunk size {self.chunk_size} is not a multiple of the block size {self.block_size}")
        return self.chunk_size

    def store_sizes(self) -> StoreSizes:
        """The sizes that a store is built with. Raises UsageError as `chunk_tokens`."""
        return StoreSizes.for_block(
            self.block_size,
            slots=self.slots,
            chunk_tokens=self.chunk_tokens(),
            ring_entries=self.ring_entries,
            run_blocks=self.ring_blocks,
            prefill_depth=self.prefill_depth,
            resident_blocks=self.resident_blocks,
        )

    def torch_dtype(self) -> torch.dtype:
        """The dtype named. Raises UsageError for another name."""
        names = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
        if self.dtype not in names:
            raise UsageError(f"dtype {self.dtype!r} is not one of auto, {', '.join(names)}")
        return names[self.dtype]

    def torch_device(self) -> torch.device:
        """The device meant. Raises UsageError if there is no such device."""
        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        kind, _, number = name.partition(":")
        if name != "cpu" and (kind != "cuda" or not (name == "cuda" or number.isdecimal())):
            raise UsageError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N")
        if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
            raise UsageError(f"device {name} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
        return torch.device(name)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where a slot was: its length and recurrent states. Restoring it undoes everything after."""

    length: int
    state: StateSnapshot


class Engine:
    """Runs requests in slots. A slot's tokens reach nothing outside it; `reset` ends a request."""

    def __init__(self, provider: Provider, store: KVStore) -> None:
        self.provider, self.store = provider, store
        self.chunk_tokens = store.sizes.chunk_tokens

    @classmethod
    def load(
        cls,
        folder: Path,
        options: EngineOptions,
        policy: SparsePolicy | None = None,
        supply: HostSupply | None = None,
        resize: Callable[[Provider, EngineOptions], EngineOptions] | None = None,
    ) -> Engine:
        """Loads a checkpoint folder and allocates the store's buffers.

        Args:
            supply: may have been making host memory for some time; None: it begins with the first request.
            resize: told of the loaded model, gives the options that hold for the buffers; None: `options`.

        Raises:
            UsageError: options that contradict each other or name a device that is not there.
            CheckpointError: a folder that is broken or of an unsupported kind.
            CapacityError: weights and buffers do not fit on the device.
        """
        device = options.torch_device()
        options.chunk_tokens()  # what is wrong with it is said before the weights are loaded
        dtype = None if options.dtype == "auto" else options.torch_dtype()
        with shortage_reported("loading the model", device):
            provider = Provider.load(
                folder, dtype=dtype, device=device, slots=options.slots, yarn_factor=options.yarn_factor
            )
            options = resize(provider, options) if resize else options
            return cls.over(provider, options, policy, supply)

    @classmethod
    def over(
        cls,
        provider: Provider,
        options: EngineOptions,
        policy: SparsePolicy | None = None,
        supply: HostSupply | None = None,
    ) -> Engine:
        """An engine over a model that is loaded already; its device and dtype hold, not those of `options`."""
        layout = KVLayout(
            provider.layer_specs(), provider.kv_heads, provider.head_dim, provider.dtype, options.block_size
        )
        sizes = options.store_sizes()
        kernels = default_kernels(provider.device)
        groups = provider.config.num_attention_heads // provider.kv_heads
        windowed = bool(layout.window_layers)
        kernels.prepare(provider.dtype, provider.head_dim, groups, provider.device, windowed=windowed)
        transfer = supply.transfer if supply else open_transfer(provider.device)
        store = KVStore(layout, sizes, transfer=transfer, kernels=kernels, policy=policy, supply=supply)
        return cls(provider, store)

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
    ) -> torch.Tensor:
        """Starts a slot afresh with a prompt.

        Args:
            tokens: the prompt's token ids.
            new_tokens: tokens that will follow, so that host memory is cut to fit exactly.
            on_chunk: called with the tokens done, after each chunk.

        Returns:
            Logits after the last token, float32 [vocab].
        """
        self.reset(slot_id)
        self.store.announce(slot_id, len(tokens) + new_tokens)
        return self.extend(tokens, slot_id, on_chunk=on_chunk)

    def extend(
        self, tokens: TokenIds, slot_id: int = 0, *, on_chunk: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Appends tokens to a slot, chunk by chunk; returns the logits after the last one, float32 [vocab]."""
        if not len(tokens):
            raise UsageError("there are no tokens to run: an empty prompt has no answer")
        ids = torch.as_tensor(tokens, dtype=torch.int64)
        transfer = self.store.transfer
        running: Event = None
        for start in range(0, len(ids), self.chunk_tokens):
            logits = self._run([slot_id], ids[None, start : start + self.chunk_tokens], Phase.PREFILL)
            # The host stays one chunk ahead of the device: enough to keep it busy, and the progress told is true.
            transfer.settle(running)
            running = transfer.record(Queue.COMPUTE)
            if on_chunk and start:
                on_chunk(start)
        transfer.settle(running)
        if on_chunk:
            on_chunk(len(ids))
        return logits[0]

    def decode_step(self, token: int, slot_id: int = 0) -> torch.Tensor:
        """Appends one token to a slot that holds some; returns the logits after it, float32 [vocab]."""
        if self.store.length(slot_id) == 0:
            raise SlotError(f"decode in slot {slot_id} before prefill: it holds no tokens")
        return self._run([slot_id], torch.tensor([[token]]), Phase.DECODE)[0]

    def snapshot(self, slot_id: int = 0) -> Snapshot:
        """Marks where a slot is, for `restore`."""
        return Snapshot(self.store.length(slot_id), self.provider.snapshot(slot_id))

    def restore(self, snapshot: Snapshot, slot_id: int = 0) -> None:
        """Cuts a slot back to where it was at `snapshot`."""
        self.store.truncate(slot_id, snapshot.length)
        self.provider.restore(slot_id, snapshot.state)

    def truncate(self, length: int, slot_id: int = 0) -> None:
        """Cuts a slot to its first `length` tokens. Models with recurrent layers need `restore`."""
        if self.provider.is_recurrent and length not in (0, self.store.length(slot_id)):
            raise SlotError(
                "this model has recurrent layers, whose state cannot be cut: take a snapshot and restore it"
            )
        self.store.truncate(slot_id, length)
        if length == 0:
            self.provider.reset(slot_id)

    def reset(self, slot_id: int = 0) -> None:
        """Ends a slot's request: nothing of it remains on the device or in the slot."""
        self.store.reset(slot_id)
        self.provider.reset(slot_id)

    def close(self) -> None:
        """Ends the threads that make host memory; an engine that is dropped ends them by itself, a moment later."""
        self.store.close()

    def reset_all(self) -> None:
        """Ends every slot's request."""
        for slot_id in range(len(self.store.slots)):
            self.reset(slot_id)

    def _run(self, slot_ids: list[int], ids: torch.Tensor, phase: Phase) -> torch.Tensor:
        """One pass of ids [B, n] over the slots; returns the logits of each one's last token, float32 [B, vocab]."""
        count = ids.shape[1]
        requests = [(slot_id, count) for slot_id in slot_ids]
        doing = f"running {count:,} tokens after {self.store.length(slot_ids[0]):,}"
        with shortage_reported(doing, self.provider.device), self.store.begin(requests, phase) as pass_:
            upload = self.store.transfer.upload
            positions = torch.tensor(pass_.lengths)[:, None] + torch.arange(count)
            logits = self.provider.forward(pass_, upload(ids), upload(positions))
            pass_.commit()
        return logits[:, -1]


class Generation:
    """The answer of one request as it is made: iterate for token ids, then read `finish_reason`."""

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
        self.finish_reason: str | None = None  # "stop" (a stop id came) or "length", once the iteration is over

    def __iter__(self) -> Iterator[int]:
        engine, slot_id = self._engine, self._slot_id
        logits = engine.prefill(self._prompt, slot_id, new_tokens=self._max_new_tokens, on_chunk=self._on_prefill)
        self._sampler.observe(self._prompt)
        for produced in range(self._max_new_tokens):
            token = self._sampler.sample(logits.cpu())
            if token in self._stop_ids:
                self.finish_reason = "stop"
                return
            yield token
            if produced + 1 < self._max_new_tokens:
                logits = engine.decode_step(token, slot_id)
        self.finish_reason = "length"
