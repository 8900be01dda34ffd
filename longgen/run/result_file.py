"""A file of results that a run may be killed on at any moment, and resumed."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

from longgen.config import Settings
from longgen.errors import OutputError, UsageError
from longgen.run.interrupts import uninterrupted
from longgen.run.results import Written, may_be_torn, read_line
from longgen.units import show_count

COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of one of the files: `size` bytes from `start`."""

    written: Written
    descriptor: int
    start: int
    size: int


class ResultFile:
    """A file of results, one line a record, and beside it one of records that were done again.

    A line is appended where it keeps the order of the batch. What would come out of order, such as a record that
    failed and is tried again, goes to FILE.retried, and `finish` brings both together: it writes FILE.tmp and renames
    it. So whenever a run is killed, the file holds whole lines, but for one at its end that may be torn, and nothing
    that was done is lost.

    Args:
        settings: name the file and the format of its lines, and say what is done with one that is there.
        ids: of the batch, in order.
        err: for notices.

    Raises:
        OSError: the file, or the one beside it, cannot be opened.
        UsageError: it is locked, holds something else than results, or should not be there.
    """

    def __init__(self, settings: Settings, ids: Sequence[str], err: TextIO) -> None:
        self._name, self._format = settings.output or "", settings.output_format or "jsonl"
        self._path = os.path.realpath(self._name)
        self._order = {record_id: index for index, record_id in enumerate(ids)}
        self._err = err
        self._main, self._made = _open_locked(self._path, self._name, err)
        self._again: int | None = None
        self._lines: dict[str, _Line] = {}
        self._whole: dict[int, int] = {}  # bytes of whole lines in each of the two files
        self._overwrite, self._resume = settings.overwrite, settings.resume
        self._ready = False
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        known = [self._order[line_id] for line_id in self._lines if line_id in self._order]
        self._last = max(known, default=-1)  # where in the batch the file's lines end

    def _open(self) -> None:
        size = os.fstat(self._main).st_size
        if not size or self._overwrite:
            return
        if not self._resume:
            raise UsageError(f"the output {self._name} is there already; --overwrite replaces it")
        self._scan(self._main, self._name)
        with suppress(FileNotFoundError):
            self._again = os.open(self._again_path, os.O_RDWR | os.O_APPEND)
            self._scan(self._again, self._again_path)
        foreign = sum(line_id not in self._order for line_id in self._lines)
        if foreign:
            print(
                f"longgen: note: keeping {show_count(foreign, 'result')} of other records in {self._name}",
                file=self._err,
            )

    @property
    def _again_path(self) -> str:
        return f"{self._path}.retried"

    def _scan(self, descriptor: int, name: str) -> None:
        """Takes down the lines of a file. Of several lines of one record the last one counts."""
        start = 0
        with open(os.dup(descriptor), "rb") as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                written = read_line(line, self._format)
                whole = line.endswith(b"\n")
                if written is None and (whole or not may_be_torn(line)):
                    raise UsageError(
                        f"{name} line {number} is no result of --output-format {self._format}; give another --output, "
                        "or --overwrite to replace the file"
                    )
                if written is not None and whole:
                    self._lines[written.id] = _Line(written, descriptor, start, len(line))
                    start += len(line)
        self._whole[descriptor] = start

    def written(self, record_id: str) -> Written | None:
        line = self._lines.get(record_id)
        return line.written if line else None

    def in_turn(self, ids: Sequence[str]) -> list[str]:
        """First those whose lines can be appended."""
        return sorted(ids, key=lambda record_id: self._order[record_id] <= self._last)

    def write(self, record_id: str, line: bytes) -> None:
        with self._failures_named(), uninterrupted():
            self._begin()
            if self._order[record_id] > self._last:
                descriptor, self._last = self._main, self._order[record_id]
            else:
                descriptor = self._open_again()
            start = _size(descriptor)
            _append(descriptor, line, start)
            written = read_line(line, self._format)
            assert written is not None
            self._lines[record_id] = _Line(written, descriptor, start, len(line))

    def finish(self) -> None:
        """Brings what was done again to its place."""
        with self._failures_named(), uninterrupted():
            self._begin()
            if self._again is None and self._in_order():
                return
            self._put_in_place()

    def _begin(self) -> None:
        """Drops what should not be kept: a torn line, or all there is."""
        if self._ready:
            return
        os.ftruncate(self._main, self._whole.get(self._main, 0))
        if self._again is not None:
            os.ftruncate(self._again, self._whole[self._again])
        else:
            with suppress(FileNotFoundError):
                os.unlink(self._again_path)  # of a file that was there before
        self._ready = True

    def _open_again(self) -> int:
        if self._again is None:
            self._again = os.open(self._again_path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        return self._again

    def _sorted(self) -> list[_Line]:
        """The lines in the order of the batch, and those of other records after them."""
        last = len(self._order)
        return sorted(self._lines.values(), key=lambda line: self._order.get(line.written.id, last))

    def _in_order(self) -> bool:
        starts = [line.start for line in self._sorted()]
        # A line that counts no more, because another of its record came later, is in the way too.
        return starts == sorted(starts) and sum(line.size for line in self._lines.values()) == _size(self._main)

    def _put_in_place(self) -> None:
        """Writes all lines to a temporary file, which takes the file's place and its lock."""
        temporary = f"{self._path}.tmp"
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            with suppress(OSError):  # where the file could not be locked either
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(descriptor, stat.S_IMODE(os.fstat(self._main).st_mode))
            for line in self._sorted():
                _copy(line, descriptor)
            os.fsync(descriptor)
            os.replace(temporary, self._path)
        except BaseException:
            os.close(descriptor)
            with suppress(OSError):
                os.unlink(temporary)
            raise
        os.close(self._main)
        self._main, self._lines = descriptor, {}
        if self._again is not None:
            os.unlink(self._again_path)

    @contextmanager
    def _failures_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(error, error.filename or self._name) from error  # which may be a file beside it

    @property
    def going_on(self) -> str:
        """How a run that was interrupted is gone on with, as the end of a sentence."""
        if self._overwrite and not self._ready:
            return f"; {self._name} is as it was"
        refused = not self._resume and self._ready
        without = " without --overwrite" if self._overwrite else " without --no-resume" if refused else ""
        return f"; the same command{without} goes on from there"

    def close(self) -> None:
        """Closes the files and with that gives up the lock."""
        for descriptor in (self._main, self._again):
            if descriptor is not None:
                os.close(descriptor)

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._made and not _size(self._main):
            with suppress(OSError):
                os.unlink(self._path)  # no run had anything to write to it
        self.close()


def _open_locked(path: str, name: str, err: TextIO) -> tuple[int, bool]:
    """The file, made if it is not there, open for reading and appending, and locked against other runs.

    Returns its descriptor, and whether it was made.
    """
    while True:
        made = not os.path.lexists(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UsageError(f"the output {name} is in use by another run; wait for it, or give another one") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                os.close(descriptor)
                raise
            print(f"longgen: note: {name} cannot be locked here: two runs on it would not notice each other", file=err)
        with suppress(FileNotFoundError):
            # Another run may have put a new file in its place between the two calls.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor, made
        os.close(descriptor)


def _append(descriptor: int, line: bytes, start: int) -> None:
    """Writes a line at the end, which is at `start`; what a full disk leaves of it is taken back."""
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, start)
        raise


def _copy(line: _Line, target: int) -> None:
    start, left = line.start, line.size
    while left:
        piece = os.pread(line.descriptor, min(left, COPY_BYTES), start)
        if not piece:
            raise OSError(errno.EIO, "the file became shorter while it was in use")
        _append(target, piece, _size(target))
        start, left = start + len(piece), left - len(piece)


def _size(descriptor: int) -> int:
    return os.fstat(descriptor).st_size
