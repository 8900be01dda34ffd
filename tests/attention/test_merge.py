"""Partial results over disjoint keys, merged in any order, equal attention over all of them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from longgen.attention.call import AttentionCall, reference
from longgen.attention.cpu import CpuFlash
from longgen.attention.cuda import powers_of_two
from longgen.attention.merge import MergedAttention

GROUPS, KV_HEADS, HEAD_DIM = 2, 3, 16


def make_call(rows: int, keys: int, seed: int, dtype: torch.dtype = torch.float32) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn((heads, tokens, HEAD_DIM), generator=generator).to(dtype)
        for heads, tokens in ((GROUPS * KV_HEADS, rows), (KV_HEADS, keys), (KV_HEADS, keys))
    )
    return AttentionCall(q, k, v, 0.6)


def part_of(call: AttentionCall, keys: slice, kv_heads: slice = slice(None)) -> AttentionCall:
    q = call.q.unflatten(0, (KV_HEADS, GROUPS))[kv_heads].flatten(0, 1)
    return AttentionCall(q, call.k[kv_heads, keys], call.v[kv_heads, keys], call.scale)


def random_slices(rng: random.Random, keys: int) -> list[slice]:
    """Disjoint parts of all keys, in random order."""
    cuts = sorted({0, keys, *(rng.randint(1, keys - 1) for _ in range(rng.randint(0, 7)))})
    slices = [slice(a, b) for a, b in pairwise(cuts)]
    rng.shuffle(slices)
    return slices


@pytest.mark.parametrize("seed", range(20))
def test_any_split_in_any_order_equals_one_piece(seed: int) -> None:
    rng = random.Random(seed)
    call = make_call(rng.choice([1, 5, 40]), rng.randint(2, 300), seed)
    first, *others = random_slices(rng, call.k.shape[1])
    merged = MergedAttention(CpuFlash()(part_of(call, first)))
    for keys in others:
        merged.add(CpuFlash()(part_of(call, keys)))
    assert merged.result().dtype is torch.float32
    torch.testing.assert_close(merged.result(), reference(call)[0].float(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("seed", range(10))
def test_heads_may_be_split_differently(seed: int) -> None:
    """The first part covers all heads; every KV head then reads the rest in parts of its own."""
    rng = random.Random(seed)
    call = make_call(4, 200, seed)
    merged = MergedAttention(CpuFlash()(part_of(call, slice(0, 30))))
    parts = [(head, keys) for head in range(KV_HEADS) for keys in random_slices(rng, 170)]
    rng.shuffle(parts)
    for head, keys in parts:
        shifted, kv_heads = slice(keys.start + 30, keys.stop + 30), slice(head, head + 1)
        query_heads = slice(head * GROUPS, (head + 1) * GROUPS)
        merged.add(CpuFlash()(part_of(call, shifted, kv_heads)), query_heads)
    torch.testing.assert_close(merged.result(), reference(call)[0].float(), atol=2e-6, rtol=1e-5)


def test_a_causal_chunk_and_its_past_make_the_whole() -> None:
    call = make_call(50, 170, 0)
    chunk = AttentionCall(call.q, call.k[:, 120:], call.v[:, 120:], call.scale, causal=True)
    merged = MergedAttention(CpuFlash()(chunk))
    merged.add(CpuFlash()(part_of(call, slice(0, 120))))
    whole = AttentionCall(call.q, call.k, call.v, call.scale, causal=True)
    torch.testing.assert_close(merged.result(), reference(whole)[0].float(), atol=2e-6, rtol=1e-5)


def test_one_part_alone_is_unchanged() -> None:
    call = make_call(5, 60, 0)
    torch.testing.assert_close(MergedAttention(CpuFlash()(call)).result(), reference(call)[0].float())


def test_an_empty_part_adds_nothing() -> None:
    """No keys: a log-sum-exp of minus infinity, and nothing in out that counts."""
    call = make_call(5, 60, 0)
    out, lse = CpuFlash()(call)
    merged = MergedAttention((out.clone(), lse.clone()))
    merged.add((torch.zeros_like(out), torch.full_like(lse, -torch.inf)))
    torch.testing.assert_close(merged.result(), out)


def test_parts_of_very_different_weight_neither_overflow_nor_vanish() -> None:
    call = make_call(5, 60, 0)
    out, lse = CpuFlash()(call)
    merged = MergedAttention((out.clone(), lse - 500.0))  # which it changes in place
    merged.add((2 * out, lse + 500.0))
    torch.testing.assert_close(merged.result(), 2 * out)
    merged.add((3 * out, lse - 500.0))
    torch.testing.assert_close(merged.result(), 2 * out)


def test_parts_in_half_precision_are_merged_in_single() -> None:
    """Many parts: rounding each sum to bf16 would show."""
    call = make_call(7, 640, 0, torch.bfloat16)
    slices = [slice(start, start + 10) for start in range(0, 640, 10)]
    merged = MergedAttention(CpuFlash()(part_of(call, slices[0])))
    for keys in slices[1:]:
        merged.add(CpuFlash()(part_of(call, keys)))
    expected = reference(call)[0].float()
    assert float((merged.result() - expected).norm() / expected.norm()) < 4e-3


def test_a_log_sum_exp_of_base_two_would_spoil_the_merge() -> None:
    call = make_call(5, 60, 0)
    (out, lse), second = CpuFlash()(part_of(call, slice(0, 20))), CpuFlash()(part_of(call, slice(20, 60)))
    merged = MergedAttention((out, lse / 0.6931))
    merged.add((second[0], second[1] / 0.6931))
    expected = reference(call)[0].float()
    assert float((merged.result() - expected).norm() / expected.norm()) > 2e-2


@pytest.mark.parametrize("count", [256, 768, 1024, 9216, 65_536 + 256])
def test_lengths_split_into_powers_of_two(count: int) -> None:
    pieces = list(powers_of_two(count))
    assert pieces[0][0] == 0 and pieces[-1][1] == count
    assert all(stop == start for (_, stop), (start, _) in pairwise(pieces))
    lengths = [stop - start for start, stop in pieces]
    assert all(bin(length).count("1") == 1 for length in lengths) and len(set(lengths)) == len(lengths)


def test_a_merge_is_a_part_again() -> None:
    call = make_call(5, 30, seed=1)
    merged = MergedAttention(CpuFlash()(part_of(call, slice(0, 9))))
    merged.add(CpuFlash()(part_of(call, slice(9, None))))
    out, lse = merged.partial()
    expected_out, expected_lse = reference(call)
    torch.testing.assert_close(out, expected_out.float(), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=2e-6, rtol=1e-5)
