"""The backends of the CPU against the float64 reference."""

from __future__ import annotations

import pytest
import torch

import longgen.attention.plain
from longgen.attention.call import AttentionCall, reference
from longgen.attention.cpu import CpuFlash
from longgen.attention.plain import PlainTorch
from tests.plan.live import LiveBytes

BACKENDS = [CpuFlash(), PlainTorch()]
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
SHAPES = [  # rows, keys, causal, window
    (1, 1, False, None),
    (1, 300, False, None),
    (1, 300, True, 37),
    (5, 77, False, None),
    (5, 5, True, None),
    (5, 77, True, None),
    (5, 77, True, 1),
    (5, 77, True, 9),
    (130, 130, True, None),
    (130, 130, True, 33),
    (300, 300, True, 400),
    (300, 555, True, None),
    (300, 555, True, 70),
    (300, 555, True, 1),
    (257, 1024, False, None),
]


def make_call(
    rows: int, keys: int, causal: bool, window: int | None, *, head_dim: int, groups: int, dtype: torch.dtype
) -> AttentionCall:
    """K and V lie inside a longer head-major buffer that is NaN elsewhere."""
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn((heads, tokens, head_dim), generator=generator).to(dtype)

    def inside(x: torch.Tensor) -> torch.Tensor:
        buffer = torch.full((x.shape[0], x.shape[1] + 13, head_dim), torch.nan, dtype=dtype)
        buffer[:, 5 : 5 + x.shape[1]] = x
        return buffer[:, 5 : 5 + x.shape[1]]

    q, k, v = normal(2 * groups, rows), inside(normal(2, keys)), inside(normal(2, keys))
    return AttentionCall(q, k, v, 1.7 * head_dim**-0.5, causal, window)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("head_dim", "groups"), [(16, 2), (64, 1), (24, 7), (13, 3), (256, 2)])
@pytest.mark.parametrize(("rows", "keys", "causal", "window"), SHAPES)
def test_out_and_lse_equal_the_reference(
    backend: CpuFlash | PlainTorch,
    dtype: torch.dtype,
    head_dim: int,
    groups: int,
    rows: int,
    keys: int,
    causal: bool,
    window: int | None,
) -> None:
    call = make_call(rows, keys, causal, window, head_dim=head_dim, groups=groups, dtype=dtype).simplified()
    assert backend.refuses(call) is None
    out, lse = backend(call)
    expected_out, expected_lse = reference(call)
    assert out.shape == call.q.shape and lse.shape == call.q.shape[:2] and lse.dtype is torch.float32
    error = (out.double() - expected_out).norm(dim=-1) / expected_out.norm(dim=-1)
    assert float(error.max()) <= TOLERANCE[dtype]
    torch.testing.assert_close(lse, expected_lse, atol=1e-3 if dtype is not torch.float32 else 1e-5, rtol=0)


@pytest.mark.parametrize(
    ("rows", "keys", "causal", "window"),
    [(30, 77, True, 9), (30, 77, True, None), (30, 30, True, None), (7, 77, False, None)],
)
def test_plain_torch_in_pieces_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, rows: int, keys: int, causal: bool, window: int | None
) -> None:
    call = make_call(rows, keys, causal, window, head_dim=16, groups=2, dtype=torch.float32)
    whole = PlainTorch()(call)
    monkeypatch.setattr(longgen.attention.plain, "SCORES_AT_ONCE", 4 * keys * 4)  # four rows at a time
    for piece, expected in zip(PlainTorch()(call), whole, strict=True):
        torch.testing.assert_close(piece, expected)


def test_plain_torch_makes_no_mask_of_all_rows_over_a_long_past(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call(512, 4096, True, None, head_dim=4, groups=1, dtype=torch.float32)
    monkeypatch.setattr(longgen.attention.plain, "SCORES_AT_ONCE", 4 * 2 * 4096)  # four rows at a time
    with LiveBytes() as live:
        PlainTorch()(call)
    assert live.peak < 512 * 4096


def test_the_reference_equals_torch_itself() -> None:
    call = make_call(40, 40, True, None, head_dim=16, groups=2, dtype=torch.float32)
    expected = torch.nn.functional.scaled_dot_product_attention(
        call.q[None], call.k[None], call.v[None], is_causal=True, scale=call.scale, enable_gqa=True
    )[0]
    torch.testing.assert_close(reference(call)[0].float(), expected)


def test_flash_for_the_cpu_refuses_other_devices() -> None:
    x = torch.empty(2, 4, 16, device="meta")
    assert CpuFlash().refuses(AttentionCall(x, x, x, 1.0)) == "tensors are on meta"
