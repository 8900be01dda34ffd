from __future__ import annotations

import pytest

from longgen.evaluation.ask import Reader
from tests.demo.reading import open_reader


@pytest.fixture(scope="session")
def reader() -> Reader:
    """The demo checkpoint as it ships, in its own dtype."""
    return open_reader()


@pytest.fixture(scope="session")
def exact_reader() -> Reader:
    """The same in fp32, for comparing logits."""
    return open_reader("float32")
