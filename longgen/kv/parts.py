"""The parts of a store that its passes work with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from longgen.attention.kernels import Kernels
from longgen.kv.counters import Counters
from longgen.kv.device_buffers import DecodeBuffers, KVBuffer, PrefillBuffers, ResidentTier, RingBuffer, WindowBuffers
from longgen.kv.host_cache import HostCache
from longgen.kv.layout import KVLayout
from longgen.kv.sizes import StoreSizes
from longgen.kv.transfer import Event, Queue, Transfer
from longgen.sparse.base import SparsePolicy
from longgen.tracing import Label, unlabelled


@dataclass(slots=True)
class StoreParts:
    """The parts of one store, shared by its passes."""

    layout: KVLayout
    sizes: StoreSizes
    transfer: Transfer
    kernels: Kernels
    policy: SparsePolicy
    host: HostCache
    ring: RingBuffer
    prefill: PrefillBuffers
    decode: DecodeBuffers
    resident: ResidentTier
    windows: WindowBuffers
    counters: tuple[Counters, ...]  # by slot
    # (slot, layer) -> reached when every block of it that was sent to the host is there.
    offloaded: dict[tuple[int, int], Event] = field(default_factory=dict)
    label: Label = unlabelled  # of ranges in a trace

    def keep(self, slot_id: int, buffer: KVBuffer, at: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copies k, v [kv_heads, n, head_dim], on the device already, into `buffer` from its token `at` on."""
        span = slice(at, at + k.shape[1])
        buffer.k[:, span] = k
        buffer.v[:, span] = v
        self.counters[slot_id].kept(2 * k.nbytes, 2)

    def offload_tokens(self, slot_id: int, layer: int, start: int, stop: int, source: KVBuffer, base: int) -> None:
        """Copies tokens [start, stop) from `source`, whose first token is at position `base`, to their host places."""
        with self.label(f"offload tokens {start} to {stop} of layer {layer}"):
            for piece in self.host.pieces(slot_id, layer, start, stop):
                span = slice(piece.start - base, piece.stop - base)
                k, v = source.k[:, span], source.v[:, span]
                self.transfer.offload(piece.k, k)
                self.transfer.offload(piece.v, v)
                self.counters[slot_id].offloaded(2 * k.nbytes, 2 * self.transfer.copies(piece.k, k))

    def load_tokens(self, slot_id: int, layer: int, start: int, stop: int, target: KVBuffer, heads: slice) -> None:
        """Copies the KV heads `heads` of tokens [start, stop) from their host places to the start of `target`."""
        self.transfer.wait(Queue.LOAD, self.offloaded.get((slot_id, layer)))
        with self.label(f"load tokens {start} to {stop} of layer {layer}"):
            for piece in self.host.pieces(slot_id, layer, start, stop):
                span = slice(piece.start - start, piece.stop - start)
                k, v = piece.k[heads], piece.v[heads]
                self.transfer.load(target.k[heads, span], k)
                self.transfer.load(target.v[heads, span], v)
                self.counters[slot_id].loaded(2 * k.nbytes, 2 * self.transfer.copies(target.k[heads, span], k))

    def forget_offloads(self, slot_id: int) -> None:
        """Drops a slot's offload events; every queue was drained."""
        for layer in self.layout.full_layers:
            self.offloaded.pop((slot_id, layer), None)

    def restore_open_block(self, slot_id: int, length: int) -> None:
        """Brings the open block of a slot of `length` tokens from the host to the decode buffer, where it belongs
        there and is not empty. Everything that read the decode buffer must be on the COMPUTE queue already."""
        block = length // self.layout.block_size
        start = block * self.layout.block_size
        layers = [layer for layer in self.layout.full_layers if block >= self.resident.blocks[layer]]
        if start == length or not layers:
            return
        self.transfer.wait(Queue.LOAD, self.transfer.record(Queue.COMPUTE))
        for layer in layers:
            # The offload that last read the decode buffer is one that load_tokens waits for.
            self.load_tokens(slot_id, layer, start, length, self.decode.get(slot_id, layer), slice(None))
        self.transfer.wait(Queue.COMPUTE, self.transfer.record(Queue.LOAD))
