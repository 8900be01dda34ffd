"""What the machine allows: wire, attention, matrix products and device memory, measured before the engine runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from longgen.kv.transfer import open_transfer
from longgen.model_shape import ModelShape
from longgen.planning.measure import ROUNDS, best_of, measure_backends, measure_copies, measure_matmul, measure_memory


@dataclass(frozen=True, slots=True)
class CeilingSizes:
    """Sizes of what is measured.

    Attributes:
        copy_bytes: of a copy.   rows, keys: of the attention call.   side: of the square matrices.
    """

    copy_bytes: int
    rows: int
    keys: int
    side: int

    @classmethod
    def of(cls, device: torch.device) -> CeilingSizes:
        """For a GPU, large enough that nothing but the rate counts; for a CPU, what it does in a moment."""
        if device.type == "cuda":
            return cls(copy_bytes=1 << 30, rows=8192, keys=65_536, side=8192)
        return cls(copy_bytes=4 << 20, rows=256, keys=2048, side=512)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes (1e9) and FLOP (1e12) a second.

    Attributes:
        h2d_gbps, d2h_gbps: each direction of the wire alone.   both_gbps: each of them while the other runs too.
        attention_tflops: of the fastest backend, with its log-sum-exp, for the model's heads.
        attention_backend, backends: which one that is, and the rate of each.
        matmul_tflops: of square matrices.   device_gbps: read and written by one large copy.
        pinned_refusal: None, or why host memory is not pinned.
    """

    h2d_gbps: float
    d2h_gbps: float
    both_gbps: float
    attention_tflops: float
    attention_backend: str
    backends: Mapping[str, float]
    matmul_tflops: float
    device_gbps: float
    pinned_refusal: str | None


def measure_ceilings(device: torch.device, shape: ModelShape, sizes: CeilingSizes | None = None) -> Ceilings:
    """Measures them for a model's heads and dtype. Takes a few seconds, and gives its memory back."""
    sizes, transfer = sizes or CeilingSizes.of(device), open_transfer(device, warns=False)
    copies = measure_copies(transfer, sizes.copy_bytes)
    rounds = [measure_backends(transfer, shape, sizes.rows, sizes.keys) for _ in range(ROUNDS)]
    rates = {name: max(rates[name] for rates in rounds) for name in rounds[0]}
    best = max(rates, key=lambda name: rates[name])
    matmul = best_of(lambda: measure_matmul(transfer, getattr(torch, shape.dtype), sizes.side))
    ceilings = Ceilings(
        h2d_gbps=copies.load / 1e9,
        d2h_gbps=copies.offload / 1e9,
        both_gbps=copies.load_beside / 1e9,
        attention_tflops=rates[best] / 1e12,
        attention_backend=best,
        backends={name: rate / 1e12 for name, rate in rates.items()},
        matmul_tflops=matmul / 1e12,
        device_gbps=best_of(lambda: measure_memory(transfer, sizes.copy_bytes)) / 1e9,
        pinned_refusal=copies.pinned_refusal,
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return ceilings
