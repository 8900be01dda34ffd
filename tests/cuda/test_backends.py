"""Every attention backend of a device against the float64 reference, and the check that keeps a wrong one out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from longgen.attention.backends import default_kernels
from longgen.attention.call import AttentionCall, Partial, reference
from longgen.attention.kernels import Backend, Kernels, Rows
from longgen.attention.plain import PlainTorch

KV_HEADS = 2
MASKS = ("none", "none-odd", "causal", "causal-past", "causal-past-odd", "window", "window-square")
LSE_TOLERANCE = 2e-3


def tolerance(dtype: torch.dtype) -> float:
    return 1e-2 if dtype is torch.bfloat16 else 2e-3


def make_call(
    device: torch.device, dtype: torch.dtype, *, head_dim: int, groups: int, rows: int, mask: str, seed: int = 0
) -> AttentionCall:
    """K and V lie in the middle of a longer head-major buffer, as in the store; around them there is NaN."""
    generator = torch.Generator(device).manual_seed(seed)
    past = {"causal-past": 1024, "causal-past-odd": 777, "window": 500}.get(mask, 0)
    keys = {"none": 1024, "none-odd": 777}.get(mask, rows + past)
    window = 67 if mask.startswith("window") else None

    def normal(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn((heads, tokens, head_dim), generator=generator, device=device).to(dtype)

    def inside(tokens: int) -> torch.Tensor:
        buffer = torch.full((KV_HEADS, tokens + 96, head_dim), torch.nan, device=device, dtype=dtype)
        buffer[:, 32 : 32 + tokens] = normal(KV_HEADS, tokens)
        return buffer[:, 32 : 32 + tokens]

    scale = 2 * head_dim**-0.5
    q = normal(KV_HEADS * groups, rows)
    return AttentionCall(q, inside(keys), inside(keys), scale, not mask.startswith("none"), window)


def backends(kernels: Kernels, rows: int) -> tuple[Backend, ...]:
    return kernels._backends[Rows.of(rows)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rows", [1, 5, 160, 1000])
@pytest.mark.parametrize("groups", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_backends_that_do_not_refuse_agree_with_the_reference(
    device: torch.device, head_dim: int, dtype: torch.dtype, groups: int, rows: int, mask: str
) -> None:
    if device.type == "cpu" and (rows == 1000 or groups == 7 or dtype is torch.float16):
        pytest.skip("the rest is enough on the CPU")
    call = make_call(device, dtype, head_dim=head_dim, groups=groups, rows=rows, mask=mask).simplified()
    expected_out, expected_lse = reference(call)
    kernels, tried = default_kernels(device), {}
    objections = dict(kernels.explain(call))
    for backend in backends(kernels, rows):
        objection = objections[backend.name]
        # A package may be built without a feature, which shows when it is tried; a wrong result is never excused.
        assert objection is None or "differs" not in objection
        if objection is None:
            out, lse = backend(call)
            assert out.shape == call.q.shape
            assert lse.shape == call.q.shape[:2] and lse.dtype is torch.float32
            out_error = float((out.double() - expected_out).norm() / expected_out.norm())
            tried[backend.name] = (out_error, float((lse - expected_lse).abs().max()))
    assert tried
    most = (tolerance(dtype), LSE_TOLERANCE)
    wrong = [name for name, errors in tried.items() if not (errors[0] <= most[0] and errors[1] <= most[1])]
    assert not wrong, f"relative error of out and error of LSE, by backend: {tried}"


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rows", [1, 5, 160, 1000])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_fused_backend_takes_every_call(device: torch.device, head_dim: int, rows: int, mask: str) -> None:
    """The last resort, plain torch, is never needed for the dtypes and head sizes of the checkpoints."""
    kernels = default_kernels(device)
    call = make_call(device, torch.bfloat16, head_dim=head_dim, groups=2, rows=rows, mask=mask).simplified()
    assert kernels.choose(call).name != PlainTorch.name, kernels.explain(call)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 160])
def test_no_backend_of_the_device_is_wrong(device: torch.device, rows: int, dtype: torch.dtype) -> None:
    kernels = default_kernels(device)
    call = make_call(device, dtype, head_dim=128, groups=2, rows=rows, mask="none")
    # What a package was built without shows only when it is tried; a wrong result is never excused.
    wrong = {name: reason for name, reason in kernels.explain(call) if reason and "differs" in reason}
    assert not wrong


@dataclass(frozen=True)
class Faulty:
    """A real backend with something wrong in what it returns."""

    real: Backend
    lse_factor: float = 1.0
    out_factor: float = 1.0
    name: str = "faulty"

    def refuses(self, call: AttentionCall) -> str | None:
        return self.real.refuses(call)

    def __call__(self, call: AttentionCall) -> Partial:
        out, lse = self.real(call)
        return out * self.out_factor, lse * self.lse_factor


@pytest.mark.parametrize(
    ("faults", "reason"),
    [({"lse_factor": 1 / math.log(2)}, "log-sum-exp"), ({"out_factor": 1.05}, "differs from the reference")],
    ids=["base-2", "out"],
)
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("rows", [1, 5, 160])
def test_a_faulty_backend_is_rejected_by_name_and_the_next_one_serves(
    device: torch.device, rows: int, mask: str, faults: dict[str, Any], reason: str
) -> None:
    call = make_call(device, torch.bfloat16, head_dim=64, groups=2, rows=rows, mask=mask)
    real = default_kernels(device).choose(call.simplified())
    kernels = Kernels(dict.fromkeys(Rows, (Faulty(real, **faults), real)))
    (name, objection), (_, none) = kernels.explain(call)
    assert name == "faulty" and objection is not None and reason in objection
    assert none is None
    out, lse = kernels(call)
    expected_out, expected_lse = reference(call)
    assert float((out.double() - expected_out).norm() / expected_out.norm()) <= tolerance(torch.bfloat16)
    assert float((lse - expected_lse).abs().max()) <= LSE_TOLERANCE
