"""Pinned memory with injected registration: what is registered, released, and said when it is refused."""

from __future__ import annotations

import gc
import logging
import mmap
from pathlib import Path

import pytest
import torch

from longgen.kv.pinned import PinnedMemory

SIZES = [1, 4096, 4097, 3 * 4096 + 5, 1 << 20]


class Registry:
    """Stands in for CUDA: keeps what is registered, and refuses when told to."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.asked: list[tuple[int, int]] = []
        self.live: dict[int, int] = {}
        self.mapped_at_release: list[bool] = []

    def register(self, address: int, nbytes: int) -> int:
        self.asked.append((address, nbytes))
        if not self.code:
            self.live[address] = nbytes
        return self.code

    def unregister(self, address: int) -> None:
        self.mapped_at_release.append(is_mapped(address))
        del self.live[address]

    def memory(self) -> PinnedMemory:
        return PinnedMemory(self.register, self.unregister)


def is_mapped(address: int) -> bool:
    """Whether the process has memory at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return True
    return False


@pytest.mark.parametrize("nbytes", SIZES)
def test_exactly_what_is_asked_for_is_registered_and_zero(nbytes: int) -> None:
    registry = Registry()
    memory = registry.memory().allocate(nbytes)
    assert memory.dtype is torch.uint8 and memory.shape == (nbytes,)
    assert memory.untyped_storage().nbytes() == nbytes
    assert registry.live == {memory.data_ptr(): nbytes}
    assert not memory.any()
    memory.fill_(7)
    assert bool((memory == 7).all())


def test_memory_stays_registered_while_any_view_of_it_lives() -> None:
    registry = Registry()
    memory = registry.memory().allocate(1 << 16)
    view = memory.view(torch.float32)[100:200]
    del memory
    gc.collect()
    assert len(registry.live) == 1
    view.fill_(1.5)
    del view
    gc.collect()
    assert not registry.live


def test_pieces_are_released_one_by_one() -> None:
    registry = Registry()
    pinned = registry.memory()
    memories = [pinned.allocate(nbytes) for nbytes in SIZES]
    assert sorted(registry.live.values()) == sorted(SIZES)
    del pinned
    while memories:
        memories.pop()
        gc.collect()
        assert len(registry.live) == len(memories)


def test_memory_is_unregistered_while_it_is_still_mapped() -> None:
    """Unmapped first, its address could be mapped again, by another thread, before it is unregistered."""
    registry = Registry()
    memory = registry.memory().allocate(1 << 16)
    del memory
    gc.collect()
    assert registry.mapped_at_release == [True]


def test_a_refusal_leaves_pageable_memory_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(code=2)
    pinned = registry.memory()
    assert pinned.refused is None
    with caplog.at_level(logging.WARNING, logger="longgen"):
        memories = [pinned.allocate(12_345) for _ in range(3)]
    assert len(registry.asked) == 1  # what was refused once is not asked for again
    assert pinned.refused is not None and "12,345 bytes" in pinned.refused and "error 2" in pinned.refused
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "12,345 bytes" in caplog.records[0].getMessage() and "ulimit -l" in caplog.records[0].getMessage()
    for memory in memories:
        memory.fill_(3)
        assert bool((memory == 3).all())
    del memory, memories
    gc.collect()
    assert not registry.mapped_at_release  # what was not registered is not unregistered


def test_a_later_refusal_keeps_what_was_pinned_before() -> None:
    registry = Registry()
    pinned = registry.memory()
    first = pinned.allocate(4096)
    registry.code = 2
    second = pinned.allocate(8192)
    assert registry.live == {first.data_ptr(): 4096}
    del second
    gc.collect()
    assert registry.live == {first.data_ptr(): 4096}
    del first
    gc.collect()
    assert not registry.live


def test_no_bytes_are_no_registration() -> None:
    registry = Registry()
    assert registry.memory().allocate(0).shape == (0,)
    assert not registry.asked


def test_a_kernel_without_huge_pages_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutHugePages(mmap.mmap):
        def madvise(self, *_: object) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", WithoutHugePages)
    assert Registry().memory().allocate(4096).numel() == 4096
