"""Made-up /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path

GIB = 1 << 30


def write(root: Path, path: str, text: str | int) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def machine(root: Path, *, available: int = 64 * GIB, total: int = 128 * GIB) -> Path:
    """A machine without cgroups or limits."""
    write(root, "proc/meminfo", f"MemTotal: {total // 1024} kB\nMemAvailable:   {available // 1024} kB\nHugePages: 0")
    write(root, "proc/self/limits", "Limit  Soft  Hard\nMax address space         unlimited  unlimited  bytes")
    write(root, "proc/self/statm", "0 0 0 0 0 0 0")
    return root


def v2(root: Path, own: str, *, mount_root: str = "/", at: str = "sys/fs/cgroup") -> Path:
    """Puts the process in cgroup v2 group `own`. Returns the mount's folder, where groups are folders."""
    write(root, "proc/self/cgroup", f"0::{own}")
    mount = f"30 20 0:26 {mount_root} /{at} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
    write(root, "proc/self/mountinfo", f"20 1 8:1 / / rw - ext4 /dev/sda1 rw\n{mount}")
    (root / at).mkdir(parents=True, exist_ok=True)
    return root / at


def v1(root: Path, own: str, *, mount_root: str = "/") -> Path:
    """Puts the process in group `own` of the v1 memory controller. Returns the mount's folder."""
    at = "sys/fs/cgroup/memory"
    write(root, "proc/self/cgroup", f"5:devices:/x\n4:cpu,cpuacct:/y\n3:memory:{own}\n0::/")
    mounts = [
        "31 20 0:27 / /sys/fs/cgroup/devices rw - cgroup devices rw,devices",
        f"32 20 0:28 {mount_root} /{at} rw,relatime shared:9 - cgroup cgroup rw,memory",
    ]
    write(root, "proc/self/mountinfo", "\n".join(mounts))
    (root / at).mkdir(parents=True, exist_ok=True)
    return root / at


def v2_group(folder: Path, limit: int | str, used: int, *, stat: str = "", high: int | str = "max") -> None:
    write(folder, "memory.max", limit)
    write(folder, "memory.high", high)
    write(folder, "memory.current", used)
    write(folder, "memory.stat", stat)


def v1_group(folder: Path, limit: int, used: int, *, stat: str = "") -> None:
    write(folder, "memory.limit_in_bytes", limit)
    write(folder, "memory.usage_in_bytes", used)
    write(folder, "memory.stat", stat)
