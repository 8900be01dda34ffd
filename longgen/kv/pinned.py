"""Pinned host memory of exactly the size asked for: mapped by the process, then registered with CUDA.

torch's own pinned allocator rounds every piece up to a power of two; here 60 GB of KV take 60 GB.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch

# cudaHostRegisterPortable | cudaHostRegisterMapped (CUDA runtime API, cudaHostRegister): usable from every context,
# and readable by kernels.
REGISTER_FLAGS = 0x01 | 0x02

Register = Callable[[int, int], int]  # (address, bytes) -> CUDA error code, 0 for success


def cuda_register(address: int, nbytes: int) -> int:
    """Pins memory in place. Returns the CUDA error code."""
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, REGISTER_FLAGS))
    if code:
        # The refusal also waits as "last error" for the next kernel launch to report: let it be this idle one.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    return code


def cuda_unregister(address: int) -> None:
    """Ends the pinning. Nothing may still copy from or to the memory."""
    torch.cuda.cudart().cudaHostUnregister(address)


def _release(unregister: Callable[[int], None], address: int, mapping: mmap.mmap) -> None:
    """Unregisters memory while `mapping` still keeps it mapped: the address belongs to nobody else yet."""
    unregister(address)


class PinnedMemory:
    """Makes host memory that copies to and from the GPU run at the full rate of the wire.

    Where registration is refused (a limit on locked memory, some virtual machines) the memory stays pageable: the
    driver then stages every copy, at about a sixth of the rate, and the host waits for it. One warning says so.

    Several threads may allocate at once: what takes long lets the others run.
    """

    def __init__(
        self,
        register: Register = cuda_register,
        unregister: Callable[[int], None] = cuda_unregister,
        *,
        warns: bool = True,
    ) -> None:
        """`warns`: whether the first refusal is worth a warning here (measuring leaves it to the run that follows)."""
        self._register, self._unregister, self._warns = register, unregister, warns
        self.refused: str | None = None  # why memory is pageable, once a registration has been refused
        self._refusing = threading.Lock()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], zeroed, unpinned and unmapped when the tensor's memory is no longer used."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        # Private, since shared memory takes huge pages on few machines. Some kernels have none, and refuse to be asked.
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
        buffer = (ctypes.c_ubyte * nbytes).from_buffer(mapping)
        memory = torch.frombuffer(buffer, dtype=torch.uint8)
        # Touches every page: registration would, more slowly. On one core, with others free to do the same, and without
        # the interpreter's lock.
        ctypes.memset(memory.data_ptr(), 0, nbytes)
        if self.refused is None:
            self._pin(mapping, buffer, memory.data_ptr())
        return memory

    def _pin(self, mapping: mmap.mmap, buffer: ctypes.Array[ctypes.c_ubyte], address: int) -> None:
        nbytes = len(buffer)
        code = self._register(address, nbytes)
        if code == 0:
            # Hung on what the tensor holds, and holding the mapping: a mapping alone is gone before its finalizer runs.
            weakref.finalize(buffer, _release, self._unregister, address, mapping)
            return
        with self._refusing:
            first = self.refused is None
            if first:
                self.refused = f"CUDA refused to pin {nbytes:,} bytes of host memory (error {code})"
        if first and self._warns:
            logging.getLogger("longgen").warning(
                "%s: copies will run at about a sixth of the wire's rate. Raise the limit on locked memory (ulimit -l) "
                "if there is one.",
                self.refused,
            )
