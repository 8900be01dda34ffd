"""Chunked logits equal transformers' un-chunked eager ones at every position, and decode steps go on from there."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.checkpoints import DENSE_TYPES, HYBRID_TYPES, Build, random_ids, reference_logits
from tests.model.running import feed, load

TOLERANCE = 1e-4
HYBRID_TOLERANCE = 5e-4  # their own chunked kernel computes in another order
DECODE = (1,) * 6


def tolerance_of(model_type: str) -> float:
    return HYBRID_TOLERANCE if model_type in HYBRID_TYPES else TOLERANCE


def check(build: Build, model_type: str, chunks: tuple[int, ...], tolerance: float, **options: object) -> None:
    folder = build(model_type, **options)
    ids = random_ids(sum(chunks) + len(DECODE))
    provider, store = load(folder)
    got = feed(provider, store, ids, (*chunks, *DECODE))
    torch.testing.assert_close(got, reference_logits(folder, ids), atol=tolerance, rtol=0)


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("model_type", DENSE_TYPES)
def test_dense_and_expert_models(build: Build, model_type: str, head_dim: int) -> None:
    check(build, model_type, (37, 64, 1, 98), TOLERANCE, head_dim=head_dim)


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("model_type", HYBRID_TYPES)
def test_hybrid_models(build: Build, model_type: str, head_dim: int) -> None:
    check(build, model_type, (64, 128, 21), HYBRID_TOLERANCE, head_dim=head_dim)


def test_hybrid_with_one_attention_layer_in_four(build: Build) -> None:
    check(build, "qwen3_next", (128, 64), HYBRID_TOLERANCE, full_attention_interval=4)


@pytest.mark.parametrize("model_type", DENSE_TYPES)
def test_sliding_windows(build: Build, model_type: str) -> None:
    check(build, model_type, (37, 64, 98), TOLERANCE, sliding=True, window=48)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe"])
def test_yarn(build: Build, model_type: str) -> None:
    # A short window, so that the prompt runs over the trained part.
    check(build, model_type, (64, 128), tolerance_of(model_type), yarn=True, max_position=256, head_dim=64)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5"])
def test_tied_heads(build: Build, model_type: str) -> None:
    check(build, model_type, (64, 64), tolerance_of(model_type), tied=True)


def test_attention_bias(build: Build) -> None:
    check(build, "qwen3", (37, 64), TOLERANCE, attention_bias=True)


def test_a_wrong_window_would_be_seen(build: Build) -> None:
    folder = build("qwen2_moe", sliding=True, window=48)
    ids = random_ids(120)
    provider, store = load(folder)
    store.windows = {layer: window and window + 1 for layer, window in store.windows.items()}
    difference = feed(provider, store, ids, (60, 60)) - reference_logits(folder, ids)
    assert difference.abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("model_type", [*DENSE_TYPES, *HYBRID_TYPES])
def test_a_lost_block_moves_the_logits(build: Build, model_type: str) -> None:
    ids = random_ids(198)
    provider, store = load(build(model_type))
    whole = feed(provider, store, ids, (192, *DECODE))[:, -6:]
    provider.reset(0)
    store.reset(0)
    feed(provider, store, ids[:, :192], (192,))
    for k, v in store.kv.values():
        k[:, 64:80] = v[:, 64:80] = 0
    damaged = feed(provider, store, ids[:, 192:], DECODE)
    assert (damaged - whole).abs().amax(-1).min() > 1e-2


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_next"])
def test_batched_expert_kernels_of_decode_agree(build: Build, model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build(model_type)
    ids = random_ids(134)
    provider, store = load(folder)
    monkeypatch.setattr(provider, "_batches_experts", True)  # as on a GPU
    got = feed(provider, store, ids[:, :131], (128, 1, 1, 1))
    assert provider.config._experts_implementation == "batched_mm"
    got = torch.cat((got, feed(provider, store, ids[:, 131:], (3,))), dim=1)
    assert provider.config._experts_implementation == "grouped_mm"
    torch.testing.assert_close(got, reference_logits(folder, ids), atol=HYBRID_TOLERANCE, rtol=0)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5_moe"])
def test_no_warning_is_raised(build: Build, model_type: str) -> None:
    folder = build(model_type)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        provider, store = load(folder)
        feed(provider, store, random_ids(65), (64, 1))
