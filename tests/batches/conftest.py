"""A tiny checkpoint for the batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import Build


@pytest.fixture
def tiny(build: Build) -> Path:
    return build("qwen3")
