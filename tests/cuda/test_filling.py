"""Random KV on CUDA: drawn on the device, and where attention looks for it, however the streams are shaken."""

from __future__ import annotations

import pytest
import torch

from longgen.kv.layout import AttentionLayer, KVLayout
from longgen.kv.parts import StoreSizes
from tests.cuda.disturbed import disturbed_transfer
from tests.cuda.test_stress import Case, faults, make_mirror, make_store
from tests.kv.mirror import Attended, run_pass


@pytest.mark.parametrize("resident", [0, 3, 100])
def test_what_follows_random_kv_attends_to_the_values_of_the_seed(device: torch.device, resident: int) -> None:
    chunk = 1024 if device.type == "cuda" else 64
    layout = KVLayout((AttentionLayer(0), AttentionLayer(1, chunk // 2)), 4, 128, torch.bfloat16, chunk // 8)
    sizes = StoreSizes(chunk_tokens=chunk, ring_entries=2, run_blocks=2, decode_tokens=4, resident_blocks=resident)
    case, done = Case(layout, sizes, 2, ()), list[Attended]()
    transfer = disturbed_transfer(device, 0)
    store, mirror = make_store(case, transfer), make_mirror(case, device, 0, done.append)
    tokens = 3 * chunk + chunk // 3
    store.fill_random(0, tokens, torch.Generator(device).manual_seed(7))
    mirror.fill(0, tokens, chunk, torch.Generator(device).manual_seed(7))
    for n in (1, 1, 3, chunk, 1):
        run_pass(store, mirror, [(0, n)], [n])
    transfer.drain()
    assert len(done) == 10
    assert not faults(done)
