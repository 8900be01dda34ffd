"""Two hundred requests one after another through one slot: every answer right, and nothing left over."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from contextlib import closing
from unittest.mock import patch

import pytest
import torch

from longgen.benchmarking.measuring import resident_bytes
from longgen.engine import Engine, EngineOptions
from longgen.errors import CapacityError, LongGenError
from longgen.evaluation.filler import noise, tales
from longgen.evaluation.needle import hide
from longgen.model.checkpoint import resolve_checkpoint
from longgen.model.tokenizer import TextTokenizer
from longgen.sampling import Sampler, SamplingSettings
from tests.demo.reading import pass_key

REQUESTS = 200
SHORTEST, LONGEST = 400, 1500  # bytes, and so tokens
ANSWER = 16
GROWTH = 2 << 20  # bytes that the process may grow by after the third request; the KV of one takes up to 6 MiB
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.cuda))
Failure = Callable[[Engine, list[int]], None]


def open_demo(device: str) -> tuple[Engine, TextTokenizer, frozenset[int]]:
    folder = resolve_checkpoint("demo")
    tokenizer = TextTokenizer.load(folder)
    # On the CPU, oneDNN keeps up to half a megabyte for every shape of a bf16 matrix product that it meets.
    dtype = "float32" if device == "cpu" else "auto"
    options = EngineOptions(
        device=device, dtype=dtype, block_size=64, chunk_size=256, ring_entries=2, ring_blocks=4, resident_blocks=2
    )
    return Engine.load(folder, options), tokenizer, frozenset(tokenizer.eos_ids(folder))


def fail_in_the_model(engine: Engine, ids: list[int]) -> None:
    """In the second chunk or, for a short prompt, in decoding."""
    norm, calls = engine.provider.model.model.norm, []
    forward = norm.forward

    def fail(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return forward(x)

    with patch.object(norm, "forward", fail), pytest.raises(KeyboardInterrupt):
        list(generate(engine, ids, frozenset()))


def give_up(engine: Engine, ids: list[int]) -> None:
    with closing(iter(generate(engine, ids, frozenset()))) as tokens:
        next(tokens)


def drop(engine: Engine, ids: list[int]) -> None:
    tokens = iter(generate(engine, ids, frozenset()))
    next(tokens)


def ask_for_what_is_no_token(engine: Engine, ids: list[int]) -> None:
    with pytest.raises(LongGenError, match="vocabulary"):
        list(generate(engine, [*ids, 10_000], frozenset()))


def run_out_of_host_memory(engine: Engine, ids: list[int]) -> None:
    host = engine.store._parts.host
    with patch.object(host, "grow", side_effect=CapacityError("no host memory")), pytest.raises(CapacityError):
        list(generate(engine, ids, frozenset()))


FAILURES: tuple[Failure, ...] = (fail_in_the_model, give_up, drop, ask_for_what_is_no_token, run_out_of_host_memory)


def generate(engine: Engine, ids: list[int], stop_ids: frozenset[int]):  # type: ignore[no-untyped-def]
    sampler = Sampler(SamplingSettings(), seed=0)
    return engine.generate(ids, max_new_tokens=ANSWER, stop_ids=stop_ids, sampler=sampler)


def left_over(engine: Engine) -> list[str]:
    """What a request should not leave: extents, memory on its way, events, tokens."""
    parts, supply = engine.store._parts, engine.store._supply
    found = [f"offload event of {key}" for key in parts.offloaded]
    found += [f"extents {extents}" for extents in parts.host._extents if extents]
    found += [f"memory on its way {coming}" for coming in parts.host._coming if coming]
    found += [f"{planned} planned blocks" for planned in parts.host._planned if planned]
    found += [f"a piece of {piece.nbytes} bytes" for piece in (*supply._prepared, *supply._workshop.waiting)]
    found += ["a ticket"] * (engine.slots.allocator[0].ticket is not None)
    shared = [*parts.ring.entries, *parts.prefill.all()]
    own = [buffer for part in (parts.decode, parts.resident) for buffer in part.of_slot(0).values()]
    found += [f"event {b}" for b in (*shared, *own) if b.filled is not None or b.free is not None]
    found += [f"{engine.store.length(0)} tokens"] * (engine.store.length(0) > 0)
    found += ["figures"] * (engine.observer.request(0) is not None)
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_two_hundred_requests_leave_nothing(device: str) -> None:
    engine, tokenizer, eos = open_demo(device)
    rng = random.Random(7)
    threads = set(threading.enumerate())
    wrong, memory, held = [], [], []
    for number in range(REQUESTS):
        size = LONGEST if number == 2 else rng.randint(SHORTEST, LONGEST)
        needle = pass_key(number)
        document = hide([(rng.random(), needle)], tales(number) if number % 2 else noise(), size - 160)
        ids = tokenizer.encode(document.text + needle.question, chat=False).tolist()
        if number % 8 == 5:
            FAILURES[number // 8 % len(FAILURES)](engine, ids)
        else:
            generation = generate(engine, ids, eos)
            answer = tokenizer.decode(list(generation))
            wrong += [(number, size, needle.number, answer)] * (answer != f" {needle.number}")
            assert generation.finish_reason == "stop" and generation.stats is not None
        assert left_over(engine) == []
        gc.collect()
        memory.append(resident_bytes())
        held.append((engine.store.host_bytes, torch.cuda.memory_allocated() if device == "cuda" else 0))
    assert not wrong
    assert max(host for host, _ in held) == held[2][0]  # the longest
    assert len({on_device for _, on_device in held[2:]}) == 1
    assert max(memory[3:]) - memory[2] <= GROWTH
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=600)  # one that has made its last piece is about to end
        assert not thread.is_alive(), thread
