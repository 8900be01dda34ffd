"""What a store is made of: the sizes it was built with, and the parts a pass works with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from longgen.attention.kernels import Kernels
from longgen.errors import UsageError
from longgen.kv.device_buffers import DecodeBuffers, KVBuffer, PrefillBuffers, ResidentTier, RingBuffer, WindowBuffers
from longgen.kv.host_cache import HostCache
from longgen.kv.layout import KVLayout
from longgen.kv.transfer import Event, Queue, Transfer
from longgen.sparse.base import SparsePolicy


@dataclass(frozen=True, slots=True)
class StoreSizes:
    """Every size of a store's buffers; nothing else decides device memory.

    Attributes:
        slots: requests held at once.
        chunk_tokens: most tokens in one pass.
        ring_entries: loads that can be under way or waiting to be read.
        run_blocks: blocks in a ring entry, and in an extent of the host cache.
        prefill_depth: layers whose chunk can wait for its offload.
        decode_tokens: passes of up to this many tokens are staged in the decode buffer; larger ones are chunks.
        resident_blocks: first blocks of a slot kept on the device, the same for every layer or by layer index.
        window_keep: tokens a sliding-window layer can be truncated by, beyond the last pass.
    """

    slots: int = 1
    chunk_tokens: int = 4096
    ring_entries: int = 4
    run_blocks: int = 16
    prefill_depth: int = 2
    decode_tokens: int = 16
    resident_blocks: int | Mapping[int, int] = 0
    window_keep: int = 1024

    def check(self, layout: KVLayout) -> None:
        """Raises UsageError for sizes that cannot work."""
        for name, least in (("ring_entries", 2), ("run_blocks", 1), ("prefill_depth", 2), ("chunk_tokens", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} is {getattr(self, name)}: at least {least} is needed")
        if not 1 <= self.decode_tokens <= layout.block_size:
            raise UsageError(
                f"decode_tokens is {self.decode_tokens}: it must be 1 to the block size {layout.block_size}"
            )
        if min(self.resident_by_layer(layout).values(), default=0) < 0:
            raise UsageError("resident_blocks must not be negative")

    def resident_by_layer(self, layout: KVLayout) -> dict[int, int]:
        """Resident blocks of every full-attention layer."""
        blocks = self.resident_blocks
        if isinstance(blocks, int):
            return dict.fromkeys(layout.full_layers, blocks)
        return {layer: blocks.get(layer, 0) for layer in layout.full_layers}


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
    # (slot, layer) -> reached when every block of it that was sent to the host is there.
    offloaded: dict[tuple[int, int], Event] = field(default_factory=dict)

    def offload_tokens(self, slot_id: int, layer: int, start: int, stop: int, source: KVBuffer, base: int) -> None:
        """Copies tokens [start, stop) from `source`, whose first token is at position `base`, to their host places."""
        for piece in self.host.pieces(slot_id, layer, start, stop):
            span = slice(piece.start - base, piece.stop - base)
            self.transfer.offload(piece.k, source.k[:, span])
            self.transfer.offload(piece.v, source.v[:, span])

    def load_tokens(self, slot_id: int, layer: int, start: int, stop: int, target: KVBuffer, heads: slice) -> None:
        """Copies the KV heads `heads` of tokens [start, stop) from their host places to the start of `target`."""
        self.transfer.wait(Queue.LOAD, self.offloaded.get((slot_id, layer)))
        for piece in self.host.pieces(slot_id, layer, start, stop):
            span = slice(piece.start - start, piece.stop - start)
            self.transfer.load(target.k[heads, span], piece.k[heads])
            self.transfer.load(target.v[heads, span], piece.v[heads])

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
