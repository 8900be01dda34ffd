"""Device buffers are allocated once: requests use the same ones, and no pass allocates memory for KV."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from longgen.engine import Engine, EngineOptions
from longgen.kv.store import KVStore
from tests.checkpoints import Build, random_ids

ATTENDING = [("qwen3", {"head_dim": 64}), ("qwen2", {"sliding": True, "window": 24})]
KINDS = [*ATTENDING, ("qwen3_next", {})]  # whose recurrent layers work on tensors larger than a run of this little KV
ANSWER = 20


class LargestTensor(TorchDispatchMode):
    """The most bytes of one tensor that an operation made on a device while this was entered."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.nbytes, self._device = 0, device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._device.type:
                storage = leaf.untyped_storage()
                if storage._cdata not in given:
                    self.nbytes = max(self.nbytes, storage.nbytes())
        return result


def open_long_runs(build: Build, device: torch.device, kind: str, options: dict[str, Any], resident: int) -> Engine:
    """Runs of 32 chunks, so that a run's K is larger than any activation of a chunk."""
    chunk = 512 if device.type == "cuda" else 32
    return Engine.load(
        build(kind, max_position=65_536, **options),
        EngineOptions(
            device=str(device),
            dtype="bfloat16",
            block_size=chunk // 2,
            chunk_size=chunk,
            ring_entries=2,
            ring_blocks=64,
            resident_blocks=resident,
        ),
    )


def request(engine: Engine, tokens: int) -> None:
    engine.prefill(random_ids(tokens)[0].tolist(), new_tokens=ANSWER)
    for token in range(3, 3 + ANSWER):
        engine.decode_step(token)


def device_buffers(store: KVStore) -> list[int]:
    """Addresses of K and V of every buffer on the device."""
    parts, slots = store._parts, range(len(store.slots))
    buffers = [*parts.ring.entries, *parts.prefill.all(), parts.windows.scratch()]
    for part in (parts.decode, parts.resident, parts.windows):
        buffers += [buffer for slot in slots for buffer in part.of_slot(slot).values()]
    return [tensor.data_ptr() for buffer in buffers for tensor in (buffer.k, buffer.v)]


@pytest.mark.parametrize("resident", [0, 3])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_requests_of_any_length_use_the_same_buffers(
    build: Build, device: torch.device, kind: str, options: dict[str, Any], resident: int
) -> None:
    engine = open_long_runs(build, device, kind, options, resident)
    before = device_buffers(engine.store)
    for chunks in (1, 9, 3):
        request(engine, chunks * engine.chunk_tokens + 5)
        assert device_buffers(engine.store) == before
        engine.reset()
        assert device_buffers(engine.store) == before


@pytest.mark.parametrize("resident", [0, 3])
@pytest.mark.parametrize(("kind", "options"), ATTENDING)
def test_no_pass_makes_a_tensor_as_large_as_a_run(
    build: Build, device: torch.device, kind: str, options: dict[str, Any], resident: int
) -> None:
    engine = open_long_runs(build, device, kind, options, resident)
    tokens = 40 * engine.chunk_tokens + 5
    request(engine, tokens)  # host memory, which is no device's on CUDA and the same as the device's on the CPU
    run = engine.store._parts.ring.entries[0].k.nbytes
    with LargestTensor(device) as largest:
        request(engine, tokens)
    assert 0 < largest.nbytes < run


@pytest.mark.parametrize("size", [100, 4096])
def test_a_large_tensor_would_be_seen(device: torch.device, size: int) -> None:
    with LargestTensor(device) as largest:
        torch.cat([torch.zeros(size, device=device).view(2, -1), torch.zeros(2, 1, device=device)], 1)
    assert largest.nbytes == 4 * (size + 2)


@pytest.mark.cuda
@pytest.mark.parametrize("resident", [0, 3])
@pytest.mark.parametrize(("kind", "options"), ATTENDING)
def test_the_allocator_takes_nothing_more_of_the_device_and_no_piece_as_large_as_a_run(
    build: Build, kind: str, options: dict[str, Any], resident: int
) -> None:
    device = torch.device("cuda")
    engine = open_long_runs(build, device, kind, options, resident)
    # Short ends: over few rows, torch's flash kernel keeps a result for each of up to 32 parts of the keys, which is no
    # KV and does not grow with it, but for 77 rows is larger than a run of this small model.
    lengths = [40 * engine.chunk_tokens + 5, 70 * engine.chunk_tokens + 29]
    for tokens in lengths:
        request(engine, tokens)
    run = engine.store._parts.ring.entries[0].k.nbytes
    torch.cuda.synchronize()
    segments = torch.cuda.memory_stats()["segment.all.allocated"]
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, context=None)
    try:
        for tokens in lengths:
            request(engine, tokens)
        torch.cuda.synchronize()
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    sizes = [event["size"] for event in events if event["action"] == "alloc"]
    assert len(sizes) > 1000, "the allocator's events were not recorded"
    assert max(sizes) < run
    assert not [event for event in events if event["action"] in ("segment_alloc", "segment_map")]
    assert torch.cuda.memory_stats()["segment.all.allocated"] == segments
