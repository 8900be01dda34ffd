"""How an engine is built."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longgen.errors import UsageError
from longgen.kv.shape import check_block
from longgen.kv.sizes import StoreSizes, check_chunk
from longgen.kv.transfer import with_index

DEFAULT_CHUNK_TOKENS = 4096


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
        slot_tokens: tokens that each slot was planned for, prompt and answer; more are refused. None: no such limit.
        compile: whether norms, rotary angles and MLPs are compiled for full chunks.
        scrub: whether a reset also overwrites host blocks and the buffers that all slots share.
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
    slot_tokens: int | None = None
    compile: bool = False
    scrub: bool = False

    def chunk_tokens(self) -> int:
        """The chunk size in effect. Raises UsageError if it is not a multiple of the block size, or if that is none."""
        check_block(self.block_size)
        if self.chunk_size is None:
            return max(1, DEFAULT_CHUNK_TOKENS // self.block_size) * self.block_size
        check_chunk(self.chunk_size, self.block_size)
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
        """The device meant; of CUDA with its index, so that it names one card whatever becomes current later.

        Raises UsageError if there is no such device.
        """
        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        kind, _, number = name.partition(":")
        if name != "cpu" and (kind != "cuda" or not (name == "cuda" or number.isdecimal())):
            raise UsageError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N")
        if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
            raise UsageError(f"device {name} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
        return with_index(torch.device(name))
