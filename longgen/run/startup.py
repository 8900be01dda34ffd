"""The start of a command that runs a model: most of its time is spent in importing."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Imported by some releases of transformers, with scipy and pandas, where it is there: for choosing between the drafts
# of an assistant model, which no run has. It takes about a second.
UNUSED = "sklearn"


def import_libraries(device: str = "cpu") -> None:
    """Imports torch, transformers and what stands on them, without garbage collection and without UNUSED.

    The CUDA context of `device` (auto, cpu, cuda or cuda:N) is made meanwhile.

    Importing makes about a million objects that live as long as the process. The collector would look through them
    again and again, and once more at the end of the process: a third of the time of a short run. They are set aside
    (`gc.freeze`); what is made later is collected as ever. Where transformers is there already, nothing is done.
    """
    if "transformers" in sys.modules:
        return
    _open_device(device)
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


def _open_device(name: str) -> None:
    """Makes the CUDA context of a device in a thread, which takes some tenths of a second and nothing of Python.

    torch uses the context that a process has (the primary one), and finds by itself whatever is wrong with device or
    driver: nothing is raised here. A process does not end before this thread: the driver is not to be left half way.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch has it; older drivers load every kernel otherwise
    kind, _, number = name.partition(":")
    if kind in ("auto", "cuda"):
        index = int(number) if number.isdecimal() else 0
        threading.Thread(target=_make_context, args=(index,), name="CUDA context").start()


def _make_context(index: int) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return  # no driver, so no device
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


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
