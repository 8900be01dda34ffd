"""Through the real store, chunked logits equal transformers' un-chunked eager ones at every position."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from longgen.sampling import Sampler, SamplingSettings
from tests.checkpoints import DENSE_TYPES, HYBRID_TYPES, Build, random_ids
from tests.engine.conftest import Reference
from tests.engine.running import chunks_of, feed, open_engine

TOLERANCE = 1e-4
HYBRID_TOLERANCE = 5e-4  # their own chunked kernel computes in another order
STEPS = 12
ALL_RESIDENT = 32


def check(
    build: Build, reference: Reference, kind: str, prompt: int, chunk: int, resident: int, **options: object
) -> None:
    folder = build(kind, **options)
    ids = random_ids(prompt + STEPS)
    got = feed(open_engine(folder, chunk=chunk, resident=resident), ids, chunks_of(prompt + STEPS, chunk, STEPS))
    tolerance = HYBRID_TOLERANCE if kind in HYBRID_TYPES else TOLERANCE
    torch.testing.assert_close(got, reference(folder, ids), atol=tolerance, rtol=0)


@pytest.mark.parametrize("resident", [0, 3, ALL_RESIDENT])
@pytest.mark.parametrize(
    ("head_dim", "prompt", "chunk"), [(16, 131, 16), (64, 300, 64), (16, 257, 112), (64, 300, 512)]
)
@pytest.mark.parametrize("kind", DENSE_TYPES)
def test_dense_and_expert_models(
    build: Build, reference: Reference, kind: str, head_dim: int, prompt: int, chunk: int, resident: int
) -> None:
    check(build, reference, kind, prompt, chunk, resident, head_dim=head_dim)


@pytest.mark.parametrize("resident", [0, 3, ALL_RESIDENT])
@pytest.mark.parametrize(("head_dim", "prompt", "chunk"), [(16, 131, 64), (64, 300, 128), (16, 257, 512)])
@pytest.mark.parametrize("kind", HYBRID_TYPES)
def test_hybrid_models(
    build: Build, reference: Reference, kind: str, head_dim: int, prompt: int, chunk: int, resident: int
) -> None:
    check(build, reference, kind, prompt, chunk, resident, head_dim=head_dim)


@pytest.mark.parametrize(("chunk", "resident"), [(16, 0), (112, 3), (512, ALL_RESIDENT)])
@pytest.mark.parametrize("kind", DENSE_TYPES)
def test_sliding_windows(build: Build, reference: Reference, kind: str, chunk: int, resident: int) -> None:
    check(build, reference, kind, 257, chunk, resident, sliding=True, window=48)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "qwen3_next", "qwen3_5"])
def test_yarn(build: Build, reference: Reference, kind: str) -> None:
    check(build, reference, kind, 300, 64, 3, head_dim=64, yarn=True, max_position=256)


@pytest.mark.parametrize("kind", [*DENSE_TYPES, *HYBRID_TYPES])
@pytest.mark.parametrize("resident", [0, 3, ALL_RESIDENT])
def test_greedy_tokens_equal_generate(build: Build, kind: str, resident: int) -> None:
    folder = build(kind)
    ids = random_ids(211, seed=3)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    model.generation_config.eos_token_id = None
    expected = model.generate(ids, max_new_tokens=STEPS, do_sample=False)[0, ids.shape[1] :].tolist()
    assert len(expected) == STEPS
    generation = open_engine(folder, resident=resident).generate(
        ids[0].tolist(), max_new_tokens=STEPS, stop_ids=(), sampler=Sampler(SamplingSettings(), seed=0)
    )
    assert list(generation) == expected
    assert generation.finish_reason == "length"
