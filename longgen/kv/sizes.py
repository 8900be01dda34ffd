"""Every size of a store's buffers, and the bytes they come to. Without torch, so that a plan can be made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longgen.errors import UsageError
from longgen.kv.shape import KVShape

MOST_DECODE_TOKENS = 16  # staged in the decode buffer; a larger pass is a chunk


def window_capacity(window: int, pass_tokens: int, keep: int) -> int:
    """Tokens in the circular buffer of a sliding-window layer.

    The window's past, the largest pass and `keep` tokens more, so that no pass overwrites what it, its abort, or a
    truncation by up to `keep` tokens still needs.
    """
    return window - 1 + pass_tokens + keep


def window_scratch(windows: tuple[int, ...], pass_tokens: int) -> int:
    """Tokens in the scratch buffer in which a sliding-window layer's keys are put in order: the longest it reads."""
    return max((window - 1 + pass_tokens for window in windows), default=0)


def check_chunk(chunk_tokens: int, block_size: int) -> None:
    """Raises UsageError for a chunk that is no whole number of blocks."""
    if chunk_tokens < 1 or chunk_tokens % block_size:
        raise UsageError(f"chunk size {chunk_tokens} is not a multiple of the block size {block_size}")


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Bytes of a store's device buffers. window: circular buffers and scratch of sliding-window layers."""

    ring: int
    prefill: int
    decode: int
    window: int
    resident: int

    @property
    def total(self) -> int:
        return self.ring + self.prefill + self.decode + self.window + self.resident


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

    @classmethod
    def for_block(cls, block_size: int, **chosen: Any) -> StoreSizes:
        """Sizes of which `chosen` are given and the decode margin and the window's slack follow from the block."""
        return cls(decode_tokens=min(MOST_DECODE_TOKENS, block_size), window_keep=block_size, **chosen)

    def check(self, shape: KVShape) -> None:
        """Raises UsageError for sizes that cannot work."""
        for name, least in (("ring_entries", 2), ("run_blocks", 1), ("prefill_depth", 2), ("chunk_tokens", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} is {getattr(self, name)}: at least {least} is needed")
        if not 1 <= self.decode_tokens <= shape.block_size:
            raise UsageError(
                f"decode_tokens is {self.decode_tokens}: it must be 1 to the block size {shape.block_size}"
            )
        if min(self.resident_by_layer(shape).values(), default=0) < 0:
            raise UsageError("resident_blocks must not be negative")

    def resident_by_layer(self, shape: KVShape) -> dict[int, int]:
        """Resident blocks of every full-attention layer."""
        blocks = self.resident_blocks
        if isinstance(blocks, int):
            return dict.fromkeys(shape.full_layers, blocks)
        return {layer: blocks.get(layer, 0) for layer in shape.full_layers}

    @property
    def pass_tokens(self) -> int:
        """Most tokens in a pass of any kind."""
        return max(self.chunk_tokens, self.decode_tokens)

    def device_bytes(self, shape: KVShape) -> DeviceBytes:
        """What the store allocates on the device, to the byte."""
        layers = len(shape.full_layers)
        windows = tuple(layer.window or 0 for layer in shape.window_layers)
        held = sum(window_capacity(window, self.pass_tokens, self.window_keep) for window in windows)
        return DeviceBytes(
            ring=self.ring_entries * self.run_blocks * shape.block_bytes,
            prefill=self.prefill_depth * self.chunk_tokens * shape.token_bytes,
            decode=self.slots * layers * (shape.block_size + self.decode_tokens) * shape.token_bytes,
            window=(self.slots * held + window_scratch(windows, self.pass_tokens)) * shape.token_bytes,
            resident=self.slots * sum(self.resident_by_layer(shape).values()) * shape.block_bytes,
        )

    def host_bytes(self, shape: KVShape, tokens: int) -> int:
        """Host memory for the blocks of one slot whose request was announced with `tokens` tokens, to the byte."""
        blocks = shape.blocks_for(tokens)
        resident = self.resident_by_layer(shape).values()
        return sum(max(0, blocks - count) for count in resident) * shape.block_bytes
