"""The start of a command that runs a model: most of its time is spent in importing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Imported by some releases of transformers, with scipy and pandas, where it is there: for choosing between the drafts
# of an assistant model, which no run has. It takes about a second.
UNUSED = "sklearn"


def import_libraries() -> None:
    """Imports torch, transformers and what stands on them, without garbage collection and without UNUSED.

    Importing makes about a million objects that live as long as the process. The collector would look through them
    again and again, and once more at the end of the process: a third of the time of a short run. They are set aside
    (`gc.freeze`); what is made later is collected as ever. Where transformers is there already, nothing is done.
    """
    if "transformers" in sys.modules:
        return
    collecting = gc.isenabled()
    gc.disable()
    try:
        with _hidden(UNUSED):
            import longgen.engine
            import longgen.model.tokenizer
            import longgen.model.window
            import longgen.planning.opening  # noqa: F401
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


@contextmanager
def _hidden(name: str) -> Iterator[None]:
    """A module that is not loaded yet cannot be found or imported meanwhile."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # which is how Python is told that there is none
    try:
        yield
    finally:
        del sys.modules[name]
