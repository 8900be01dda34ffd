"""Why a plan has the chunk, ring and resident blocks that it has, in words."""

from __future__ import annotations

from dataclasses import dataclass

from longgen.kv.shape import KVShape
from longgen.kv.sizes import StoreSizes
from longgen.units import show_bytes, show_length


@dataclass(frozen=True, slots=True)
class ChunkReason:
    """What decided on a chunk.

    Attributes:
        chunk, prompt: tokens.
        given: the user gave the chunk.   largest: it is the most that is wanted.   larger_fits: one that would fit.
        shared: device and host have one memory.
        hidden_from: tokens of a chunk from which on attention hides loads; None where nothing is loaded.
    """

    chunk: int
    prompt: int
    given: bool
    largest: bool
    larger_fits: bool
    shared: bool
    hidden_from: float | None

    def text(self) -> str:
        return f"chunk {self.chunk:,}: {self._why()}"

    def _why(self) -> str:
        if self.given:
            return "given"
        if self.chunk >= self.prompt:
            return "the whole prompt"
        if self.shared:
            return "nothing is copied to another device"
        if self.hidden_from is None:
            return "larger passes start fewer kernels" if self.largest else "what fits"
        hidden = f"attention hides loads from {self.hidden_from:,.0f} tokens on"
        if self.largest and self.hidden_from > self.chunk:
            return f"the most; {hidden}"
        if self.largest:
            return f"{hidden}, and larger passes start fewer kernels"
        if self.larger_fits:
            return f"{hidden}, but a larger chunk would take more from the resident blocks than it gains"
        return f"what fits; {hidden}"


@dataclass(frozen=True, slots=True)
class ResidentReason:
    """What decided on resident blocks.

    Attributes:
        blocks, total: of a layer on the device, and of the request.
        given: the user gave them.   known: the device's memory is known.   attends: some layer keeps all tokens.
    """

    blocks: int
    total: int
    given: bool
    known: bool
    attends: bool

    def text(self) -> str:
        if not self.attends:
            return "no layer keeps all tokens"
        if self.blocks >= self.total:
            return "all of the KV cache stays on the device: nothing is copied"
        if not self.given and not self.known:
            return f"no block of {self.total:,} a layer is counted on the device, whose memory is not known"
        stay = f"{self.blocks:,} of {self.total:,} blocks a layer stay on the device"
        return f"{stay}: {'given' if self.given else 'what is left of its memory'}"


def ring_reason(sizes: StoreSizes, kv: KVShape) -> str:
    """Entries of a ring, and tokens and bytes of each."""
    run = show_length(sizes.run_blocks * kv.block_size)
    return f"ring {sizes.ring_entries} x {run} tokens ({show_bytes(sizes.run_blocks * kv.block_bytes)} each)"
