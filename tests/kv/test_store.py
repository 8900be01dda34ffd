"""The store against a plain list of every token: whatever is done to slots, attention sees exactly their tokens."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from typing import Any

import pytest
import torch

from longgen.attention.backends import default_kernels
from longgen.errors import CapacityError, LongGenError, SlotError, UsageError
from longgen.kv.counters import Counters
from longgen.kv.layout import AttentionLayer, KVLayout
from longgen.kv.sizes import StoreSizes
from longgen.kv.store import KVStore
from longgen.kv.transfer import CpuTransfer, Queue, Transfer
from longgen.sparse.base import AvailableBlocks, BlockSelection, Phase, SparsePolicy
from longgen.sparse.full import FullAttentionPolicy
from tests.kv.lazy_transfer import LazyTransfer
from tests.kv.mirror import Attended, Mirror, random_step, run_pass

KV_HEADS, HEAD_DIM = 2, 8
LAYERS = (AttentionLayer(0), AttentionLayer(2, window=9), AttentionLayer(3))
COUNTS = (1, 2, 3, 4, 5, 7, 8, 12, 23, 24)


def make_store(
    *, block_size: int = 4, transfer: Transfer | None = None, policy: SparsePolicy | None = None, **sizes: object
) -> KVStore:
    layout = KVLayout(LAYERS, KV_HEADS, HEAD_DIM, torch.float32, block_size)
    defaults = {"chunk_tokens": 24, "ring_entries": 2, "run_blocks": 2, "decode_tokens": 3, "window_keep": 8}
    store_sizes = StoreSizes(**{**defaults, **sizes})  # type: ignore[arg-type]
    return KVStore(
        layout,
        store_sizes,
        transfer=transfer or LazyTransfer(),
        kernels=default_kernels(torch.device("cpu")),
        policy=policy,
    )


def make_mirror(seed: int = 0) -> Mirror:
    """Checks every attend at once."""
    layout = KVLayout(LAYERS, KV_HEADS, HEAD_DIM, torch.float32, block_size=4)
    return Mirror(layout, groups=2, generator=torch.Generator().manual_seed(seed), on_attend=check)


def check(attended: Attended) -> None:
    torch.testing.assert_close(attended.out, attended.expected().float(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("resident", [0, 1, {0: 3, 3: 1}, {3: 2}, 1000], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_operations_equals_a_list_of_tokens(resident: object, seed: int) -> None:
    rng = random.Random(seed)
    slots = 1 + seed % 3
    store = make_store(
        slots=slots,
        resident_blocks=100 if resident == 1000 else resident,
        run_blocks=rng.choice([1, 2, 3]),
        ring_entries=rng.choice([2, 3]),
        decode_tokens=rng.choice([1, 3, 4]),
    )
    mirror = make_mirror(seed)
    store.poison()
    for _ in range(60):
        random_step(store, mirror, rng, counts=COUNTS, longest_cut=8)
    for slot in range(slots):
        assert store.length(slot) == mirror.length(slot)


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("resident", [0, 1, 2])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 9])
def test_block_boundaries(length: int, resident: int, n: int) -> None:
    """Fill to just before, at and after a boundary; pass over it; accept every prefix; go on decoding; truncate."""
    for accepted in range(n + 1):
        store, mirror = make_store(resident_blocks=resident), make_mirror()
        run_pass(store, mirror, [(0, length)], [length])
        run_pass(store, mirror, [(0, n)], [accepted])
        for _ in range(6):
            run_pass(store, mirror, [(0, 1)], [1])
        for cut in range(length + accepted + 6, max(0, length + accepted - 2), -1):
            store.truncate(0, cut)
            mirror.truncate(0, cut)
            run_pass(store, mirror, [(0, 2)], None)
            run_pass(store, mirror, [(0, 6)], None)


def test_host_memory_is_exact_for_an_announced_request() -> None:
    store, mirror = make_store(run_blocks=3), make_mirror()
    store.announce(0, 41)
    run_pass(store, mirror, [(0, 24)], [24])
    run_pass(store, mirror, [(0, 16)], [16])
    run_pass(store, mirror, [(0, 1)], [1])
    blocks = 11  # ceil(41 / 4)
    assert store.host_bytes == blocks * 4 * 2 * KV_HEADS * HEAD_DIM * 4 * 2  # two full-attention layers
    store.reset(0)
    mirror.truncate(0, 0)
    for _ in range(3):
        store.announce(0, 24)
        run_pass(store, mirror, [(0, 24)], None)
        store.reset(0)
    assert store.host_bytes == blocks * 4 * 2 * KV_HEADS * HEAD_DIM * 4 * 2  # the longest request's, and no more


@pytest.mark.parametrize("lengths", [(41, 23, 40, 9, 41), (9, 41, 23), (4, 12, 48)])
def test_requests_of_different_lengths_hold_no_more_than_the_longest(lengths: tuple[int, ...]) -> None:
    store, mirror, longest = make_store(run_blocks=3), make_mirror(), 0
    for length in lengths:
        store.announce(0, length)
        for n in [24] * (length // 24) + [length % 24] * (length % 24 > 0):
            run_pass(store, mirror, [(0, n)], [n])
        longest = max(longest, -(-length // 4))
        assert store.host_bytes <= longest * 4 * 2 * KV_HEADS * HEAD_DIM * 4 * 2
        store.reset(0)
        mirror.truncate(0, 0)


def test_memory_that_cannot_be_had_is_one_error_with_the_bytes() -> None:
    with pytest.raises(CapacityError, match=r"1 buffers of 4,000,000,000,000,000 tokens, [0-9,]+ bytes, do not fit"):
        make_store(resident_blocks=10**15)

    class Refusing(LazyTransfer):
        def allocate_host(self, nbytes: int) -> torch.Tensor:
            raise OSError("no memory")

    store = make_store(transfer=Refusing())
    with pytest.raises(CapacityError, match=r"holds 0 bytes of host memory and needs 2,048 more"):
        store.begin([(0, 1)])
    assert store.length(0) == 0


def test_no_host_memory_when_everything_is_resident() -> None:
    store, mirror = make_store(resident_blocks=10), make_mirror()
    run_pass(store, mirror, [(0, 24)], [24])
    for _ in range(16):
        run_pass(store, mirror, [(0, 1)], [1])
    assert store.host_bytes == 0


def test_misuse_is_refused_and_leaves_the_store_usable() -> None:
    store, mirror = make_store(slots=2), make_mirror()
    with pytest.raises(SlotError, match="slot 2 is unknown"):
        store.begin([(2, 1)])
    with pytest.raises(SlotError, match="different slots"):
        store.begin([(0, 1), (0, 1)])
    with pytest.raises(SlotError, match="one token of several"):
        store.begin([(0, 2), (1, 2)])
    with pytest.raises(CapacityError, match="chunk size 24"):
        store.begin([(0, 25)])
    pass_ = store.begin([(0, 4)])
    with pytest.raises(SlotError, match="open"):
        store.begin([(1, 1)])
    with pytest.raises(SlotError, match="open pass"):
        store.truncate(0, 0)
    with pytest.raises(LongGenError, match="expects layer 0"):
        pass_.attend(3, torch.zeros(1, 4, 4, 8), torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8), 1.0)
    with pytest.raises(LongGenError, match="0 of 3"):
        pass_.commit()
    pass_.abort()
    with pytest.raises(LongGenError, match="ended"):
        pass_.abort()
    with pytest.raises(SlotError, match="cannot truncate"):
        store.truncate(0, 1)
    run_pass(store, mirror, [(0, 5)], [5])
    pass_ = store.begin([(0, 1)])
    mirror.attend_all(pass_)
    with pytest.raises(SlotError, match="cannot accept 2"):
        pass_.commit(2)
    pass_.abort()
    run_pass(store, mirror, [(1, 1)], [1])


class FailingPolicy(FullAttentionPolicy):
    """Fails when it is shown a block, which for decoded tokens is during the commit."""

    fails = True

    def on_block_written(self, slot_id: int, layer: int, block: int, k: torch.Tensor, v: torch.Tensor) -> None:
        if self.fails:
            raise ZeroDivisionError


def test_a_commit_that_fails_halfway_spoils_its_slot_alone_until_reset() -> None:
    policy = FailingPolicy()
    store, mirror = make_store(slots=2, policy=policy), make_mirror()
    run_pass(store, mirror, [(1, 3)], [3])
    run_pass(store, mirror, [(0, 3)], [3])
    with pytest.raises(ZeroDivisionError):
        run_pass(store, mirror, [(0, 1)], [1])
    policy.fails = False
    with pytest.raises(SlotError, match="slot 0 failed halfway"):
        store.begin([(0, 1)])
    with pytest.raises(SlotError, match="reset it"):
        store.truncate(0, 1)
    run_pass(store, mirror, [(1, 1)], [1])
    store.reset(0)
    mirror.truncate(0, 0)
    run_pass(store, mirror, [(0, 5)], [5])


def test_a_reset_aborts_the_pass_that_is_open_over_the_slot() -> None:
    store, mirror = make_store(), make_mirror()
    run_pass(store, mirror, [(0, 7)], [7])
    pass_ = store.begin([(0, 5)])
    store.reset(0)
    mirror.truncate(0, 0)
    with pytest.raises(LongGenError, match="has ended"):
        pass_.commit()
    run_pass(store, mirror, [(0, 5)], [5])


def test_a_reset_leaves_zeros_on_the_device() -> None:
    store, mirror = make_store(slots=2, resident_blocks=1), make_mirror()
    for slot in (0, 1):
        run_pass(store, mirror, [(slot, 11)], [11])
    store.reset(0)
    assert all(not buffer.k.any() and not buffer.v.any() for buffer in store._slot_buffers(0))
    assert any(buffer.k.any() for buffer in store._slot_buffers(1))


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (torch.tensor([0, 1, 3]), "blocks 0 to 3 of slot 0, which has 3"),
        (torch.tensor([-1]), "blocks -1 to -1"),
        (torch.tensor([[0, 1], [1, 1]]), "twice"),
        (range(4), "blocks 0 to 3"),
    ],
    ids=str,
)
def test_a_selection_of_what_is_not_there_is_refused(blocks: range | torch.Tensor, message: str) -> None:
    class Fixed(SparsePolicy):
        supports_prefill = False

        def select_blocks(
            self, layer: int, phase: Phase, query: torch.Tensor | None, available: AvailableBlocks
        ) -> BlockSelection:
            return BlockSelection(blocks)

    store, mirror = make_store(policy=Fixed()), make_mirror()
    run_pass(store, mirror, [(0, 14)], [14])
    with pytest.raises(LongGenError, match=message):
        store.begin([(0, 1)], Phase.DECODE)
    store.reset(0)


def test_a_slot_cut_to_nothing_starts_afresh() -> None:
    store, mirror = make_store(window_keep=4), make_mirror()
    for _ in range(4):
        run_pass(store, mirror, [(0, 24)], [24])
    store.truncate(0, 0)
    mirror.truncate(0, 0)
    run_pass(store, mirror, [(0, 10)], [10])
    store.truncate(0, 9)
    mirror.truncate(0, 9)
    run_pass(store, mirror, [(0, 3)], [3])


def test_an_exception_inside_a_pass_aborts_it() -> None:
    store, mirror = make_store(), make_mirror()
    run_pass(store, mirror, [(0, 13)], [13])
    with pytest.raises(ZeroDivisionError), store.begin([(0, 5)]):
        raise ZeroDivisionError
    assert store.length(0) == 13
    run_pass(store, mirror, [(0, 13)], [13])


def test_truncation_past_what_a_window_keeps_is_refused_with_the_numbers() -> None:
    store, mirror = make_store(window_keep=4), make_mirror()
    for _ in range(4):
        run_pass(store, mirror, [(0, 24)], [24])
    with pytest.raises(SlotError, match=r"past of 68 tokens or more"):
        store.truncate(0, 67)
    store.truncate(0, 68)
    mirror.truncate(0, 68)
    run_pass(store, mirror, [(0, 24)], [24])


def test_an_aborted_pass_counts_for_what_a_window_keeps() -> None:
    store, mirror = make_store(window_keep=4), make_mirror()
    for accepted in ([24], [24], [24], None):
        run_pass(store, mirror, [(0, 24)], accepted)
    run_pass(store, mirror, [(0, 1)], None)
    with pytest.raises(SlotError, match=r"past of 68 tokens or more"):
        store.truncate(0, 67)
    store.truncate(0, 68)
    mirror.truncate(0, 68)
    run_pass(store, mirror, [(0, 24)], [24])


def test_plain_copies_give_the_same_as_late_ones() -> None:
    for transfer in (CpuTransfer(), LazyTransfer()):
        store, mirror = make_store(transfer=transfer), make_mirror(seed=1)
        for n in (24, 7, 1, 2, 24):
            run_pass(store, mirror, [(0, n)], [n])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"ring_entries": 1}, "ring_entries is 1"),
        ({"decode_tokens": 5}, "decode_tokens is 5"),
        ({"slots": 0}, "slots is 0"),
        ({"resident_blocks": -1}, "negative"),
    ],
)
def test_sizes_that_cannot_work_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_store(**sizes)


def test_runs_that_are_not_loaded_yet_are_waits() -> None:
    """Copies that are done as late as they may be are never done when they are asked for; plain ones always are."""
    for transfer, waits in ((LazyTransfer(), True), (CpuTransfer(), False)):
        store, mirror = make_store(transfer=transfer), make_mirror(0)
        run_pass(store, mirror, [(0, 12)], [12])
        run_pass(store, mirror, [(0, 1)], [1])
        counters = store.counters(0)
        assert (counters.ring_waits > 0) is waits and (counters.ring_hits > 0) is not waits
        store.reset(0)
        assert store.counters(0) == Counters()


class Watched(LazyTransfer):
    """Notes which of its host memory is still there when it drains."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[weakref.ref[torch.Tensor]] = []
        self.drained: list[bool] = []

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        memory = super().allocate_host(nbytes)
        self.held.append(weakref.ref(memory))
        return memory

    def drain(self) -> None:
        super().drain()
        self.drained.append(all(memory() is not None for memory in self.held))


def test_a_store_that_is_dropped_waits_for_its_copies_before_its_memory_is_freed() -> None:
    transfer = Watched()
    store = make_store(transfer=transfer)
    run_pass(store, make_mirror(), [(0, 24)], [24])
    assert transfer.held and not transfer.drained
    del store
    gc.collect()
    assert transfer.drained == [True]
    transfer._work.clear()  # which holds on to the memory that it copied
    for thread in threading.enumerate():
        if thread.name == "longgen-supply":
            thread.join()  # which holds on to what it made last
    assert all(memory() is None for memory in transfer.held)


def test_an_interrupt_before_a_reset_waits_does_not_free_what_is_being_copied() -> None:
    class Interrupted(Watched):
        def drain(self) -> None:
            if not self.drained:
                self.drained.append(False)
                raise KeyboardInterrupt
            super().drain()

    transfer = Interrupted()
    store = make_store(transfer=transfer)
    run_pass(store, make_mirror(), [(0, 24)], [24])
    with pytest.raises(KeyboardInterrupt):
        store.reset(0)
    assert transfer.drained == [False, True]
    assert all(transfer.reached(transfer.record(queue)) for queue in Queue)
    assert store.length(0) == 0 and store._parts.host.pool()


def test_a_store_that_is_dropped_after_a_failure_of_the_device_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    said: list[object] = []

    class Failed(LazyTransfer):
        def drain(self) -> None:
            tried.append(1)
            raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr("sys.unraisablehook", said.append)
    make_store(transfer=Failed())
    gc.collect()
    assert tried and not said
