"""What a measurement was made with: the machine and the versions, as plain values."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("transformers", "triton", "flash-attn", "fa3-fwd", "flash-linear-attention", "causal-conv1d")


def package_version(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def driver_version() -> str:
    """The GPU driver's version from the kernel module, without asking a tool."""
    try:
        first = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return "unknown"
    return next((word for word in first.split() if word[0].isdigit() and "." in word), "unknown")


def machine_facts(device: Any) -> dict[str, Any]:
    """The processor, the memory, and of a torch device that is CUDA the GPU."""
    facts: dict[str, Any] = {
        "device": str(device),
        "cpu": _first("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _first("/proc/meminfo", "MemTotal"),
    }
    if device.type == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(device)
        facts |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, "driver": driver_version()}
    return facts


def versions() -> dict[str, str | None]:
    """Of Python, torch with its CUDA, and what matters for speed; None where a package is not installed."""
    import torch

    import longgen

    found: dict[str, str | None] = {"longgen": longgen.__version__, "python": platform.python_version()}
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    return found | {name: package_version(name) for name in PACKAGES}


def _first(path: str, name: str) -> str | None:
    """The value of the first `name: value` line of a file of /proc."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
