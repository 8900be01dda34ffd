"""Every access of the store to memory that it copies is ordered by events."""

from __future__ import annotations

import random

import pytest
import torch

from longgen.kv.store import KVStore
from longgen.kv.transfer import Queue
from tests.kv.mirror import Attended, random_step
from tests.kv.race_detector import RaceDetector, byte_ranges
from tests.kv.test_store import COUNTS, make_mirror, make_store


def run(store: KVStore, seed: int, steps: int) -> None:
    rng, mirror = random.Random(seed), make_mirror(seed)
    mirror.on_attend = ignore
    for _ in range(steps):
        random_step(store, mirror, rng, counts=COUNTS, longest_cut=8)


def ignore(_: Attended) -> None:
    """What attention gives is checked elsewhere."""


def watch_everything(store: KVStore, detector: RaceDetector) -> None:
    """Memory is watched from its first access on, not from its first copy."""
    parts = store._parts
    slots = range(len(store.slots))
    slot_buffers = [b for slot in slots for p in (parts.decode, parts.resident) for b in p.of_slot(slot).values()]
    for buffer in (*parts.ring.entries, *parts.prefill.all(), *slot_buffers):
        detector.watch(buffer.k)
        detector.watch(buffer.v)


@pytest.mark.parametrize("resident", [0, 1, {0: 3, 3: 1}], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_no_two_queues_race(resident: object, seed: int) -> None:
    with RaceDetector() as detector:
        store = make_store(
            transfer=detector.transfer,
            slots=1 + seed % 2,
            resident_blocks=resident,
            run_blocks=1 + seed % 3,
            ring_entries=2 + seed % 2,
        )
        watch_everything(store, detector)
        run(store, seed, 40)


@pytest.mark.parametrize(
    "dropped",
    [
        (Queue.LOAD, Queue.COMPUTE),
        (Queue.LOAD, Queue.OFFLOAD),
        (Queue.COMPUTE, Queue.LOAD),
        (Queue.COMPUTE, Queue.OFFLOAD),
        (Queue.OFFLOAD, Queue.COMPUTE),
    ],
    ids=lambda pair: f"{pair[0].value}-{pair[1].value}",
)
def test_a_forgotten_wait_is_found(dropped: tuple[Queue, Queue]) -> None:
    with pytest.raises(AssertionError, match="races with"), RaceDetector(dropped) as detector:
        store = make_store(transfer=detector.transfer)
        watch_everything(store, detector)
        run(store, 0, 40)


def test_byte_ranges_of_a_strided_part() -> None:
    whole = torch.zeros(3, 10, 4)
    assert list(byte_ranges(whole)) == [(0, 480)]
    assert list(byte_ranges(whole[:, 2:5])) == [(32 + 160 * head, 80 + 160 * head) for head in range(3)]
    assert list(byte_ranges(whole[1:, 2:5].transpose(0, 1)[None])) == [(192, 240), (352, 400)]
