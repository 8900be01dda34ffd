"""Random passes over stores of random sizes, while the device is busy and its streams are shaken.

Nothing is compared before a whole sequence is on its way, so the passes of one overlap as they do in use.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from longgen.attention.backends import default_kernels
from longgen.kv.layout import AttentionLayer, KVLayout
from longgen.kv.parts import StoreSizes
from longgen.kv.store import KVStore
from longgen.kv.transfer import Queue, Transfer
from tests.cuda.disturbed import disturbed_transfer, unordered_transfer
from tests.kv.mirror import Attended, Mirror, random_step, run_pass

SEQUENCES = 10
PASSES = 20  # of each sequence
# Of a row, relative to its norm. Rounding gives up to about a third of it; one token read wrong gives more in the rows
# that look at it.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Case:
    """A store's shape and sizes, and the operations on it."""

    layout: KVLayout
    sizes: StoreSizes
    groups: int
    counts: tuple[int, ...]


def random_case(rng: random.Random, device: torch.device) -> Case:
    """Copies large enough to take real time on a GPU, and small enough for a CPU there."""
    large = device.type == "cuda"
    block = rng.choice([64, 128, 256] if large else [4, 8, 16])
    chunk = rng.randint(256, 2048) if large else rng.randint(24, 96)
    windows = rng.sample([100, 500, 1500] if large else [5, 30, 70], rng.randint(0, 2))
    layers = [AttentionLayer(index) for index in range(3)] + [AttentionLayer(3 + i, w) for i, w in enumerate(windows)]
    rng.shuffle(layers)
    layers = [AttentionLayer(index, layer.window) for index, layer in enumerate(layers)]
    layout = KVLayout(
        tuple(layers),
        4 if large else 2,
        rng.choice([64, 128, 128, 256]) if large else 16,
        rng.choice([torch.bfloat16, torch.float16]),
        block,
    )
    resident: list[int | dict[int, int]] = [0, 0, 1, 3, 30, {layout.full_layers[0]: 4, layout.full_layers[-1]: 1}]
    sizes = StoreSizes(
        slots=rng.randint(1, 3),
        chunk_tokens=chunk,
        ring_entries=rng.randint(2, 4),
        run_blocks=rng.choice([1, 2, 5, 8]),
        prefill_depth=rng.randint(2, 3),
        decode_tokens=rng.choice([1, 3, 16]) if large else rng.choice([1, 3, 4]),
        resident_blocks=rng.choice(resident),
        window_keep=8 * chunk,
    )
    counts = (chunk, chunk, chunk, rng.randint(1, chunk), rng.randint(1, chunk), block, block - 1, 1, 2, 3, 17)
    return Case(layout, sizes, rng.choice([1, 2, 4]), counts)


def make_store(case: Case, transfer: Transfer) -> KVStore:
    layout, kernels = case.layout, default_kernels(transfer.device)
    windowed = bool(layout.window_layers)
    kernels.prepare(layout.dtype, layout.head_dim, case.groups, transfer.device, windowed=windowed)
    store = KVStore(layout, case.sizes, transfer=transfer, kernels=kernels)
    store.poison()
    return store


def make_mirror(case: Case, device: torch.device, seed: int, on_attend: Callable[[Attended], None]) -> Mirror:
    generator = torch.Generator(device).manual_seed(seed)
    return Mirror(case.layout, groups=case.groups, generator=generator, on_attend=on_attend, sharpness=2.0)


def run_sequence(seed: int, transfer: Transfer) -> list[Attended]:
    """Everything that follows from `seed` alone, with no wait between the passes but what a reset needs."""
    rng = random.Random(seed)
    case = random_case(rng, transfer.device)
    done: list[Attended] = []
    store, mirror = make_store(case, transfer), make_mirror(case, transfer.device, seed, done.append)
    run_pass(store, mirror, [(0, case.sizes.chunk_tokens)], [case.sizes.chunk_tokens])
    passes = 1
    while passes < PASSES:
        passes += random_step(store, mirror, rng, counts=case.counts, longest_cut=case.sizes.chunk_tokens // 2)
    transfer.drain()
    for slot in range(case.sizes.slots):
        assert store.length(slot) == mirror.length(slot)
    return done


def worst_row(attended: Attended) -> float:
    """The largest relative error of one row of one head; NaN if there is one."""
    expected = attended.expected()
    return float(((attended.out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def faults(done: list[Attended]) -> list[str]:
    found = []
    for index, attended in enumerate(done):
        error = worst_row(attended)
        if not error <= TOLERANCE[attended.q.dtype]:
            keys = sum(k.shape[1] for k, _ in attended.seen)
            rows = attended.q.shape[1]
            found.append(f"attend {index} (layer {attended.layer}, {rows} rows, {keys} keys): {error:.2e}")
    return found


@pytest.mark.parametrize("seed", range(SEQUENCES))
def test_every_pass_agrees_and_the_same_passes_agree_bit_for_bit(device: torch.device, seed: int) -> None:
    first = run_sequence(seed, disturbed_transfer(device, seed))
    assert not faults(first)
    # Other moments of disturbance: what a result depends on besides its inputs is a race.
    again = [attended.out for attended in run_sequence(seed, disturbed_transfer(device, seed + SEQUENCES))]
    assert len(again) == len(first)
    moved = [index for index, attended in enumerate(first) if not torch.equal(attended.out, again[index])]
    assert not moved, f"attends {moved} of {len(first)} gave other bits the second time"


@pytest.mark.parametrize("queue", [Queue.COMPUTE, Queue.LOAD, Queue.OFFLOAD], ids=lambda queue: queue.value)
def test_missing_waits_would_be_seen(device: torch.device, queue: Queue) -> None:
    """The test above can fail."""
    if device.type == "cpu" and queue is Queue.OFFLOAD:
        pytest.skip("what an offload waits for is done already on the CPU")
    tokens = 1024 if device.type == "cuda" else 64
    layout = KVLayout(tuple(map(AttentionLayer, range(3))), 4, 128, torch.bfloat16, tokens // 8)
    case = Case(layout, StoreSizes(chunk_tokens=tokens, ring_entries=2, run_blocks=2, decode_tokens=4), 2, ())
    done: list[Attended] = []
    transfer = unordered_transfer(device, queue)
    store, mirror = make_store(case, transfer), make_mirror(case, device, 0, done.append)
    for n in [tokens] * 6 + [1] * 6 + [tokens - 6] * 4:
        run_pass(store, mirror, [(0, n)], [n])
    transfer.drain()
    assert faults(done)
