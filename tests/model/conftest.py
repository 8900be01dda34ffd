from __future__ import annotations

import pytest

from tests.checkpoints import Build, builder


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return builder(tmp_path_factory.mktemp("checkpoints"))
