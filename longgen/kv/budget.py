"""What memory this process may use: the GPU's, under a cap, and the host's, under every limit that binds it.

Files are read under a root that tests replace: /proc/meminfo, /proc/self/{cgroup,mountinfo,limits,statm} and the
cgroup trees. Nothing here loads torch except `device_budget`, which asks CUDA.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path, PurePosixPath

from longgen.errors import CapacityError
from longgen.units import show_bytes

MEMORY_GROWTH = 16  # times: what a virtual machine says it has may be what it has been given so far
NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of a page
MAX_RESERVE = 2 << 30
CONTEXT_BYTES = 640 << 20  # a CUDA context with the kernels of torch and cuBLAS, no workspace


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """Device memory for this process, its CUDA context and libraries included, as cudaMemGetInfo counts.

    Attributes:
        usable: bytes that the process may hold in all.
        total: bytes of the card; equal to `usable` where there is no card to ask.
        source: where `usable` comes from, for messages.
        others: bytes that other processes hold.
    """

    usable: int
    total: int
    source: str
    others: int = 0


@dataclass(frozen=True, slots=True)
class HostLimit:
    """One limit on host memory. free: bytes it still leaves; source: its name and numbers, for messages."""

    free: int
    source: str


@dataclass(frozen=True, slots=True)
class HostBudget:
    """Host memory that may still be taken.

    Attributes:
        usable: bytes, the tightest limit less the reserve.
        reserve: bytes left to everything else.
        source: the tightest limit, for messages.
        limits: all limits found, tightest first.
    """

    usable: int
    reserve: int
    source: str
    limits: tuple[HostLimit, ...]


def host_budget(cap: int | None = None, root: Path = Path("/")) -> HostBudget:
    """What host memory is left under the tightest of MemAvailable, every cgroup up the tree and RLIMIT_AS.

    Args:
        cap: the user's own limit in bytes. It takes the place of MemAvailable, which may be too low where memory is
            given to a virtual machine as it is used, and no reserve is kept from it; other limits still bind.
        root: where /proc and /sys are.

    A tenth of the tightest limit, at most 2 GiB, is kept in reserve, so that the machine stays usable.
    """
    found = [*cgroup_limits(root), *_address_space(root)]
    if cap is None:
        found += _mem_available(root)
    limits = sorted(found, key=lambda limit: limit.free)
    if not limits:
        unknown = "it cannot be read here; give --cpu-memory"
        return HostBudget(cap or 0, 0, unknown if cap is None else _shown_cap(cap), ())
    tightest = limits[0]
    reserve = min(MAX_RESERVE, max(0, tightest.free) // 10)
    usable = max(0, tightest.free - reserve)
    if cap is not None and cap <= usable:
        return HostBudget(cap, 0, _shown_cap(cap), tuple(limits))
    return HostBudget(usable, reserve, tightest.source, tuple(limits))


def _shown_cap(cap: int) -> str:
    return f"--cpu-memory {show_bytes(cap)}"


def device_cap(asked: int | float | None, total: int) -> int | None:
    """`--gpu-memory` in bytes: a number of bytes, or a fraction of the card (a float up to 1).

    Raises CapacityError if it is more than the card has.
    """
    if asked is None:
        return None
    cap = math.floor(asked * total) if isinstance(asked, float) else asked
    if cap > total:
        raise CapacityError(
            f"--gpu-memory {show_bytes(cap)} is more than the {show_bytes(total)} that the card has; lower it"
        )
    return cap


def limit_device(asked: int | float | None, *, free: int, total: int, held: int) -> DeviceBudget:
    """The device budget from cudaMemGetInfo's (free, total) and the bytes that this process holds already.

    Raises CapacityError for a cap above the card, or above what other processes leave of it.
    """
    cap = device_cap(asked, total)
    room = min(total, free + held)
    if cap is None:
        source = f"{show_bytes(room)} free of {show_bytes(total)} on the GPU"
        return DeviceBudget(room, total, source, total - room)
    if cap > room:
        raise CapacityError(
            f"--gpu-memory {show_bytes(cap)} is more than the {show_bytes(room)} that other processes leave free of "
            f"the card's {show_bytes(total)}; lower it, or end them"
        )
    source = f"--gpu-memory {show_bytes(cap)} of the card's {show_bytes(total)}"
    return DeviceBudget(cap, total, source, total - room)


def device_budget(asked: int | float | None, index: int = 0) -> DeviceBudget:
    """The budget of CUDA device `index`. Makes the CUDA context if there is none yet."""
    import torch

    device = torch.device("cuda", index)
    reserved = torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    # Where nothing else runs on the card, what is taken beyond torch's own memory is this process's context. It cannot
    # be told from another process's memory, so no more than a context's size is counted as ours.
    held = reserved + min(max(0, total - free - reserved), CONTEXT_BYTES)
    return limit_device(asked, free=free, total=total, held=held)


def cap_allocator(budget: DeviceBudget, runtime_bytes: int, index: int = 0) -> None:
    """Makes torch refuse what would take the process over its budget, instead of the card filling up.

    runtime_bytes: what the context and the libraries take beside torch's own allocations.
    """
    import torch

    share = max(0, budget.usable - runtime_bytes) / budget.total
    torch.cuda.set_per_process_memory_fraction(min(1.0, share), torch.device("cuda", index))


def cgroup_limits(root: Path = Path("/")) -> list[HostLimit]:
    """The memory limits of this process's cgroups, v1 and v2, from its own up to the root of what is mounted."""
    limits: list[HostLimit] = []
    for kind, folder, top in _cgroup_folders(root):
        while True:
            limits += _v2_limits(folder, root) if kind == "cgroup2" else _v1_limits(folder, root)
            if folder == top:
                break
            folder = folder.parent
    return limits


def _cgroup_folders(root: Path) -> Iterator[tuple[str, Path, Path]]:
    """(file system type, folder of this process's cgroup, folder of the mount) of each memory hierarchy."""
    own = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not path.startswith("/"):
            continue
        if not controllers:
            own["cgroup2"] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            own["cgroup"] = PurePosixPath(path)
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) < 5 or len(tail) < 3 or tail[0] not in own:
            continue
        if tail[0] == "cgroup" and "memory" not in tail[2].split(","):
            continue
        mount_root, top = PurePosixPath(_unescaped(fields[3])), root / _unescaped(fields[4]).lstrip("/")
        yield tail[0], _below(top, mount_root, own[tail[0]]), top


def _below(top: Path, mount_root: PurePosixPath, path: PurePosixPath) -> Path:
    """The folder of cgroup `path` in a mount of `mount_root` at `top`; the deepest that can be seen of it.

    In a container the path may be that of the host, of which the mount shows only the part below `mount_root`.
    """
    relative = path.relative_to(mount_root) if path.is_relative_to(mount_root) else path.relative_to("/")
    folder = top if ".." in relative.parts else top / relative
    while folder != top and not folder.is_dir():
        folder = folder.parent
    return folder


def _unescaped(path: str) -> str:
    """A path of mountinfo, which writes blanks and backslashes as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _v2_limits(folder: Path, root: Path) -> Iterator[HostLimit]:
    used, stat = _number(folder / "memory.current"), _statistics(folder / "memory.stat")
    held = (used or 0) - _reclaimable(stat, "")
    # Above memory.high a group is slowed down to a crawl rather than refused.
    for name in ("memory.max", "memory.high"):
        limit = _number(folder / name)
        if limit is not None:
            yield _cgroup_limit(limit, held, f"{_shown(folder, root)}/{name}")


def _v1_limits(folder: Path, root: Path) -> Iterator[HostLimit]:
    used, stat = _number(folder / "memory.usage_in_bytes"), _statistics(folder / "memory.stat")
    held = (used or 0) - _reclaimable(stat, "total_")
    limits = {
        "memory.limit_in_bytes": _number(folder / "memory.limit_in_bytes"),
        # The tightest limit above this group, also of groups that a container cannot see.
        "memory.stat hierarchical_memory_limit": stat.get("hierarchical_memory_limit"),
    }
    for name, limit in limits.items():
        if limit is not None and limit < NO_LIMIT:
            yield _cgroup_limit(limit, held, f"{_shown(folder, root)}/{name}")


def _cgroup_limit(limit: int, held: int, name: str) -> HostLimit:
    return HostLimit(limit - held, f"{name} {show_bytes(limit)}, {show_bytes(max(0, held))} of it used")


def _reclaimable(stat: dict[str, int], prefix: str) -> int:
    """Bytes of page cache that the kernel gives up when memory is asked for.

    As MemAvailable counts: all of the inactive file pages, half of the active ones, less what must first be written
    to disk. Shared memory and tmpfs are not file pages here.
    """
    clean = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0) // 2
    dirty = sum(stat.get(f"{prefix}{name}", 0) for name in ("file_dirty", "file_writeback", "dirty", "writeback"))
    return max(0, clean - dirty) + stat.get(f"{prefix}slab_reclaimable", 0) // 2


def total_memory(root: Path = Path("/")) -> int | None:
    """Bytes of host memory that the machine has, used or not; None is unknown."""
    return _meminfo(root).get("MemTotal")


def beyond_machine(nbytes: int) -> str | None:
    """How many more so many bytes are than this machine could ever be given; None: they are not, or it is unknown."""
    there = total_memory()
    if there is None or nbytes <= MEMORY_GROWTH * there:
        return None
    return f"more than {MEMORY_GROWTH} times the {show_bytes(there)} that this machine has"


def _meminfo(root: Path) -> dict[str, int]:
    values = {}
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name] = int(words[0]) * 1024
    return values


def _mem_available(root: Path) -> list[HostLimit]:
    values = _meminfo(root)
    free = values.get("MemAvailable", values.get("MemFree"))
    if free is None:
        return []
    total = values.get("MemTotal", free)
    return [HostLimit(free, f"{show_bytes(free)} available of {show_bytes(total)} of memory")]


def _address_space(root: Path) -> list[HostLimit]:
    for line in _lines(root / "proc/self/limits"):
        if line.startswith("Max address space"):
            soft = line.removeprefix("Max address space").split()[0]
            if soft.isdigit():
                pages = next(iter(_lines(root / "proc/self/statm")), "0").split()
                used = int(pages[0]) * PAGESIZE  # 64 KiB on some ARM machines
                name = f"RLIMIT_AS (ulimit -v) {show_bytes(int(soft))}, {show_bytes(used)} of it used"
                return [HostLimit(int(soft) - used, name)]
    return []


def locked_memory_limit(root: Path = Path("/")) -> int | None:
    """RLIMIT_MEMLOCK in bytes; None is unlimited or unknown. CUDA's pinning is not bound by it everywhere."""
    for line in _lines(root / "proc/self/limits"):
        if line.startswith("Max locked memory"):
            soft = line.removeprefix("Max locked memory").split()[0]
            return int(soft) if soft.isdigit() else None
    return None


def _statistics(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _number(path: Path) -> int | None:
    """The number in a file; None for "max", for anything else and for no file."""
    text = next(iter(_lines(path)), "").strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _shown(folder: Path, root: Path) -> str:
    return "/" + folder.relative_to(root).as_posix()
