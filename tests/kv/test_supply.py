"""Host memory made ahead: in order, exactly, by threads that end; and what is left when one of them fails."""

from __future__ import annotations

import gc
import logging
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from longgen.errors import CapacityError
from longgen.kv import extents
from longgen.kv.extents import PIECE_BYTES, ExtentCutter
from longgen.kv.pinned import PinnedMemory
from longgen.kv.shape import AttentionLayer, KVShape
from longgen.kv.sizes import StoreSizes
from longgen.kv.store import KVStore
from longgen.kv.supply import HostSupply
from tests.kv.lazy_transfer import LazyTransfer
from tests.kv.test_store import make_mirror, make_store, run_pass

BLOCK_BYTES = 4 * 2 * 2 * 8 * 4  # of make_store, one layer: tokens, K and V, KV heads, head size, bytes
PATIENCE = 600.0  # seconds, for what must come


class GatedTransfer(LazyTransfer):
    """Gives memory only while its gate is open, and notes what was asked for."""

    def __init__(self, *, open_gate: bool = False) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.asked: list[int] = []
        self.fails: Callable[[int], BaseException | None] = lambda nbytes: None
        if open_gate:
            self.gate.set()

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        self.asked.append(nbytes)
        assert self.gate.wait(PATIENCE)
        if failure := self.fails(nbytes):
            raise failure
        return super().allocate_host(nbytes)


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "longgen-supply"]


def until(condition: Callable[[], bool]) -> None:
    """Waits for what must become true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.001)


def open_when(transfer: GatedTransfer, condition: Callable[[], bool]) -> None:
    """Opens the gate once something has become true, which who waits for what is behind the gate brings about."""

    def opener() -> None:
        until(condition)
        transfer.gate.set()

    threading.Thread(target=opener).start()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    until(lambda: not workers())


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer of an extent of make_store's two blocks is a piece of its own."""
    monkeypatch.setattr(extents, "PIECE_BYTES", 2 * BLOCK_BYTES)


def store_with_threads(transfer: LazyTransfer, threads: int) -> KVStore:
    store = make_store(transfer=transfer)
    store._supply.threads = threads
    return store


def make_store_over(supply: HostSupply, **sizes: Any) -> KVStore:
    like = make_store(**sizes)
    return KVStore(
        like.layout, like.sizes, transfer=supply.transfer, kernels=like._parts.kernels, policy=None, supply=supply
    )


@pytest.mark.parametrize(
    ("kv_heads", "layers_in_a_piece"),
    [(8, [2] * 14), (4, [4] * 7), (1, [16, 12]), (64, [1] * 28)],
    ids=["Qwen3-0.6B", "Qwen2.5-7B", "one", "a layer beyond the limit"],
)
def test_pieces_hold_whole_layers_and_no_more_than_the_limit(kv_heads: int, layers_in_a_piece: list[int]) -> None:
    shape = KVShape(tuple(map(AttentionLayer, range(28))), kv_heads, 128, 2, 1024)
    sizes = StoreSizes(run_blocks=16, resident_blocks=3)
    cutter = ExtentCutter(shape, sizes)
    full, last = list(cutter.extents(16, 40, 40))
    assert [len(piece.blocks) for piece in full.pieces] == layers_in_a_piece
    assert [layer for piece in full.pieces for layer in piece.blocks] == list(range(28))
    for piece in full.pieces:
        assert piece.nbytes == 16 * shape.block_bytes * len(piece.blocks)
        assert piece.nbytes <= PIECE_BYTES or len(piece.blocks) == 1
    # What is alike in every extent, so that a returned piece fits.
    assert [piece.blocks.keys() for piece in last.pieces] == [piece.blocks.keys() for piece in full.pieces]
    for tokens in (1, 3 * 1024, 3 * 1024 + 1, 40_000, 100_000):
        assert sum(cutter.piece_bytes(tokens)) == sizes.host_bytes(shape, tokens)


def test_pieces_are_made_in_the_background_in_the_order_of_the_request(small_pieces: None) -> None:
    transfer = GatedTransfer()
    store = store_with_threads(transfer, 1)  # several ask in this order, but are not heard in it
    store.announce(0, 41)  # 11 blocks: five extents of two, and one of one
    until(lambda: len(transfer.asked) == 1)
    assert store.host_bytes == 0
    transfer.gate.set()
    until(lambda: store.host_bytes == 2 * 11 * BLOCK_BYTES)
    assert transfer.asked == [2 * BLOCK_BYTES] * 10 + [BLOCK_BYTES] * 2
    mirror = make_mirror()
    for n in (24, 17):
        run_pass(store, mirror, [(0, n)], [n])
    assert len(transfer.asked) == 12 and store.host_bytes == 2 * 11 * BLOCK_BYTES


def test_all_threads_work_until_pieces_are_collected_and_while_somebody_waits_for_them() -> None:
    transfer, permits = GatedTransfer(open_gate=True), threading.Semaphore(0)

    def wait_for_a_permit(nbytes: int) -> None:
        assert permits.acquire(timeout=PATIENCE)

    transfer.fails = wait_for_a_permit
    supply = HostSupply(transfer, threads=3)
    pieces = supply.order([64] * 40)
    until(lambda: len(workers()) == len(transfer.asked) == 3)
    permits.release(6)
    until(lambda: len(transfer.asked) == 9)
    supply.collect([piece for piece in pieces if piece.done])
    permits.release(3)
    until(lambda: len(workers()) == 1 and len(transfer.asked) == 10)  # the others end after the piece at hand
    collector = threading.Thread(target=supply.collect, args=(pieces[-3:],))
    collector.start()
    until(lambda: len(workers()) == 3)
    permits.release(40)
    collector.join(PATIENCE)
    until(lambda: len(transfer.asked) == 40)
    assert all(memory.numel() == 64 for memory in supply.collect(pieces))


def test_nothing_is_begun_while_a_supply_is_quiet() -> None:
    transfer = GatedTransfer()
    supply = HostSupply(transfer, threads=3)
    supply.prepare([64] * 40)
    until(lambda: len(transfer.asked) == 3)
    open_when(transfer, lambda: supply._workshop.held)
    with supply.quiet():
        begun = len(transfer.asked)
        assert not workers() and 3 <= begun < 40  # what was at hand is done
        (piece,) = supply.order([65])
        supply.prepare([64] * 20)
        assert [memory.numel() for memory in supply.collect([piece])] == [65]
        assert not workers() and transfer.asked[begun:] == [65]
    until(lambda: transfer.asked.count(64) == begun + 20)
    with pytest.raises(ZeroDivisionError), supply.quiet():
        supply.prepare([66])
        print(1 / 0)
    until(lambda: 66 in transfer.asked)


def test_a_pass_waits_for_the_pieces_it_needs_and_for_no_others(small_pieces: None) -> None:
    transfer = GatedTransfer()
    transfer.gate.set()
    late = threading.Event()

    def held_up(nbytes: int) -> None:
        if threading.current_thread() in workers() and len(transfer.asked) > 4:  # beyond the first two extents
            assert late.wait(PATIENCE)

    transfer.fails = held_up
    store = store_with_threads(transfer, 1)
    store.announce(0, 41)
    run_pass(store, make_mirror(), [(0, 16)], [16])
    assert store.host_bytes == 2 * 4 * BLOCK_BYTES
    late.set()


def test_without_threads_memory_is_made_by_who_needs_it(small_pieces: None) -> None:
    transfer = GatedTransfer(open_gate=True)
    store = make_store(transfer=transfer)
    store.close()
    store.announce(0, 41)
    assert not workers() and not transfer.asked
    run_pass(store, make_mirror(), [(0, 24)], [24])
    assert transfer.asked == [2 * BLOCK_BYTES] * 6


@pytest.mark.parametrize("resident", [0, 1, 3, {0: 3}], ids=str)
@pytest.mark.parametrize("lengths", [(41, 23, 40, 9, 41), (9, 41, 23), (4, 12, 48), (47, 1, 46, 48)])
def test_requests_hold_what_they_need_and_no_more_than_the_longest(
    lengths: tuple[int, ...], resident: object, small_pieces: None
) -> None:
    transfer = GatedTransfer(open_gate=True)
    store, mirror, most = make_store(run_blocks=2, resident_blocks=resident, transfer=transfer), make_mirror(), 0
    for length in lengths:
        longer = store.sizes.host_bytes(store.layout.shape, length)
        store.announce(0, length)
        for n in [24] * (length // 24) + [length % 24] * (length % 24 > 0):
            run_pass(store, mirror, [(0, n)], [n])
        if longer >= most:
            assert store.host_bytes == longer
        most = max(most, longer)
        assert store.host_bytes <= most
        store.reset(0)
        mirror.truncate(0, 0)
        assert store.host_bytes <= most


def test_a_request_reuses_what_another_returned(small_pieces: None) -> None:
    transfer = GatedTransfer(open_gate=True)
    store, mirror = make_store(transfer=transfer), make_mirror()
    for _ in range(3):
        store.announce(0, 41)
        run_pass(store, mirror, [(0, 24)], [24])
        run_pass(store, mirror, [(0, 17)], [17])
        store.reset(0)
        mirror.truncate(0, 0)
        store.poison()
    assert len(transfer.asked) == 12


def test_what_is_prepared_serves_the_request_it_was_prepared_for(small_pieces: None) -> None:
    transfer = GatedTransfer()
    supply = HostSupply(transfer, threads=2)
    layout = make_store().layout
    sizes = list(ExtentCutter(layout.shape, StoreSizes(run_blocks=2)).piece_bytes(41))
    supply.prepare(sizes)
    until(lambda: len(transfer.asked) == 2)
    store = make_store_over(supply)
    store.announce(0, 41)
    transfer.gate.set()
    until(lambda: store.host_bytes == sum(sizes))
    assert Counter(transfer.asked) == Counter(sizes)


def test_what_was_prepared_for_another_cut_is_let_go_and_what_fits_is_kept(small_pieces: None) -> None:
    """As when fewer blocks stay on the device than was thought."""
    transfer = GatedTransfer(open_gate=True)
    supply = HostSupply(transfer)
    layout = make_store().layout
    supply.prepare(ExtentCutter(layout.shape, StoreSizes(run_blocks=2, resident_blocks=3)).piece_bytes(41))
    until(lambda: supply.prepared_bytes == 2 * (11 - 3) * BLOCK_BYTES)
    store = make_store_over(supply, resident_blocks=1)
    assert store.host_bytes == 2 * 8 * BLOCK_BYTES
    store.announce(0, 41)
    until(lambda: store.host_bytes == 2 * 10 * BLOCK_BYTES)
    # Blocks 1 and 3 were the first of one-block pieces, and so was block 10: one more extent of two for blocks 2 and 3.
    assert Counter(transfer.asked) == {2 * BLOCK_BYTES: 8, BLOCK_BYTES: 4}


def test_a_request_cancelled_while_its_pieces_are_made_leaves_them_to_the_next(small_pieces: None) -> None:
    transfer = GatedTransfer()
    store, mirror = store_with_threads(transfer, 2), make_mirror()
    store.announce(0, 41)
    until(lambda: len(transfer.asked) == 2)
    open_when(transfer, lambda: not store._supply._workshop.waiting)
    store.reset(0)
    assert len(transfer.asked) == 2  # what nobody had begun is not made
    assert store.host_bytes == sum(memory.numel() for memory in store._parts.host.pool()) == 4 * BLOCK_BYTES
    store.announce(0, 41)
    for n in (24, 17):
        run_pass(store, mirror, [(0, n)], [n])
    assert len(transfer.asked) == 12 and store.host_bytes == 2 * 11 * BLOCK_BYTES


def test_an_announcement_takes_the_place_of_the_one_before(small_pieces: None) -> None:
    transfer = GatedTransfer(open_gate=True)
    store, mirror = make_store(transfer=transfer), make_mirror()
    for tokens in (100, 41, 12, 41):
        store.announce(0, tokens)
    for n in (24, 17):
        run_pass(store, mirror, [(0, n)], [n])
    extents_made = store._parts.host._extents[0]
    assert [extent.shape.stop for extent in extents_made] == [2, 4, 6, 8, 10, 11]
    assert not store._parts.host._coming[0]
    store.reset(0)
    assert store.host_bytes <= 2 * 25 * BLOCK_BYTES


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), MemoryError(), RuntimeError("no")], ids=repr)
def test_memory_that_cannot_be_had_is_an_error_with_numbers_at_the_next_pass(
    error: BaseException, small_pieces: None
) -> None:
    transfer = GatedTransfer(open_gate=True)
    store, mirror = store_with_threads(transfer, 1), make_mirror()
    transfer.fails = lambda nbytes: error if len(transfer.asked) > 6 else None
    store.announce(0, 41)
    until(lambda: len(transfer.asked) == 12)
    until(lambda: not workers())
    with pytest.raises(CapacityError, match=r"holds 6,144 bytes of host memory and needs 5,120 more") as caught:
        store.begin([(0, 4)])  # for which the memory is there; but the request will not end well
    assert caught.value.__cause__ is error
    store.reset(0)
    transfer.fails = lambda nbytes: None
    store.announce(0, 41)
    for n in (24, 17):
        run_pass(store, mirror, [(0, n)], [n])
    assert store.host_bytes == 2 * 11 * BLOCK_BYTES


def test_a_fault_of_another_kind_is_not_called_a_shortage(small_pieces: None) -> None:
    transfer = GatedTransfer(open_gate=True)
    transfer.fails = lambda nbytes: ZeroDivisionError("a fault")
    store = make_store(transfer=transfer)
    store.announce(0, 41)
    with pytest.raises(ZeroDivisionError, match="a fault"):
        store.begin([(0, 4)])
    store.reset(0)


def test_an_interrupt_while_memory_is_made_leaves_a_store_that_can_be_reset(small_pieces: None) -> None:
    transfer = GatedTransfer(open_gate=True)
    store, mirror = make_store(transfer=transfer), make_mirror()
    store.close()
    transfer.fails = lambda nbytes: KeyboardInterrupt() if len(transfer.asked) == 2 else None
    with pytest.raises(KeyboardInterrupt):
        store.begin([(0, 4)])
    store.reset(0)
    run_pass(store, mirror, [(0, 4)], [4])


def test_a_store_that_is_dropped_ends_its_threads_and_frees_its_memory(small_pieces: None) -> None:
    transfer = GatedTransfer()
    store = store_with_threads(transfer, 2)
    freed = count_freed(transfer)
    store.announce(0, 41)
    until(lambda: len(transfer.asked) == 2)
    del store
    gc.collect()
    transfer.gate.set()
    until(lambda: not workers())
    assert len(transfer.asked) == 2
    gc.collect()
    assert freed() == 2


def count_freed(transfer: GatedTransfer) -> Callable[[], int]:
    """How many of the pieces that a transfer gives from now on are gone."""
    gone: list[int] = []
    allocate = transfer.allocate_host

    def counted(nbytes: int) -> torch.Tensor:
        memory = allocate(nbytes)
        weakref.finalize(memory, gone.append, nbytes)
        return memory

    transfer.allocate_host = counted  # type: ignore[method-assign]
    return lambda: len(gone)


def test_closing_waits_for_the_threads(small_pieces: None) -> None:
    transfer = GatedTransfer()
    store = store_with_threads(transfer, 2)
    store.announce(0, 41)
    until(lambda: len(transfer.asked) == 2)
    open_when(transfer, lambda: store._supply._workshop.closed)
    store.close()
    assert not workers() and len(transfer.asked) == 2
    store.close()


def test_several_threads_that_are_refused_at_once_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    together = threading.Barrier(3, timeout=PATIENCE)

    def refuse(address: int, nbytes: int) -> int:
        together.wait()
        return 2

    class Refused(LazyTransfer):
        pinned = PinnedMemory(refuse, lambda address: None)

        def allocate_host(self, nbytes: int) -> torch.Tensor:
            return self.pinned.allocate(nbytes)

    supply = HostSupply(Refused(), threads=3)
    with caplog.at_level(logging.WARNING, logger="longgen"):
        pieces = supply.order([4096] * 3)
        until(lambda: all(piece.done for piece in pieces))
        memories = supply.collect(pieces + supply.order([4096]))
    assert len(caplog.records) == 1
    assert [memory.numel() for memory in memories] == [4096] * 4 and not any(memory.any() for memory in memories)


PROGRAM = """
import os, time
from longgen.kv.supply import HostSupply
from longgen.kv.transfer import CpuTransfer

class Slow(CpuTransfer):
    def allocate_host(self, nbytes):
        os.write(1, b"piece\\n")
        time.sleep(0.02)
        return super().allocate_host(nbytes)

supply = HostSupply(Slow(), threads=2)
pieces = supply.order([1 << 16] * 10_000)
while not pieces[1].done:
    time.sleep(0.001)
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [("", 0), ("raise SystemExit(3)", 3), ("raise RuntimeError('a fault')", 1), ("os._exit(4)", 4)],
    ids=["end", "exit", "exception", "at once"],
)
def test_a_program_ends_while_memory_is_made(ending: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + ending], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == code, done.stderr
    assert 2 <= done.stdout.count("piece") < 10_000
    assert "RuntimeError: a fault" in done.stderr if "fault" in ending else not done.stderr


def test_ctrl_c_ends_a_program_that_waits_for_memory() -> None:
    program = PROGRAM + "supply.collect(pieces)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(10):
        assert process.stdout.readline() == b"piece\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGINT and b"KeyboardInterrupt" in err
    assert out.count(b"piece") < 9_000
