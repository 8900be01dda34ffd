"""Every test here runs on CUDA; those that also mean something on the CPU take `device`, and run there small."""

from __future__ import annotations

import pytest
import torch

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.cuda))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)
