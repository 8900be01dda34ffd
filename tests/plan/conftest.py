"""Fixtures of the planning tests."""

from __future__ import annotations

import pytest

from tests.checkpoints import Build, builder


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds tiny checkpoints, each once."""
    return builder(tmp_path_factory.mktemp("plan-checkpoints"))
