"""Fused norms and rotations: what the modules themselves compute, in fewer operations, and only where that is so."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb as apply_partly

from longgen.model.exchange import ROTATION, Exchanged, is_gated_norm, is_norm, rotating_forward
from longgen.model.fused import fuse_layers, rotate_all, rotate_first
from longgen.model.provider import Provider
from tests.checkpoints import DENSE_TYPES, HYBRID_TYPES, Build, random_ids
from tests.model.running import feed, load

IDS, SIZES = random_ids(88), (64, 23, 1)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.cuda))


def unfused(provider: Provider) -> Provider:
    """The same model on transformers' own norms and rotations."""
    for module in provider.model.modules():
        kind: Any = type(module)
        if issubclass(kind, Exchanged) and (is_norm(kind) or is_gated_norm(kind) or rotating_forward(kind)):
            module.__class__ = kind.__bases__[0]
    return provider


@pytest.mark.parametrize("model_type", [*DENSE_TYPES, *HYBRID_TYPES])
def test_logits_are_those_of_the_modules(build: Build, model_type: str) -> None:
    folder = build(model_type)
    provider, store = load(folder)
    fused = feed(provider, store, IDS, SIZES)
    provider, store = load(folder)
    torch.testing.assert_close(fused, feed(unfused(provider), store, IDS, SIZES), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("model_type", [*DENSE_TYPES, *HYBRID_TYPES])
def test_every_norm_and_every_rotation_is_exchanged(build: Build, model_type: str) -> None:
    model = load(build(model_type))[0].model
    kinds = [type(module) for module in model.modules()]
    plain, gated = (list(filter(these, kinds)) for these in (is_norm, is_gated_norm))
    rotating = [forward for kind in kinds if (forward := rotating_forward(kind))]
    assert len(plain) > 2 and rotating and (len(gated) == 2) == (model_type in HYBRID_TYPES)
    assert all(issubclass(kind, Exchanged) for kind in (*plain, *gated))
    expected = rotate_first if model_type in HYBRID_TYPES else rotate_all
    assert all(forward.__globals__[ROTATION] is expected for forward in rotating)


def test_what_was_exchanged_already_is_left_alone(build: Build) -> None:
    model = load(build("qwen3"))[0].model
    kinds = [type(module) for module in model.modules()]
    assert fuse_layers(model) == 0
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5_text"])
def test_a_model_is_gone_with_its_last_reference(build: Build, model_type: str) -> None:
    provider, _ = load(build(model_type))
    weights = [weakref.ref(weight) for weight in provider.model.parameters()]
    gc.collect()
    gc.disable()
    try:
        del provider, _
        assert not [weight for weight in weights if weight() is not None]
    finally:
        gc.enable()


class DoublingRMSNorm(Qwen3RMSNorm):
    """A norm that scales otherwise."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden_states)


class PlainRMSNorm(nn.Module):
    """A norm that is made otherwise."""

    def __init__(self, size: int) -> None:
        super().__init__()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states / hidden_states.norm(dim=-1, keepdim=True)


class SigmoidRMSNormGated(Qwen3_5RMSNormGated):
    """A norm with another gate."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.activation = "sigmoid"


class ScaledRMSNormGated(Qwen3_5RMSNormGated):
    """A norm that may be told something more."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return scale * super().forward(hidden_states, gate)


@pytest.mark.parametrize("kind", [DoublingRMSNorm, PlainRMSNorm, SigmoidRMSNormGated, ScaledRMSNormGated])
def test_norms_of_other_kinds_are_left_alone(kind: Any) -> None:
    model = nn.Sequential(Qwen3RMSNorm(8), Qwen3_5RMSNormGated(8), kind(8))
    assert fuse_layers(model) == 2
    assert [isinstance(module, Exchanged) for module in model] == [True, True, False]


def test_the_defaults_of_the_process_change_nothing() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = nn.Sequential(Qwen3RMSNorm(8), Qwen3_5RMSNorm(8))
            assert fuse_layers(model) == 2
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [Qwen3RMSNorm, Qwen3_5RMSNorm])
def test_norms_in_bfloat16_are_at_least_as_exact(kind: Any, device: str) -> None:
    torch.manual_seed(0)
    with torch.no_grad(), torch.device(device):
        norm, x = kind(64, eps=1e-6).bfloat16(), torch.randn(1, 500, 64).bfloat16()
        norm.weight.copy_(torch.randn(64))
        exact = kind(64, eps=1e-6).double()
        exact.weight.copy_(norm.weight)
        expected = exact.weight * x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6)
        if kind is Qwen3_5RMSNorm:
            expected = expected * (1 + exact.weight) / exact.weight
        before = (norm(x).double() - expected).norm()
        assert fuse_layers(nn.Sequential(norm)) == 1
        after = (norm(x).double() - expected).norm()
    assert after <= 1.001 * before


@pytest.mark.parametrize("device", DEVICES)
def test_gated_norms_in_bfloat16_are_about_as_exact(device: str) -> None:
    """Both round three times: the norm, its scaled norm and the product, or the scaled norm, SiLU and the product."""
    torch.manual_seed(0)
    with torch.no_grad(), torch.device(device):
        norm = Qwen3_5RMSNormGated(64, eps=1e-6).bfloat16()
        x, gate = (torch.randn(500, 64).bfloat16() for _ in range(2))
        norm.weight.copy_(torch.randn(64))
        wide = x.double()
        expected = norm.weight * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        expected = expected * nn.functional.silu(gate.double())
        before, kept = (norm(x, gate).double() - expected).norm(), gate.clone()
        assert fuse_layers(nn.Sequential(norm)) == 1
        after = norm(x, gate)
    assert after.dtype == torch.bfloat16 and torch.equal(gate, kept)
    assert (after.double() - expected).norm() <= 1.1 * before


@pytest.mark.parametrize(
    ("width", "own", "rotation"),
    [(16, apply_rotary_pos_emb, rotate_all), (16, apply_partly, rotate_first), (4, apply_partly, rotate_first)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_rotations_turn_the_same_channels(width: int, own: Any, rotation: Any, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    with torch.device(device):
        q, k = torch.randn(2, 4, 30, 16, dtype=dtype), torch.randn(2, 2, 30, 16, dtype=dtype)
        angles = torch.randn(2, 30, width // 2).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    for turned, expected in zip(rotation(q, k, cos, sin), own(q, k, cos, sin), strict=True):
        torch.testing.assert_close(turned, expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(turned[..., width:], expected[..., width:])


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not any(name in str(func) for name in ("view", "slice", "unsqueeze", "detach", "alias"))
        return func(*args, **(kwargs or {}))


def test_a_rotation_takes_fewer_operations() -> None:
    q, k, cos, sin = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    with Operations() as plain:
        apply_rotary_pos_emb(q, k, cos, sin)
    with Operations() as fused:
        rotate_all(q, k, cos, sin)
    assert (plain.count, fused.count) == (10, 7)
