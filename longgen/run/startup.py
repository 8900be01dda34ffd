"""The start of a command that runs a model: most of its time is spent in importing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Imported by transformers where they are there: for the drafts of an assistant model (by some releases, with pandas),
# for the losses of object detection, for images and for sound, which no run has. They take about a second, and one
# that does not fit its torch would fail the run.
UNUSED = ("sklearn", "scipy", "torchvision", "torchaudio")


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
        with _hidden(*UNUSED):
            import longgen.engine
            import longgen.model.tokenizer
            import longgen.model.window
            import longgen.planning.opening  # noqa: F401
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


@contextmanager
def _hidden(*names: str) -> Iterator[None]:
    """Modules that are not loaded yet cannot be found or imported meanwhile."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: which is how Python is told of none
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
