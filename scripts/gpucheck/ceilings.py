"""The rates that the machine itself allows: wire, matrix products, attention, device memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from gpucheck.backends import attention_flop, make_call
from gpucheck.report import Settings, median_seconds, table
from longgen.attention.backends import default_kernels
from longgen.kv.transfer import open_transfer


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes (1e9) and FLOP (1e12) per second; each direction of the wire alone, and of both at once the mean."""

    h2d_gbps: float
    d2h_gbps: float
    both_gbps: float | None
    attention_tflops: float
    matmul_tflops: float
    device_gbps: float

    def show(self) -> None:
        table(tuple(asdict(self)), [tuple(asdict(self).values())])


def measure(settings: Settings) -> Ceilings:
    """On buffers of 1 GiB pinned in place, matrices of 8192, and 8192 queries over 65,536 keys of head size 128."""
    device, size = settings.device, (1 << 22) if settings.small else (1 << 30)
    transfer = open_transfer(device)
    host = [transfer.allocate_host(size) for _ in range(2)]
    on_device = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]

    def rate(function: object, nbytes: float = size) -> float:
        return nbytes / median_seconds(function, device) / 1e9  # type: ignore[arg-type]

    def both() -> None:
        load, offload = torch.cuda.Stream(device), torch.cuda.Stream(device)
        with torch.cuda.stream(load):
            on_device[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(offload):
            host[1].copy_(on_device[1], non_blocking=True)

    side = 512 if settings.small else 8192
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    rows, keys = (256, 2048) if settings.small else (8192, 65_536)
    call, kernels = make_call(settings, head_dim=128, rows=rows, keys=keys), default_kernels(device)
    kernels(call)  # its first-use check is not part of the time
    return Ceilings(
        h2d_gbps=rate(lambda: on_device[0].copy_(host[0], non_blocking=True)),
        d2h_gbps=rate(lambda: host[1].copy_(on_device[1], non_blocking=True)),
        both_gbps=rate(both) if device.type == "cuda" else None,
        attention_tflops=attention_flop(call) / median_seconds(lambda: kernels(call), device) / 1e12,
        matmul_tflops=2.0 * side**3 / median_seconds(lambda: a @ b, device, calls=5) / 1e12,
        device_gbps=rate(lambda: on_device[0].copy_(on_device[1]), 2.0 * size),  # read and written
    )
