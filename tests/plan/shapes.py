"""Model shapes with known figures, and machines of any size."""

from __future__ import annotations

from longgen.kv.budget import DeviceBudget, HostBudget
from longgen.kv.memory_plan import Machine
from longgen.kv.predict import Rates, reference_rates
from longgen.model_shape import FULL, WINDOW, ModelShape
from tests.plan.machines import GIB

SMALL = ModelShape("small", (FULL,) * 28, 1024, 151936, 3072, 16, 8, 128, 40960, tied=True)  # Qwen3-0.6B's
SEVEN = ModelShape(
    "seven", (FULL,) * 28, 3584, 152064, 18944, 28, 4, 128, 1010000, query_norm=False, qkv_bias=True
)  # Qwen2.5-7B's
SLIDING = ModelShape("sliding", (FULL, WINDOW) * 4, 256, 1000, 512, 4, 2, 64, 4096, window=100, dtype="float32")


def machine(
    gpu: float | None, host: float | None = 120, rates: Rates | None = None, *, shared: bool = False
) -> Machine:
    """A machine with so many GiB of each, as fast as an H200 unless told otherwise."""
    return Machine(
        host=None if host is None else HostBudget(int(host * GIB), 0, "a test", ()),
        device=None if gpu is None else DeviceBudget(int(gpu * GIB), 140 * GIB, "a test"),
        rates=rates or reference_rates(128),
        shared=shared,
    )
