from __future__ import annotations

import pytest

from longgen.evaluation.ask import Reader
from longgen.model.checkpoint import DEMO_FOLDER
from tests.demo.reading import open_reader


@pytest.fixture(scope="session")
def reader() -> Reader:
    """The demo checkpoint as it ships, in its own dtype."""
    if not DEMO_FOLDER.is_dir():
        pytest.skip("the demo checkpoint is not there yet")
    return open_reader()


@pytest.fixture(scope="session")
def exact_reader() -> Reader:
    """The same in fp32, for comparing logits."""
    if not DEMO_FOLDER.is_dir():
        pytest.skip("the demo checkpoint is not there yet")
    return open_reader("float32")
