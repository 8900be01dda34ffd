"""`longgen doctor`: what this machine has for long prompts, what is missing, and what each means."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch

from longgen.attention.backends import default_kernels
from longgen.attention.kernels import CallKind, Rows
from longgen.kv.budget import cgroup_limits, host_budget, locked_memory_limit
from longgen.kv.transfer import open_transfer
from longgen.model.files import hub_cache
from longgen.planning.facts import driver_version, package_version
from longgen.planning.measure import CopyRates, measure_copies
from longgen.units import show_bytes

HEAD_DIMS = (128, 256)  # of the models there are
GROUPS = 4
NOT_INSTALLED = "not installed"
OLDEST_TRANSFORMERS = (5, 17)
SLOW_COPIES = 20e9  # bytes/s; a PCIe 4 slot with all its lanes does 25e9
_PINNED_MEANING = "pinned memory copies at the full rate of the wire; pageable memory at about a sixth"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. state: "ok", "note" or "missing"; meaning: what it means for the user."""

    name: str
    state: str
    value: str
    meaning: str


def report(as_json: bool, out: TextIO) -> None:
    """Prints every finding, as text or as a JSON list."""
    findings = list(examine())
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1), file=out)
        return
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark = {"ok": " ", "note": "!", "missing": "-"}[finding.state]
        print(f"{mark} {finding.name.ljust(width)}  {finding.value}", file=out)
        print(f"  {' ' * width}  {finding.meaning}", file=out)


def examine(root: Path = Path("/")) -> Iterator[Finding]:
    """Looks at everything in turn. root: where /proc and /sys are."""
    yield from _software()
    yield from _host(root)
    yield from _disk()
    if not torch.cuda.is_available():
        yield Finding("GPU", "missing", _why_no_cuda(), "longgen runs on the CPU, slowly; plans work with --gpu-memory")
        yield from _backends(torch.device("cpu"))
        return
    device = torch.device("cuda", torch.cuda.current_device())
    yield from _told("GPU", lambda: _gpu(device), "end what else uses the GPU, or look into its driver")
    yield from _told("attention", lambda: _backends(device), "models cannot run on this GPU as it is")
    yield from _told("pinned memory", lambda: _copies(device), _PINNED_MEANING)


def _told(name: str, look: Callable[[], Iterable[Finding]], meaning: str) -> Iterator[Finding]:
    """What is found, and what the driver says where it fails: the rest of the report is still of use."""
    try:
        yield from look()
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        yield Finding(name, "missing", f"failed: {type(error).__name__}: {text}", meaning)


def _software() -> Iterator[Finding]:
    yield Finding("Python", "ok", f"{platform.python_version()} on {platform.platform()}", "3.10 or newer is needed")
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    state = "ok" if torch.version.cuda else "note"
    yield Finding("torch", state, f"{torch.__version__}, {cuda}", "without CUDA in torch a GPU is not seen")
    yield _transformers(package_version("transformers") or NOT_INSTALLED)
    optional = {
        "flash-attn": "FlashAttention 2: the fastest decode; without it torch's own kernel serves",
        "flash-linear-attention": "fast recurrent layers of Qwen3-Next and Qwen3.5 in 16 bits; else they are slow",
        "causal-conv1d": "their convolution; without it flash-linear-attention's serves, else torch's",
    }
    for name, meaning in optional.items():
        found = package_version(name)
        yield Finding(name, "ok" if found else "missing", found or NOT_INSTALLED, meaning)


def _transformers(version: str) -> Finding:
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
    state = "ok" if numbers >= OLDEST_TRANSFORMERS else "missing"
    return Finding("transformers", state, version, f"the model's own modules; {oldest} or newer is needed")


def _host(root: Path) -> Iterator[Finding]:
    budget = host_budget(root=root)
    value = f"{show_bytes(budget.usable)} usable ({budget.source}; {show_bytes(budget.reserve)} in reserve)"
    yield Finding("host memory", "ok" if budget.usable else "note", value, "the KV cache lives here")
    groups = cgroup_limits(root)
    shown = "; ".join(limit.source for limit in groups) or "none"
    yield Finding("cgroup limits", "ok", shown, "limits of a container or job that bind before the machine's memory")
    locked = locked_memory_limit(root)
    yield Finding(
        "locked memory",
        "ok" if locked is None else "note",
        "unlimited" if locked is None else f"{show_bytes(locked)} (ulimit -l)",
        "CUDA's driver is usually not bound by it; if the pinned-memory test fails, raise it",
    )
    yield Finding("CPU", "ok", f"{len(os.sched_getaffinity(0))} cores usable", "loading and tokenising use them")


def _disk() -> Iterator[Finding]:
    cache = hub_cache()
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    yield Finding("disk", "ok", f"{show_bytes(free)} free for checkpoints in {cache}", "downloaded weights go there")


def _why_no_cuda() -> str:
    driver = driver_version()
    loaded = "no NVIDIA driver is loaded" if driver == "unknown" else f"NVIDIA driver {driver} is loaded"
    if not torch.version.cuda:
        return f"none: this torch is built without CUDA; {loaded}"
    return f"none: torch for CUDA {torch.version.cuda} sees {torch.cuda.device_count()} devices; {loaded}"


def _gpu(device: torch.device) -> Iterator[Finding]:
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    value = f"{properties.name}, compute capability {properties.major}.{properties.minor}, driver {driver_version()}"
    state = "ok" if (properties.major, properties.minor) >= (8, 0) else "note"
    yield Finding("GPU", state, value, "below 8.0 the fused attention kernels do not run")
    yield Finding(
        "GPU memory",
        "ok" if free > 0.9 * total else "note",
        f"{show_bytes(free)} free of {show_bytes(total)}",
        "weights and buffers; what other processes hold is not there for longgen",
    )
    count = torch.cuda.device_count()
    if count > 1:
        yield Finding("other GPUs", "note", f"{count} in all", "one is used; choose it with --device cuda:N")


def _backends(device: torch.device) -> Iterator[Finding]:
    """The attention backend of each kind of call, and why the ones before it were passed over."""
    kernels = default_kernels(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    meanings = {Rows.MANY: "attention in prefill", Rows.ONE: "attention in decode"}
    for head_dim in HEAD_DIMS:
        for rows, meaning in meanings.items():
            kind = CallKind(rows, dtype, head_dim, GROUPS, False, False)
            chosen, value = _choice(kernels.explain(kind.sample(device)))
            state = "missing" if chosen is None else "note" if chosen == "plain-torch" else "ok"
            name = f"{'prefill' if rows is Rows.MANY else 'decode'}, heads of {head_dim}"
            yield Finding(name, state, value, f"{meaning}; the first that agrees with the reference is used")
    verdicts = kernels.merges.explain(dtype, HEAD_DIMS[0], device)
    yield merge_finding(verdicts, device)


def merge_finding(verdicts: Sequence[tuple[str, str | None]], device: torch.device) -> Finding:
    """How partial results are merged; verdicts: see Merges.explain."""
    _, value = _choice(verdicts)
    passed_over = any(why is not None for _, why in verdicts)
    state = "note" if passed_over and device.type == "cuda" else "ok"
    return Finding("merge", state, value, "of partial attention; plain torch moves four times the bytes")


def _choice(verdicts: Sequence[tuple[str, str | None]]) -> tuple[str | None, str]:
    """The first kernel that nothing speaks against (None: there is none), and it in words, with what speaks against
    the others. verdicts: in the order of choice, each name with why not."""
    chosen = next((name for name, why in verdicts if why is None), None)
    refused = "; ".join(f"{name}: {why}" for name, why in verdicts if why is not None)
    return chosen, (chosen or "none") + (f" (not {refused})" if refused else "")


def _copies(device: torch.device) -> Iterator[Finding]:
    """Pins memory and copies it both ways, as the KV cache does."""
    rates = measure_copies(open_transfer(device))
    yield pinned_finding(rates)
    yield copies_finding(rates)


def pinned_finding(rates: CopyRates) -> Finding:
    """Whether host memory could be pinned."""
    if rates.pinned_refusal is None:
        return Finding("pinned memory", "ok", "registered in place", _PINNED_MEANING)
    return Finding("pinned memory", "missing", rates.pinned_refusal, _PINNED_MEANING)


def copies_finding(rates: CopyRates) -> Finding:
    """The rates of the wire."""
    value = (
        f"to the GPU {rates.load / 1e9:.1f} GB/s, from it {rates.offload / 1e9:.1f}, both at once "
        f"{rates.load_beside / 1e9:.1f} and {rates.offload_beside / 1e9:.1f}"
    )
    state = "ok" if rates.load >= SLOW_COPIES else "note"
    return Finding("PCIe", state, value, "decoding reads the whole KV cache over this wire for every token")
