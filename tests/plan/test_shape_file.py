"""Model shapes in YAML: what is read, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from longgen.errors import UsageError
from longgen.model.checkpoint import SUPPORTED_TYPES
from longgen.model_shape import FAMILIES, Experts
from longgen.shape_file import read_shape

TINY = {
    "family": "qwen3", "hidden": 64, "layers": 4, "q_heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 96, "vocab": 320,
    "trained_window": 4096,
}  # fmt: skip
DELTA = {"key_heads": 2, "value_heads": 2, "key_dim": 8, "value_dim": 8, "kernel": 4}


def test_families_are_those_that_are_supported() -> None:
    assert set(FAMILIES) == {kind.removesuffix("_text") for kind in SUPPORTED_TYPES}


def _written(folder: Path, **changes: object) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, **changes}))
    return path


def test_a_shape_is_read_from_yaml(tmp_path: Path) -> None:
    shape = read_shape(_written(tmp_path, window_layers=[1, 3], window=48), "float32")
    assert (shape.name, shape.dtype, shape.window) == ("tiny", "float32", 48)
    assert [layer.window for layer in shape.layers] == [None, 48, None, 48]
    experts = {"count": 4, "active": 2, "width": 8, "dense_layers": [0]}
    assert read_shape(_written(tmp_path, experts=experts)).experts == Experts(4, 2, 8, dense_layers=(0,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hiden": 3}, "tiny has no use for hiden"),
        ({"hidden": "many"}, "does not describe a model: hidden is 'many'; it must be a whole number, 1 or more"),
        ({"hidden": True}, "hidden is True"),
        ({"hidden": None}, "hidden is None"),
        ({"q_heads": 4.5}, "q_heads is 4.5"),
        ({"q_heads": 5}, "q_heads is 5; it must be a multiple of kv_heads, 2"),
        ({"layers": -3}, "layers is -3"),
        ({"layers": 10**9}, "layers is 1000000000; more than 10,000 are not looked at"),
        ({"trained_window": "4M"}, "trained_window is '4M'"),
        ({"mlp": -1}, "mlp is -1; it must be a whole number, 0 or more"),
        ({"full_attention_every": 0}, "full_attention_every is 0"),
        ({"full_attention_every": 5, "delta": DELTA}, "no layer attends: full_attention_every is 5, .* 4 layers"),
        ({"delta": {"kernel": 4}}, "delta must hold kernel, key_dim, key_heads, value_dim, value_heads, and"),
        ({"window_layers": [1], "window": "wide"}, "window is 'wide'"),
        ({"window_layers": [1, 4], "window": 48}, "window_layers has 4, and the last of 4 layers is 3"),
        ({"window_layers": 1, "window": 48}, "window_layers is 1; it must be a list of layer numbers"),
        ({"family": "llama"}, "family is 'llama'; it must be one of qwen2, qwen2_moe, qwen3, "),
        ({"dtype": "float8"}, "dtype is 'float8'; it must be one of bfloat16, float16, float32"),
        ({"tied": "maybe"}, "tied is 'maybe'; it must be true or false"),
        ({"experts": {"count": 4, "active": 5, "width": 8}}, "5 experts are active of 4"),
        ({"experts": {"count": 4, "active": 2, "width": 8, "shared_width": -1}}, "shared_width is -1"),
        ({"experts": {"count": 4, "active": 2, "width": 8, "more": 1}}, "may hold nothing but count, active, width"),
        ({"experts": 4}, "experts must hold active, count, width"),
        ({"mlp": 0}, "either mlp or experts is needed"),
        ({"full_attention_every": 2}, "recurrent layers need delta"),
        ({"window_layers": [1]}, "window_layers need window"),
        ({"experts": {"count": 4}}, "experts must hold active, count, width"),
        ({"kv_bytes_per_token": 7}, "states 7 KV bytes per token, but its shape takes 512"),
        ({"kv_heads": 0}, "kv_heads is 0"),
    ],
)
def test_a_wrong_shape_is_one_usage_error(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read_shape(_written(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_or_incomplete_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.yaml cannot be read"):
        read_shape(tmp_path / "nowhere.yaml")
    (tmp_path / "deep.yaml").write_text("[" * 100_000)
    with pytest.raises(UsageError, match=r"deep\.yaml is (nested too deep|not YAML)"):
        read_shape(tmp_path / "deep.yaml")
    for value in ("2020-13-45", "9" * 5000):  # which YAML's library raises other errors for
        (tmp_path / "odd.yaml").write_text(f"hidden: {value}\n")
        with pytest.raises(UsageError, match=r"odd\.yaml (is not YAML|.*lacks )"):
            read_shape(tmp_path / "odd.yaml")
    (tmp_path / "a.yaml").write_text("family: qwen3\n")
    with pytest.raises(UsageError, match="a lacks head_dim, hidden, kv_heads"):
        read_shape(tmp_path / "a.yaml")
