"""A plan that is corrected by a measured chunk, and a process that keeps to its cap."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from longgen.engine import Engine, EngineOptions
from longgen.kv.budget import device_budget
from longgen.kv.memory_plan import Machine, PlanOptions
from longgen.kv.plan import Planner
from longgen.kv.predict import reference_rates
from longgen.model.checkpoint import read_config
from longgen.model.provider import Provider
from longgen.model.shape import model_shape
from longgen.planning.machine import hold_to
from longgen.planning.opening import meter_of, options_of, plan_again
from tests.checkpoints import Build, random_ids

CAP = 3 << 30
SLACK = 256 << 20  # of what is planned against what is used


@pytest.mark.cuda
@pytest.mark.skipif(
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1,
    reason="the card's memory is measured, which other workers of pytest take and give back meanwhile",
)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
def test_the_process_stays_under_its_cap_and_uses_what_was_planned(build: Build, kind: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    gc.collect()
    torch.cuda.empty_cache()
    options = EngineOptions(device=str(device), dtype="bfloat16", block_size=256)
    folder = build(kind, max_position=65_536)
    budget = device_budget(CAP, device.index)
    shape = model_shape(read_config(folder), "tiny", "bfloat16")
    planner = Planner(shape, Machine(None, budget, reference_rates(64)), PlanOptions(block_size=256))
    plan = planner.plan(64 << 20, 16)  # far more than fits, so that resident blocks fill the device
    try:
        hold_to(plan, CAP, device)
        provider = Provider.load(folder, dtype=torch.bfloat16, device=device)
        meter = meter_of(device, plan)
        assert meter is not None
        final = plan_again(planner, plan, provider, options, meter)
        assert 0 < final.device.activations < 2 * plan.device.activations + SLACK
        assert final.device.runtime > 0 and 0 < final.resident_blocks < final.kv.blocks_for(final.tokens)
        hold_to(final, CAP, device)
        engine = Engine.over(provider, options_of(final, options))
        engine.prefill(random_ids(40_000)[0].tolist(), new_tokens=4)
        engine.decode_step(3)
        engine.store.transfer.drain()
        free, total = torch.cuda.mem_get_info(device)
        used = total - free - budget.others
        assert used <= CAP
        assert abs(used - final.device.total) <= SLACK
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
