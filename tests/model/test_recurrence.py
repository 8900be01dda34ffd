"""Recurrent layers on torch code: for one model, without a change to the library that others use."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from longgen.engine import Engine
from longgen.errors import UsageError
from longgen.model.checkpoint import load_model, read_config
from longgen.model.exchange import Exchanged
from longgen.model.provider import Provider
from longgen.model.recurrence import choose_recurrence, slow_recurrence_note
from tests.checkpoints import HYBRID_TYPES, Build, random_ids
from tests.engine.running import small_options

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def recurrent_layer(model: Any) -> Any:
    return model.model.layers[0].linear_attn


@pytest.mark.parametrize("model_type", HYBRID_TYPES)
def test_the_forward_of_one_model_calls_torch_functions(build: Build, model_type: str) -> None:
    model, other = (load_model(build(model_type), torch.float32, CPU) for _ in range(2))
    choose_recurrence(model, torch.float32, CPU)
    names = recurrent_layer(model).forward.__func__.__globals__
    library = vars(sys.modules[type(recurrent_layer(model)).__module__])
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn"):
        assert names[name] is library[name].__wrapped__
    assert not isinstance(recurrent_layer(other), Exchanged)


def test_another_provider_over_the_same_model_leaves_it_as_it_is(
    build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = load_model(build("qwen3_next"), torch.float32, CPU)
    choose_recurrence(model, torch.float32, CPU)
    kind = type(recurrent_layer(model))
    (tmp_path / "fla.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    choose_recurrence(model, torch.float32, CPU)
    assert issubclass(kind, Exchanged) and type(recurrent_layer(model)) is kind


def test_kernels_that_cannot_be_avoided_are_refused(
    build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = load_model(build("qwen3_next"), torch.float32, CPU)
    module = sys.modules[type(recurrent_layer(model)).__module__]
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", lambda *_, **__: None)
    choose_recurrence(model, torch.float32, CPU)  # nothing is installed that could be called instead
    (tmp_path / "fla.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match="cannot run on the CPU while fla is installed, whose kernels need a GPU"):
        choose_recurrence(model, torch.float32, CPU)
    with pytest.raises(UsageError, match="cannot run in fp32 while fla is installed, whose kernels round it to TF32"):
        choose_recurrence(model, torch.float32, GPU)
    choose_recurrence(model, torch.bfloat16, GPU)


@pytest.mark.parametrize(("dtype", "exact"), [(torch.float32, True), (torch.bfloat16, False), (torch.float16, False)])
def test_on_a_gpu_only_fp32_is_left_to_torch(build: Build, dtype: torch.dtype, exact: bool) -> None:
    model = load_model(build("qwen3_next"), torch.float32, CPU)
    choose_recurrence(model, dtype, GPU)
    assert isinstance(recurrent_layer(model), Exchanged) == exact


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5"])
def test_fp32_is_exact_on_every_device(build: Build, model_type: str, device: str) -> None:
    """Through chunks and single steps, against fp64; with TF32 anywhere it would be 1e-3."""
    prompt, steps = random_ids(200)[0].tolist(), (5, 6, 7)

    def logits(dtype: torch.dtype, device: str) -> torch.Tensor:
        provider = Provider.load(build(model_type), dtype=dtype, device=torch.device(device))
        provider.config._experts_implementation = "eager"  # has fp64
        engine = Engine.over(provider, small_options(device=device))
        return torch.stack([engine.prefill(prompt, new_tokens=4), *map(engine.decode_step, steps)]).cpu().double()

    exact = logits(torch.float64, "cpu")
    torch.testing.assert_close(logits(torch.float32, device), exact, atol=1e-5 * float(exact.abs().max()), rtol=0)


def test_the_user_is_told_of_missing_kernels_where_they_would_help(
    build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hybrid, dense = read_config(build("qwen3_5")), read_config(build("qwen3"))
    monkeypatch.setattr("longgen.model.recurrence.find_spec", lambda _: None)
    assert slow_recurrence_note(hybrid, torch.bfloat16, GPU) == (
        "flash-linear-attention is not installed: recurrent layers run on slower torch code"
    )
    assert slow_recurrence_note(hybrid, torch.bfloat16, CPU) is None
    assert slow_recurrence_note(dense, torch.float32, GPU) is None
    assert slow_recurrence_note(hybrid, torch.float32, GPU) == slow_recurrence_note(hybrid, torch.bfloat16, GPU)
    monkeypatch.setattr("longgen.model.recurrence.find_spec", lambda _: object())
    assert slow_recurrence_note(hybrid, torch.bfloat16, GPU) is None
    note = slow_recurrence_note(hybrid, torch.float32, GPU)
    assert note is not None and "--dtype bfloat16" in note
