"""Measures what a device does in a second: copies, attention, matrix products, memory. A few seconds in all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from longgen.attention.backends import default_kernels
from longgen.attention.call import AttentionCall
from longgen.attention.plain import PlainTorch
from longgen.kv.predict import LAYER_STARTS, Rates
from longgen.kv.supply import HostSupply
from longgen.kv.transfer import Transfer, open_transfer
from longgen.model_shape import ModelShape

Clock = Callable[[], float]

COPY_BYTES = 256 << 20
PIN_BYTES = 1 << 30  # threads need a while to get to work: less than this tells too low a rate
REPEATS = 4
ROUNDS = 3  # of what runs on the device's cores, whose clock rises as they get to work; the best counts
ROWS, KEYS = 8192, 16384  # of the attention call: many rows over one run of the ring
SIDE = 8192  # of the matrices
STARTS, STARTED_NUMBERS = 256, 64  # operations that only start, and what each is done to
# Modules run many kernels smaller than the one that is measured; together they reach this part of its rate.
MODULE_SHARE = 0.65


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Bytes a second between host and device: each way alone, and both ways at once.

    pinned_refusal: None, or why host memory is not pinned.
    """

    load: float
    offload: float
    load_beside: float
    offload_beside: float
    pinned_refusal: str | None


def measure_copies(transfer: Transfer, nbytes: int = COPY_BYTES, clock: Clock = time.perf_counter) -> CopyRates:
    """Times copies of `nbytes` through a transfer, as the store makes them."""
    host = [transfer.allocate_host(nbytes).view(1, nbytes, 1) for _ in range(2)]
    device = [torch.zeros(1, nbytes, 1, dtype=torch.uint8, device=transfer.device) for _ in range(2)]

    def load() -> None:
        transfer.load(device[0], host[0])

    def offload() -> None:
        transfer.offload(host[1], device[1])

    def both() -> None:
        load()
        offload()

    alone = [nbytes / _seconds(work, transfer, clock) for work in (load, offload)]
    beside = nbytes / _seconds(both, transfer, clock)
    return CopyRates(alone[0], alone[1], beside, beside, transfer.pinning_refusal)


def measure_attention(
    transfer: Transfer, shape: ModelShape, rows: int = ROWS, keys: int = KEYS, clock: Clock = time.perf_counter
) -> float:
    """FLOP a second of the backend that a prefill of this model uses, over a run of keys without a mask."""
    kernels, call = default_kernels(transfer.device), _random_call(transfer, shape, rows, keys)
    return call_flop(call) / _seconds(lambda: kernels(call), transfer, clock)


def measure_backends(
    transfer: Transfer, shape: ModelShape, rows: int, keys: int, clock: Clock = time.perf_counter
) -> dict[str, float]:
    """FLOP a second of every backend that takes such a call of this model's heads, in the order they are tried.

    The last resort, plain torch, is left out where there is another: it would take minutes.
    """
    kernels, call = default_kernels(transfer.device), _random_call(transfer, shape, rows, keys)
    taking = kernels.taking(call)
    fast = [backend for backend in taking if backend.name != PlainTorch.name] or taking
    return {backend.name: call_flop(call) / _seconds(partial(backend, call), transfer, clock) for backend in fast}


def call_flop(call: AttentionCall) -> float:
    """Two matrix products, a multiplication and an addition each: 4 * q_heads * rows * keys * head_dim, no mask."""
    q_heads, rows, head_dim = call.q.shape
    return 4.0 * q_heads * rows * call.k.shape[1] * head_dim


def _random_call(transfer: Transfer, shape: ModelShape, rows: int, keys: int) -> AttentionCall:
    """Without a mask: what a chunk does to a run of the past."""
    dtype = getattr(torch, shape.dtype)

    def normal(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(heads, tokens, shape.head_dim, device=transfer.device, dtype=dtype)

    q, k, v = normal(shape.q_heads, rows), normal(shape.kv_heads, keys), normal(shape.kv_heads, keys)
    return AttentionCall(q, k, v, shape.head_dim**-0.5)


def measure_matmul(transfer: Transfer, dtype: torch.dtype, side: int = SIDE, clock: Clock = time.perf_counter) -> float:
    """FLOP a second of the product of two square matrices."""
    a = torch.randn(side, side, device=transfer.device, dtype=dtype)
    return 2.0 * side**3 / _seconds(lambda: a @ a, transfer, clock)


def measure_memory(transfer: Transfer, nbytes: int = COPY_BYTES, clock: Clock = time.perf_counter) -> float:
    """Bytes a second read and written by one large elementwise operation."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=transfer.device)
    target = torch.empty_like(source)
    return 2.0 * nbytes / _seconds(lambda: target.copy_(source), transfer, clock)


def measure_starts(transfer: Transfer, count: int = STARTS, clock: Clock = time.perf_counter) -> float:
    """Operations a second that the host starts, so small that none waits for the one before."""
    numbers = torch.zeros(STARTED_NUMBERS, device=transfer.device)

    def several() -> None:
        for _ in range(count):
            numbers.add_(1)

    return count / _seconds(several, transfer, clock)


def best_of(measure: Callable[[], float]) -> float:
    """The highest of a few rates."""
    return max(measure() for _ in range(ROUNDS))


def measure_loads(transfer: Transfer, nbytes: int, total: int, clock: Clock = time.perf_counter) -> float:
    """Bytes a second of copies to the device of `nbytes` each, one after another, as a ring is filled, without anything
    that reads it. total: bytes of host memory that they come from."""
    count = max(1, total // nbytes)
    host = transfer.allocate_host(count * nbytes).view(count, 1, nbytes, 1)
    device = torch.empty(2, 1, nbytes, 1, dtype=torch.uint8, device=transfer.device)

    def load() -> None:
        for index in range(count):
            transfer.load(device[index % 2], host[index])

    return count * nbytes / _seconds(load, transfer, clock)


def timed(work: Callable[[], object], drain: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """Seconds of one `work`, from an idle device to an idle device. drain: waits until the device is idle."""
    drain()
    started = clock()
    work()
    drain()
    return max(clock() - started, 1e-9)


def measure_pinning(transfer: Transfer, nbytes: int = COPY_BYTES, clock: Clock = time.perf_counter) -> float:
    """Bytes of host memory a second that a store's threads make, in one piece each; they are given back."""
    supply = HostSupply(transfer)
    started = clock()
    supply.collect(supply.order([nbytes // supply.threads] * supply.threads))
    seconds = max(clock() - started, 1e-9)
    supply.close()
    return nbytes // supply.threads * supply.threads / seconds


def measure_rates(device: torch.device, shape: ModelShape, host_bytes: int | None = None) -> Rates:
    """The rates of a CUDA device for a model, for predictions. Gives back the memory it took.

    host_bytes: of the KV cache that is planned: no more is pinned to see how fast that is, but for what copies take.
    """
    pinned = PIN_BYTES if host_bytes is None else min(PIN_BYTES, max(COPY_BYTES, host_bytes))
    transfer = open_transfer(device, warns=False)
    copies = measure_copies(transfer, COPY_BYTES)
    rates = Rates(
        attention=best_of(lambda: measure_attention(transfer, shape, ROWS, KEYS)),
        matmul=best_of(lambda: measure_matmul(transfer, getattr(torch, shape.dtype), SIDE)),
        load=copies.load,
        offload=copies.offload,
        memory=MODULE_SHARE * best_of(lambda: measure_memory(transfer, COPY_BYTES)),
        pin=measure_pinning(transfer, pinned),
        source="measured here",
        layer=LAYER_STARTS / best_of(lambda: measure_starts(transfer)),
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rates


def _seconds(work: Callable[[], object], transfer: Transfer, clock: Clock) -> float:
    """Seconds of one `work`, the first call left out: it pays for what is made on first use."""

    def several() -> None:
        for _ in range(REPEATS):
            work()

    work()
    return timed(several, transfer.drain, clock) / REPEATS
