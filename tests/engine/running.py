"""Engines on tiny checkpoints, and the logits of every token that is run through them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from longgen.engine import Engine, EngineOptions
from longgen.kv.passes import Pass
from longgen.sampling import Sampler, SamplingSettings
from longgen.sparse.base import Phase, SparsePolicy

BLOCK = 16


def small_options(*, chunk: int = 64, resident: int = 0, **others: Any) -> EngineOptions:
    """Blocks of 16, a ring of two entries of two blocks, fp32 on the CPU."""
    chosen: dict[str, Any] = {"device": "cpu", "dtype": "float32", **others}
    return EngineOptions(
        block_size=BLOCK, chunk_size=chunk, resident_blocks=resident, ring_entries=2, ring_blocks=2, **chosen
    )


def open_engine(folder: Path, *, policy: SparsePolicy | None = None, **options: Any) -> Engine:
    """With `small_options`."""
    return Engine.load(folder, small_options(**options), policy)


def forward(engine: Engine, pass_: Pass, ids: torch.Tensor) -> torch.Tensor:
    """Runs ids [B, n] in an open pass: logits of every token, [B, n, vocab]."""
    count = ids.shape[1]
    positions = torch.tensor(pass_.lengths)[:, None] + torch.arange(count)
    upload = engine.store.transfer.upload
    return engine.provider.forward(pass_, upload(ids), upload(positions), keep=count)


def feed(engine: Engine, ids: torch.Tensor, chunks: Iterable[int], *, slot: int = 0) -> torch.Tensor:
    """Runs ids [1, n] in passes of the given sizes, committed: logits of every token, [1, n, vocab]."""
    logits = []
    for chunk in ids.split(list(chunks), dim=1):
        phase = Phase.DECODE if chunk.shape[1] == 1 else Phase.PREFILL
        with engine.store.begin([(slot, chunk.shape[1])], phase) as pass_:
            logits.append(forward(engine, pass_, chunk))
            pass_.commit()
    return torch.cat(logits, 1)


def answer(engine: Engine, prompt: torch.Tensor) -> list[int]:
    """20 greedy tokens after a prompt [1, n]."""
    sampler = Sampler(SamplingSettings(), seed=0)
    return list(engine.generate(prompt[0].tolist(), max_new_tokens=20, stop_ids=(), sampler=sampler))


def poison(engine: Engine) -> None:
    """NaN in every buffer, returned host block and state; the reset must make the slot usable again."""
    engine.store.poison()
    engine.provider.poison()


def chunks_of(total: int, size: int, tail: int) -> Sequence[int]:
    """Chunks of `size` tokens, the last one shorter, then `tail` single tokens: `total` tokens in all."""
    prompt = total - tail
    full, rest = divmod(prompt, size)
    return [size] * full + [rest] * (rest > 0) + [1] * tail


def check_a_b_a(engine: Engine, fresh: list[int], a: torch.Tensor, b: torch.Tensor) -> None:
    """A, B, A, B, A in one engine, poisoned after every B: A always gets `fresh`, the answer of a fresh engine."""
    for _ in range(2):
        assert answer(engine, a) == fresh
        engine.reset()
        answer(engine, b)
        engine.reset()
        poison(engine)
    assert answer(engine, a) == fresh
