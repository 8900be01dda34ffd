"""Memory: pinned exactly and given back, pageable where that is refused, and no more of it than the sizes say."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from longgen.attention.backends import default_kernels
from longgen.engine import Engine, EngineOptions
from longgen.kv.layout import AttentionLayer, KVLayout
from longgen.kv.parts import StoreSizes
from longgen.kv.pinned import PinnedMemory, cuda_register, cuda_unregister
from longgen.kv.store import KVStore
from longgen.kv.supply import HostSupply
from longgen.kv.transfer import CudaTransfer, Transfer, make_current
from tests.checkpoints import Build, random_ids
from tests.kv.mirror import Attended, Mirror, run_pass

ODD_SIZE = 37 * 4096 + 123
NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered
ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered
REFUSED = 1  # cudaErrorInvalidValue


def unregister_code(address: int) -> int:
    """cudaHostUnregister's error code, which is cleared."""
    code = int(torch.cuda.cudart().cudaHostUnregister(address))
    if code:
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    return code


@pytest.mark.cuda
def test_a_device_named_without_a_number_can_be_made_current() -> None:
    make_current(torch.device("cuda"))
    assert torch.cuda.current_device() == 0


@pytest.mark.cuda
def test_memory_is_pinned_and_of_the_size_asked_for() -> None:
    memory = PinnedMemory().allocate(ODD_SIZE)
    assert memory.dtype is torch.uint8 and memory.shape == (ODD_SIZE,)
    assert memory.untyped_storage().nbytes() == ODD_SIZE
    assert memory.is_pinned()
    assert memory[4096:].is_pinned()
    assert not memory.any()


@pytest.mark.cuda
def test_what_is_copied_into_and_out_of_it_is_right() -> None:
    memory = PinnedMemory().allocate(1 << 24)
    sent = torch.randint(0, 256, (1 << 24,), dtype=torch.uint8, device="cuda")
    memory.copy_(sent, non_blocking=True)
    back = torch.empty_like(sent)
    back.copy_(memory, non_blocking=True)
    assert torch.equal(back, sent)
    assert torch.equal(memory, sent.cpu())


@pytest.mark.cuda
def test_memory_is_unpinned_when_its_last_view_goes() -> None:
    codes: list[int] = []
    memory = PinnedMemory(unregister=lambda address: codes.append(unregister_code(address))).allocate(ODD_SIZE)
    address, view = memory.data_ptr(), memory[10:20]
    del memory
    gc.collect()
    assert not codes and view.is_pinned()
    del view
    gc.collect()
    assert codes == [0]
    assert unregister_code(address) == NOT_REGISTERED
    assert float(torch.ones(8, device="cuda").sum()) == 8.0


@pytest.mark.cuda
def test_a_refusal_by_cuda_itself_leaves_no_error_behind(caplog: pytest.LogCaptureFixture) -> None:
    addresses: list[int] = []
    codes: list[int] = []

    def register_twice(address: int, nbytes: int) -> int:
        assert cuda_register(address, nbytes) == 0
        addresses.append(address)
        codes.append(cuda_register(address, nbytes))
        return codes[-1]

    pinned = PinnedMemory(register=register_twice)
    with caplog.at_level(logging.WARNING, logger="longgen"):
        memories = [pinned.allocate(ODD_SIZE) for _ in range(3)]
    assert codes == [ALREADY_REGISTERED]  # and it was not tried again
    assert float(torch.ones(8, device="cuda").sum()) == 8.0  # the next launch is not told of the refusal
    assert pinned.refused is not None and f"{ODD_SIZE:,} bytes" in pinned.refused
    assert len(caplog.records) == 1 and "pin" in caplog.records[0].getMessage()
    assert not memories[1].is_pinned()
    cuda_unregister(addresses[0])


class InjectedTransfer(CudaTransfer):
    """Registers host memory through a function of the test's."""

    def __init__(
        self,
        device: torch.device,
        register: Callable[[int, int], int],
        unregister: Callable[[int], None] = cuda_unregister,
    ) -> None:
        super().__init__(device)
        self.memory = PinnedMemory(register=register, unregister=unregister)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        return self.memory.allocate(nbytes)


def outputs(transfer: Transfer) -> tuple[list[torch.Tensor], KVStore]:
    """Of chunks and decode steps over host blocks, each checked against the mirror by the caller of the mirror."""
    device = transfer.device
    layout = KVLayout((AttentionLayer(0), AttentionLayer(1)), 2, 64, torch.bfloat16, 64)
    store = KVStore(
        layout,
        StoreSizes(chunk_tokens=512, ring_entries=2, run_blocks=4),
        transfer=transfer,
        kernels=default_kernels(device),
    )
    done: list[Attended] = []
    mirror = Mirror(
        layout, groups=2, generator=torch.Generator(device).manual_seed(0), on_attend=done.append, sharpness=2.0
    )
    store.announce(0, 2060)
    for n in (512, 512, 500, 512, *[1] * 24):
        run_pass(store, mirror, [(0, n)], [n])
    transfer.drain()
    return [attended.out for attended in done], store


@pytest.mark.cuda
def test_pageable_memory_gives_the_same_results_after_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cuda")
    expected, _ = outputs(CudaTransfer(device))
    transfer = InjectedTransfer(device, lambda address, nbytes: REFUSED)
    with caplog.at_level(logging.WARNING, logger="longgen"):
        got, _ = outputs(transfer)
    assert len(caplog.records) == 1
    assert not transfer.allocate_host(4096).is_pinned()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.cuda
def test_host_memory_in_use_is_the_bytes_of_the_kv_and_pinned() -> None:
    transfer = CudaTransfer(torch.device("cuda"))
    _, store = outputs(transfer)
    blocks = -(-2060 // 64)
    assert store.host_bytes == blocks * 64 * 2 * 2 * 64 * 2 * 2  # tokens, layers, KV heads, head size, bytes, K and V
    registered: dict[int, int] = {}

    def register(address: int, nbytes: int) -> int:
        registered[address] = nbytes
        return cuda_register(address, nbytes)

    _, store = outputs(InjectedTransfer(torch.device("cuda"), register))
    assert sum(registered.values()) == store.host_bytes


class Registry:
    """Registers with CUDA, and keeps what is registered and by which threads."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.threads: set[str] = set()

    def register(self, address: int, nbytes: int) -> int:
        code = cuda_register(address, nbytes)
        self.live[address] = nbytes
        self.threads.add(threading.current_thread().name)
        return code

    def unregister(self, address: int) -> None:
        cuda_unregister(address)
        del self.live[address]


def wait_for_threads() -> None:
    """Until no thread makes host memory any more."""
    end = time.monotonic() + 60
    while any(thread.name == "longgen-supply" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.cuda
def test_memory_made_in_the_background_is_pinned_on_every_device(build: Build) -> None:
    """Also on a card that is not the first, where a thread must not make a context on the first."""
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    with torch.cuda.device(device):
        registry = Registry()
        transfer = InjectedTransfer(device, registry.register, registry.unregister)
        supply = HostSupply(transfer, threads=3)
        pieces = supply.order([ODD_SIZE] * 12)
        wait_for_threads()
        memories = supply.collect(pieces)
        assert registry.threads == {"longgen-supply"}
        assert all(memory.is_pinned() for memory in memories)
        sent = torch.randint(0, 256, (ODD_SIZE,), dtype=torch.uint8, device=device)
        for memory in memories:
            memory.copy_(sent, non_blocking=True)
        torch.cuda.synchronize(device)
        assert all(torch.equal(memory, sent.cpu()) for memory in memories)
        del pieces, memories, memory
        gc.collect()
        assert not registry.live


@pytest.mark.cuda
def test_an_engine_that_is_dropped_unregisters_its_host_memory(build: Build) -> None:
    device = torch.device("cuda")
    registry = Registry()
    supply = HostSupply(InjectedTransfer(device, registry.register, registry.unregister))
    options = EngineOptions(device="cuda", dtype="bfloat16", block_size=256, chunk_size=1024, ring_blocks=4)
    engine = Engine.load(build("qwen3", max_position=65536), options, supply=supply)
    engine.prefill(random_ids(5000)[0].tolist(), new_tokens=3)
    engine.decode_step(5)
    assert sum(registry.live.values()) == engine.store.host_bytes > 0
    engine.store.announce(0, 60_000)  # and dropped while this is being made
    del engine, supply
    gc.collect()
    wait_for_threads()
    gc.collect()
    assert not registry.live
    assert float(torch.ones(8, device="cuda").sum()) == 8.0


@pytest.mark.cuda
def test_a_refusal_in_a_background_thread_is_no_error_of_a_later_launch(caplog: pytest.LogCaptureFixture) -> None:
    registered = []

    def register_twice(address: int, nbytes: int) -> int:
        if cuda_register(address, nbytes) == 0:
            registered.append(address)
        return cuda_register(address, nbytes)

    transfer = InjectedTransfer(torch.device("cuda"), register_twice)
    supply = HostSupply(transfer, threads=3)
    with caplog.at_level(logging.WARNING, logger="longgen"):
        pieces = supply.order([ODD_SIZE] * 12)
        wait_for_threads()
    memories = supply.collect(pieces)
    assert len(caplog.records) == 1 and transfer.memory.refused is not None
    assert float(torch.ones(8, device="cuda").sum()) == 8.0
    assert {memory.data_ptr() for memory in memories} >= set(registered)
    for address in registered:
        cuda_unregister(address)
    torch.cuda.synchronize()


def open_small_blocks(folder: Path, device: torch.device) -> Engine:
    options = EngineOptions(
        device=str(device),
        dtype="bfloat16",
        block_size=256 if device.type == "cuda" else 16,
        chunk_size=1024 if device.type == "cuda" else 64,
        ring_blocks=4,
    )
    return Engine.load(folder, options)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen3_next"])
def test_host_memory_of_a_request_is_its_blocks(build: Build, device: torch.device, kind: str) -> None:
    engine = open_small_blocks(build(kind, max_position=65536), device)
    layout = engine.store.layout
    prompt, answer = (10_200, 30) if device.type == "cuda" else (700, 30)
    engine.prefill(random_ids(prompt)[0].tolist(), new_tokens=answer)
    for token in range(3, 3 + answer):
        engine.decode_step(token)
    kv_bytes = (prompt + answer) * len(layout.full_layers) * layout.token_bytes
    assert engine.store.host_bytes == layout.blocks_for(prompt + answer) * len(layout.full_layers) * layout.block_bytes
    assert kv_bytes <= engine.store.host_bytes <= 1.02 * kv_bytes


@pytest.fixture
def cuda_peak() -> Iterator[Callable[[Callable[[], object]], int]]:
    """Most bytes allocated on the device while a function runs."""

    def peak(function: Callable[[], object]) -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    yield peak


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen3_next"])
def test_device_memory_does_not_grow_with_the_prompt(
    build: Build, cuda_peak: Callable[[Callable[[], object]], int], kind: str
) -> None:
    engine = open_small_blocks(build(kind, max_position=65536), torch.device("cuda"))

    def request(tokens: int) -> None:
        engine.prefill(random_ids(tokens)[0].tolist())
        for token in range(3, 9):
            engine.decode_step(token)

    request(4096)
    short, long = cuda_peak(lambda: request(4096)), cuda_peak(lambda: request(32_768))
    assert abs(long - short) <= 0.01 * short, f"{short:,} bytes for 4K tokens, {long:,} for 32K"
    kv_bytes = 28_672 * len(engine.store.layout.full_layers) * engine.store.layout.token_bytes
    assert kv_bytes > 0.02 * short  # of the tokens more: KV left on the device would show
