"""Recurrent layers that convolve on another package's kernel: only where that gives the same, and in its layout."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from longgen.model.checkpoint import load_model
from longgen.model.convolution import CONVOLUTION, convolve
from longgen.model.exchange import calling_forward
from longgen.model.recurrence import choose_recurrence
from tests.checkpoints import HYBRID_TYPES, Build, random_ids
from tests.model.running import feed, load

CPU, GPU = torch.device("cpu"), torch.device("cuda")
IDS, SIZES = random_ids(88), (64, 3, 20, 1)
PACKAGE = """
import torch.nn.functional as F

def causal_conv1d(x, weight, bias=None, activation=None):
    assert x.is_contiguous() and activation == "silu"
    y = F.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=weight.shape[1] - 1, groups=len(weight))
    y = y[..., : x.shape[1]].transpose(1, 2).contiguous()
    return {result}, None
"""


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, place: str = "causal_conv1d", result: str = "F.silu(y)"
) -> None:
    """A package with the name and the call of flash-linear-attention's convolution, and torch's result."""
    modules = folder / "fla" / "modules"
    modules.mkdir(parents=True)
    for package in (folder / "fla", modules):
        (package / "__init__.py").touch()
    (modules / f"{place}.py").write_text(PACKAGE.format(result=result), encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    for name in ("fla", "fla.modules", f"fla.modules.{place}", "causal_conv1d"):
        monkeypatch.setitem(sys.modules, name, None)  # what was imported is forgotten after the test
        monkeypatch.delitem(sys.modules, name)


def convolutions(model: Any) -> list[Any]:
    """What each recurrent layer convolves with."""
    forwards = [calling_forward(type(module), CONVOLUTION) for module in model.modules()]
    return [forward.__globals__[CONVOLUTION] for forward in forwards if forward]


def on_kernel(model: Any) -> set[bool]:
    return {getattr(function, "func", None) is convolve for function in convolutions(model)}


@pytest.mark.parametrize("place", ["causal_conv1d", "convolution"])
@pytest.mark.parametrize("model_type", HYBRID_TYPES)
def test_the_kernel_reads_tokens_as_they_are_written_and_logits_are_the_same(
    build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_type: str, place: str
) -> None:
    expected = feed(*load(build(model_type)), IDS, SIZES)
    install(tmp_path, monkeypatch, place=place)
    monkeypatch.setattr(
        "longgen.model.provider.choose_recurrence", lambda model, *_: choose_recurrence(model, torch.bfloat16, GPU)
    )
    provider, store = load(build(model_type))
    assert on_kernel(provider.model) == {True}
    torch.testing.assert_close(feed(provider, store, IDS, SIZES), expected, atol=1e-5, rtol=1e-4)


def test_a_second_provider_over_the_same_weights_finds_it_there(
    build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = load_model(build("qwen3_next"), torch.float32, CPU)
    install(tmp_path, monkeypatch)
    assert choose_recurrence(model, torch.bfloat16, GPU)
    kinds = [type(module) for module in model.modules()]
    assert choose_recurrence(model, torch.bfloat16, GPU)
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("result", "says"),
    [
        ("y", "something else"),
        ("F.silu(y) + 0.1", "something else"),
        ("F.silu(y)[:, 1:]", "Error"),
        ("None.nothing", "AttributeError"),
    ],
)
def test_a_kernel_that_gives_something_else_is_not_taken(
    build: Build,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    result: str,
    says: str,
    dtype: torch.dtype,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = load_model(build("qwen3_next"), dtype, CPU)
    install(tmp_path, monkeypatch, result=result)
    assert not choose_recurrence(model, torch.bfloat16, GPU)
    assert on_kernel(model) == {False}
    assert "convolutions run on torch code" in caplog.text and says in caplog.text


@pytest.mark.parametrize(("content", "taken"), [("def causal_conv1d_fn(): ...", False), ("raise OSError", True)])
def test_causal_conv1d_is_left_its_place_where_it_works(
    build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str, taken: bool
) -> None:
    model = load_model(build("qwen3_next"), torch.float32, CPU)
    install(tmp_path, monkeypatch)
    (tmp_path / "causal_conv1d.py").write_text(content, encoding="utf-8")
    assert choose_recurrence(model, torch.bfloat16, GPU) == taken
    assert on_kernel(model) == {taken}


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3"])
def test_without_a_kernel_nothing_changes_and_nothing_is_said(
    build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, model_type: str
) -> None:
    for name in ("fla", "causal_conv1d"):
        monkeypatch.setitem(sys.modules, name, None)
    model = load_model(build(model_type), torch.float32, CPU)
    assert not choose_recurrence(model, torch.bfloat16, GPU)
    assert True not in on_kernel(model) and not caplog.text


@pytest.mark.cuda
@pytest.mark.skipif(find_spec("fla") is None, reason="needs flash-linear-attention")
@pytest.mark.skipif(find_spec("causal_conv1d") is not None, reason="causal-conv1d convolves where it is installed")
@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5"])
def test_the_real_kernel_convolves_like_torch(build: Build, model_type: str) -> None:
    model = load_model(build(model_type), torch.bfloat16, GPU)
    assert choose_recurrence(model, torch.bfloat16, GPU)
    layer: Any = next(module for module in model.modules() if hasattr(module, "conv1d"))
    function, *_ = convolutions(model)
    weight = layer.conv1d.weight.squeeze(1).detach()
    channels, kernel_size = weight.shape
    rows = torch.randn(2, 300, channels, device="cuda", dtype=torch.bfloat16)
    for x in (rows.transpose(1, 2), rows.transpose(1, 2).contiguous()):
        exact = F.conv1d(x.double(), weight[:, None].double(), padding=kernel_size - 1, groups=channels)[..., :300]
        got = function(x, weight, None, activation="silu")
        assert got.transpose(1, 2).is_contiguous()
        torch.testing.assert_close(got.double(), F.silu(exact), atol=1e-2, rtol=1e-2)
