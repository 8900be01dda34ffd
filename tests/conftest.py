"""What holds for all tests."""

from __future__ import annotations

import os
import signal

# Small tensors are slower on many threads; set before torch is imported, and passed on to subprocesses.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background has them ignore Ctrl-C, and so all programs that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.checkpoints import Build, builder

# On a busy machine no example has a second that is its own; and the same examples every time, so that a test that fails
# fails for what was changed.
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds tiny checkpoints, each once; whoever changes one copies it first."""
    return builder(tmp_path_factory.mktemp("checkpoints"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need a CUDA device where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
