"""A tiny checkpoint for the batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import Build, never_ending


@pytest.fixture
def tiny(build: Build) -> Path:
    return build("qwen3")


@pytest.fixture
def endless(tiny: Path, tmp_path: Path) -> Path:
    """The same, without a token that ends an answer."""
    return never_ending(tiny, tmp_path / "endless")
