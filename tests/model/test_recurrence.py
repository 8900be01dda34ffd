"""Recurrent layers on torch code: for one model, without a change to the library that others use."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from longgen.errors import UsageError
from longgen.model.checkpoint import load_model, read_config
from longgen.model.exchange import Exchanged
from longgen.model.recurrence import slow_recurrence_note, use_torch_code
from tests.checkpoints import HYBRID_TYPES, Build

CPU = torch.device("cpu")


def recurrent_layer(model: Any) -> Any:
    return model.model.layers[0].linear_attn


@pytest.mark.parametrize("model_type", HYBRID_TYPES)
def test_the_forward_of_one_model_calls_torch_functions(build: Build, model_type: str) -> None:
    model, other = (load_model(build(model_type), torch.float32, CPU) for _ in range(2))
    use_torch_code(model)
    names = recurrent_layer(model).forward.__func__.__globals__
    library = vars(sys.modules[type(recurrent_layer(model)).__module__])
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn"):
        assert names[name] is library[name].__wrapped__
    assert not isinstance(recurrent_layer(other), Exchanged)


def test_another_provider_over_the_same_model_leaves_it_as_it_is(
    build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = load_model(build("qwen3_next"), torch.float32, CPU)
    use_torch_code(model)
    kind = type(recurrent_layer(model))
    (tmp_path / "fla.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    use_torch_code(model)
    assert issubclass(kind, Exchanged) and type(recurrent_layer(model)) is kind


def test_kernels_that_cannot_be_avoided_are_refused(
    build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = load_model(build("qwen3_next"), torch.float32, CPU)
    module = sys.modules[type(recurrent_layer(model)).__module__]
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", lambda *_, **__: None)
    use_torch_code(model)  # nothing is installed that could be called instead
    (tmp_path / "fla.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match="cannot run on the CPU while fla is installed"):
        use_torch_code(model)


def test_the_user_is_told_of_missing_kernels_where_they_would_help(
    build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hybrid, dense, gpu = read_config(build("qwen3_5")), read_config(build("qwen3")), torch.device("cuda")
    monkeypatch.setattr("longgen.model.recurrence.find_spec", lambda _: None)
    assert slow_recurrence_note(hybrid, gpu) == (
        "flash-linear-attention is not installed: recurrent layers run on slower torch code"
    )
    assert slow_recurrence_note(hybrid, CPU) is None
    assert slow_recurrence_note(dense, gpu) is None
    monkeypatch.setattr("longgen.model.recurrence.find_spec", lambda _: object())
    assert slow_recurrence_note(hybrid, gpu) is None
