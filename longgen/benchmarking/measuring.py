"""One length through an engine, timed: host memory first, then the prompt, then some decoded tokens."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from longgen.engine import Engine
from longgen.kv.counters import Counters
from longgen.planning.measure import measure_loads, timed
from longgen.tracing import STEPS, Trace

WARM_UP_CHUNKS, WARM_UP_STEPS = 3, 2
TOKEN = 0  # that every step decodes: any vocabulary has it
LOADED_BYTES = 1 << 30  # copied to learn the wire's rate for copies of a run's size
LOADED_BYTES_CPU = 1 << 24


@dataclass(frozen=True, slots=True)
class Measured:
    """What a length took. Seconds and bytes.

    Attributes:
        tokens: of the prompt.
        pin_seconds, host_bytes: to make the host memory of the request, all of it and before the first pass.
        prefills: of each repeat; empty where the cache was filled with random KV instead.
        prefill: what was moved in the last of them.
        steps: of each decoded token, until the host has its logits; the first few are not among them.
        step_loaded: bytes loaded in an average step.
        copy_bytes, copy_rate: size of the copies that load a run, and bytes a second of such copies alone; None where
            nothing is loaded.
        device_peak: most bytes of tensors; None on the CPU.   host_peak: most bytes of the process.
    """

    tokens: int
    pin_seconds: float
    host_bytes: int
    prefills: tuple[float, ...]
    prefill: Counters
    steps: tuple[float, ...]
    step_loaded: float
    copy_bytes: int | None
    copy_rate: float | None
    device_peak: int | None
    host_peak: int


def measure_length(engine: Engine, tokens: int, *, repeats: int, steps: int, random_kv: bool) -> Measured:
    """Runs a prompt of random tokens `repeats` times, and decodes `steps` tokens after the last one.

    The engine must be empty, and planned for `bench_tokens(tokens, steps)` tokens.
    random_kv: fills the slot with random K and V instead of running a prompt.
    """
    store, drain = engine.store, engine.store.transfer.drain
    new = WARM_UP_STEPS + steps
    copy_bytes, copy_rate = _measure_copies(engine, tokens)
    # Before any pass: later ones find this memory in the pool, so that no clock but this one counts its making.
    pin_seconds = timed(lambda: _make_host_memory(engine, tokens + new), drain)
    host_bytes = store.host_bytes
    _warm_up(engine, tokens, new)
    _forget_peaks(engine.provider.device)
    prefills = []
    if random_kv:
        engine.fill_random(tokens, new_tokens=new)
    else:
        prompt = random_prompt(tokens, engine.provider.vocab_size)
        prefills = [timed(lambda: engine.prefill(prompt, new_tokens=new), drain) for _ in range(repeats)]
    figures = engine.observer.request(0)
    assert figures is not None, "a slot that holds tokens has figures"
    _steps(engine, WARM_UP_STEPS)
    before = store.counters(0).h2d_bytes
    seconds = _steps(engine, steps)
    return Measured(
        tokens=tokens,
        pin_seconds=pin_seconds,
        host_bytes=host_bytes,
        prefills=tuple(prefills),
        prefill=figures.prefill,
        steps=seconds,
        step_loaded=(store.counters(0).h2d_bytes - before) / steps,
        copy_bytes=copy_bytes,
        copy_rate=copy_rate,
        device_peak=_device_peak(engine.provider.device),
        host_peak=peak_resident_bytes(),
    )


def record_end(engine: Engine, tokens: int, steps: int, trace: Trace) -> None:
    """Runs the last chunks of a prompt, and tokens after them, once more for a trace, which slows what it records.

    The engine must have measured `tokens` and `steps`.
    """
    chunk, count = engine.chunk_tokens, min(STEPS, WARM_UP_STEPS + steps)
    start = max(0, -(-tokens // chunk) - trace.chunks) * chunk
    # Windows and recurrent states cannot be cut back so far, and a pass takes as long whatever the past holds.
    engine.fill_random(start, new_tokens=tokens - start + count)
    trace.armed = True
    engine.extend(random_prompt(tokens - start, engine.provider.vocab_size))
    _steps(engine, count)
    trace.stop()


def bench_tokens(tokens: int, steps: int) -> int:
    """Tokens in all that a request of `measure_length` comes to."""
    return tokens + WARM_UP_STEPS + steps


def random_prompt(count: int, vocab: int) -> torch.Tensor:
    """Token ids, int64 [count]; the same for the same count."""
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(count))


def _steps(engine: Engine, count: int) -> tuple[float, ...]:
    """Seconds of each of `count` decoded tokens, until its logits are on the host."""
    drain = engine.store.transfer.drain
    return tuple(timed(lambda: engine.decode_step(TOKEN).cpu(), drain) for _ in range(count))


def _make_host_memory(engine: Engine, tokens: int) -> None:
    """All that a request of so many tokens needs."""
    engine.store.announce(0, tokens)
    engine.store.grow(0, tokens)


def _warm_up(engine: Engine, tokens: int, new: int) -> None:
    """What is made on first use: the prompt's first chunks, its last two at their depth, over random K and V, where
    attention reads everything that it reads at all, and a token. new: tokens that are announced beyond the prompt."""
    chunk = engine.chunk_tokens
    first = min(tokens, WARM_UP_CHUNKS * chunk)
    engine.prefill(random_prompt(first, engine.provider.vocab_size), new_tokens=tokens + new - first)
    if first < tokens:
        last = chunk + (tokens % chunk or chunk)
        engine.fill_random(tokens - last, new_tokens=last + new)
        engine.extend(random_prompt(last, engine.provider.vocab_size))
    engine.decode_step(TOKEN)
    engine.reset()


def _measure_copies(engine: Engine, tokens: int) -> tuple[int | None, float | None]:
    """The size of a copy that loads a run's K (V is another), and bytes a second of such copies."""
    layout, sizes, transfer = engine.store.layout, engine.store.sizes, engine.store.transfer
    if sizes.host_bytes(layout.shape, tokens - tokens % layout.block_size) == 0:
        return None, None
    nbytes = sizes.run_blocks * layout.block_bytes // 2
    total = LOADED_BYTES if transfer.device.type == "cuda" else LOADED_BYTES_CPU
    return nbytes, measure_loads(transfer, nbytes, max(total, 2 * nbytes))


def peak_resident_bytes() -> int:
    """The most physical memory that this process has held since its peak was last forgotten (VmHWM)."""
    return _status_bytes("VmHWM")


def resident_bytes() -> int:
    """Physical memory of this process now (VmRSS)."""
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def _forget_peaks(device: torch.device) -> None:
    with suppress(OSError):  # where it is not allowed, the peak is that of all lengths so far
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _device_peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
