"""Inside a pass the host never waits for the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longgen.engine import Engine
from longgen.kv.transfer import CudaTransfer
from tests.checkpoints import Build, random_ids
from tests.engine.running import forward, open_engine

READS = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"})
KINDS = [("qwen3", {"head_dim": 64}), ("qwen2", {"sliding": True, "window": 24}), ("qwen3_5_text", {"head_dim": 64})]
SIZES = [64, 64, 20, 1, 1, 16]  # chunks over host blocks, a short one, decode over a block boundary, a few tokens
LARGE = [256, 256, 150, 1, 1, 9]  # chunks that go to the kernels for many rows
IDS = random_ids(sum(LARGE))


class NoReads(TorchDispatchMode):
    """Fails on operations that bring a value from the device to the host."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.name in READS and args[0].numel() and not _known_on_host(args[0]):
            raise AssertionError(f"{func._schema.name} inside a pass makes the host wait")
        return func(*args, **(kwargs or {}))


def _known_on_host(tensor: torch.Tensor) -> bool:
    return torch.cuda.is_available() and tensor.device.type == "cpu"


@contextmanager
def no_waits(*, compiled: bool = False) -> Iterator[None]:
    """torch raises at every wait it knows of; those of events and streams, which it does not, raise here.

    compiled: whether compiled code runs meanwhile, which steps aside where operations are looked at one by one.
    """

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the host waits inside a pass")

    with pytest.MonkeyPatch.context() as patch, nullcontext() if compiled else NoReads():
        patch.setattr(torch.cuda.Event, "synchronize", refuse)
        patch.setattr(torch.cuda.Stream, "synchronize", refuse)
        patch.setattr(torch.cuda, "synchronize", refuse)
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")


def run_passes(engine: Engine, sizes: list[int]) -> list[torch.Tensor]:
    """Every kind of pass, with a partial commit and an abort at the end."""
    logits = []
    for ids in IDS[:, : sum(sizes)].split(sizes, dim=1):
        with engine.store.begin([(0, ids.shape[1])]) as pass_:
            logits.append(forward(engine, pass_, ids))
            pass_.commit()
    with engine.store.begin([(0, 5)]) as pass_:
        forward(engine, pass_, IDS[:, :5])
        pass_.commit(5 if engine.provider.is_recurrent else 2)  # a recurrent state cannot be wound back
    with engine.store.begin([(0, 30)]) as pass_:
        forward(engine, pass_, IDS[:, :30])
    return logits


def open_warm(
    build: Build,
    device: torch.device,
    kind: str,
    options: dict[str, Any],
    resident: int,
    sizes: list[int],
    *,
    compiled: bool = False,
) -> Engine:
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    folder = build(kind, **options)
    engine = open_engine(folder, chunk=sizes[0], resident=resident, device=str(device), dtype=dtype, compile=compiled)
    run_passes(engine, sizes)
    engine.reset()
    return engine


@pytest.mark.parametrize("sizes", [SIZES, LARGE], ids=["few-rows", "many-rows"])
@pytest.mark.parametrize("resident", [0, 3, 32])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_nothing_in_a_pass_waits(
    build: Build, device: torch.device, kind: str, options: dict[str, Any], resident: int, sizes: list[int]
) -> None:
    engine = open_warm(build, device, kind, options, resident, sizes)
    expected = run_passes(engine, sizes)
    engine.reset()
    with no_waits():
        got = run_passes(engine, sizes)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_compiled_code_does_not_wait_either(build: Build, kind: str, options: dict[str, Any]) -> None:
    engine = open_warm(build, torch.device("cuda"), kind, options, 3, LARGE, compiled=True)
    expected = run_passes(engine, LARGE)
    engine.reset()
    with no_waits(compiled=True):
        got = run_passes(engine, LARGE)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("asleep", ["compute", "load", "offload"])
def test_passes_are_queued_while_the_device_sleeps(build: Build, asleep: str) -> None:
    """Whatever stream is held up for a second, two chunks and a decode step are on their way in far less."""
    # One layer: a few hundred launches, where the driver's queue holds about a thousand before it makes the host wait.
    engine = open_warm(build, torch.device("cuda"), "qwen3", {"head_dim": 64, "layers": 1}, 0, SIZES)
    transfer = engine.store.transfer
    assert isinstance(transfer, CudaTransfer)
    streams = {"compute": torch.cuda.current_stream(), **{q.value: s for q, s in transfer._streams.items()}}
    transfer.drain()
    with torch.cuda.stream(streams[asleep]):
        torch.cuda._sleep(2_000_000_000)  # clock cycles, about a second
    start = time.perf_counter()
    for ids in IDS[:, :129].split([64, 64, 1], dim=1):
        with engine.store.begin([(0, ids.shape[1])]) as pass_:
            forward(engine, pass_, ids)
            pass_.commit()
    queued = time.perf_counter() - start
    transfer.drain()
    done = time.perf_counter() - start
    assert done > 0.5, "the sleep was too short to tell anything"
    assert queued < 0.5 * done


@pytest.mark.cuda
def test_a_wait_would_be_seen() -> None:
    x = torch.ones(4, device="cuda")
    waits = (
        lambda: x.sum().item(),
        lambda: x.cpu(),
        lambda: torch.cuda.synchronize(),
        lambda: torch.cuda.current_stream().synchronize(),
        lambda: torch.cuda.current_stream().record_event().synchronize(),
    )
    for wait in waits:
        for compiled in (False, True):
            with pytest.raises((RuntimeError, AssertionError)), no_waits(compiled=compiled):
                wait()
