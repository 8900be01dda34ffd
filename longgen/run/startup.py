"""The start of a command that runs a model: most of its time is spent in importing."""

from __future__ import annotations

import gc
import sys


def import_libraries() -> None:
    """Imports torch, transformers and what stands on them, without garbage collection.

    Importing makes about a million objects that live as long as the process. The collector would look through them
    again and again, and once more at the end of the process: a third of the time of a short run. They are set aside
    (`gc.freeze`); what is made later is collected as ever. Where transformers is there already, nothing is done.
    """
    if "transformers" in sys.modules:
        return
    collecting = gc.isenabled()
    gc.disable()
    try:
        import longgen.engine
        import longgen.model.tokenizer
        import longgen.model.window
        import longgen.planning.opening  # noqa: F401
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
