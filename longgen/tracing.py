"""A Chrome trace (chrome://tracing, Perfetto) of part of a run: what ran on which stream, and when.

Recorded are the last chunks of a prompt and the first decode steps after it, so that a trace of a long run is as large
as that of a short one, and shows the passes that read the most.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from longgen.errors import LongGenError, UsageError
from longgen.places import check_place
from longgen.units import show_count

if TYPE_CHECKING:
    import torch

Label = Callable[[str], AbstractContextManager[Any]]  # a range of the trace, under a name

DEFAULT_CHUNKS = 2
STEPS = 4
_OPENING = re.compile(rb'\s*\{\s*"(schemaVersion|traceEvents)"')  # of torch's traces, and of an empty one


def unlabelled(_: str) -> AbstractContextManager[Any]:
    """The Label of a run without a trace."""
    return nullcontext()


class TraceError(LongGenError):
    """A trace cannot be recorded or written. What the run was for is not touched by it."""


def trace_path(text: str, **others: str | Path | None) -> Path:
    """Where a trace is to be written. Raises UsageError if no file can be written there, if what is there is no trace,
    or if it is one of `others`, files that the run writes too, by what messages call them."""
    path = Path(text)
    for name, other in others.items():
        if other is not None and os.path.realpath(path) == os.path.realpath(other):
            raise UsageError(f"the trace {path} would replace the {name}; give it a file of its own")
    check_place(path, f"the trace {path}")
    if path.exists() and not _may_be_replaced(path):
        raise UsageError(f"the trace {path} would replace a file that is no trace; give it a file of its own")
    return path


def _may_be_replaced(path: Path) -> bool:
    """Whether a file is an older trace, or empty: a prompt, say, is not."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            opening = file.read(64)
    except (OSError, EOFError):
        return path.stat().st_size == 0
    return not opening or _OPENING.match(opening) is not None


@contextmanager
def traced(
    path: Path | None, device: torch.device, err: TextIO, *, chunks: int = DEFAULT_CHUNKS, armed: bool = True
) -> Iterator[Trace | None]:
    """A trace for the engine of a run, written to `path` at its end, also where it fails; None: no trace.

    Says on `err` what was recorded. Raises TraceError if a run that did not fail cannot write its trace.
    """
    if path is None:
        yield None
        return
    trace, failed = Trace(device, chunks=chunks, armed=armed), True
    try:
        yield trace
        failed = False
    finally:
        try:
            notice = trace.write(path)
        except TraceError as error:
            if not failed:
                raise
            notice = f"error: {error}"
        print(f"longgen: {notice}", file=err)


class Trace:
    """Records the last `chunks` chunks of the first prompt and up to STEPS decode steps after them, once.

    The engine says what is about to run; from the first of these passes to the last, torch's profiler is on.
    A trace that is not armed records nothing: set `armed` before the prompt that is wanted.
    """

    def __init__(self, device: torch.device, *, chunks: int = DEFAULT_CHUNKS, armed: bool = True) -> None:
        self.chunks, self.armed = chunks, armed
        self._device = device
        self._profiler: Any = None
        self._recording = False
        self._chunks = self._steps = 0  # recorded
        self._left = 0  # chunks of the prompt that was last begun to be recorded

    def label(self, name: str) -> AbstractContextManager[Any]:
        """A range under `name`, of what is called within it; nothing while nothing is recorded."""
        if not self._recording:
            return nullcontext()
        from torch.profiler import record_function

        return record_function(name)

    def chunk(self, left: int) -> None:
        """A chunk is about to run, of a prompt of which `left` are left with it."""
        if self._recording and left != self._left - 1:
            self.stop()  # the prompt after the one that is recorded
        elif self._profiler is None and self.armed and left <= self.chunks:
            self._start()
        if self._recording:
            self._left, self._chunks = left, self._chunks + 1

    def step(self) -> None:
        """A decode step is about to run."""
        if self._recording and self._steps == STEPS:
            self.stop()
        if self._recording:
            self._steps += 1

    def stop(self) -> None:
        """Ends the recording, if it is on; waits for the device."""
        if self._recording:
            self._recording = False
            self._profiler.stop_trace()

    def write(self, path: Path) -> str:
        """Ends the recording and writes it; returns what it holds. Raises TraceError if that fails."""
        try:
            self.stop()
            if self._profiler is None:
                path.write_text(json.dumps({"traceEvents": []}) + "\n", encoding="utf-8")
                wanted = show_count(self.chunks, "chunk")
                return f"the trace {path} is empty: the run ended before the last {wanted} of a prompt"
            file = Path(os.path.realpath(path))  # a link stays one
            file.open("wb").close()  # torch's profiler says nothing of a place that it cannot write to
            self._profiler.export_chrome_trace(str(file))
            if not file.stat().st_size:
                raise OSError("torch's profiler wrote nothing")
        except Exception as error:  # of the disk, of CUDA, of the profiler
            raise TraceError(f"the trace {path} cannot be written: {' '.join(str(error).split())[:200]}") from error
        return f"trace of {show_count(self._chunks, 'chunk')} and {show_count(self._steps, 'decode step')} in {path}"

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler writes its own lines to standard error
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.11 says of every trace that a second one would replace it
            self._profiler.prepare_trace()
        self._profiler.start_trace()
        self._recording = True
