"""Weight files that are broken in every way, found by their headers before a weight is read, in one line each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longgen.errors import CheckpointError
from longgen.model.checkpoint import SUPPORTED_TYPES, load_model, read_config
from longgen.model.shards import read_shards
from longgen.model.tokenizer import TextTokenizer
from longgen.model.weights import check_weights
from tests.checkpoints import Build

Copy = Callable[..., Path]
Weights = dict[str, torch.Tensor]
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n"
DENSE_AND_EXPERTS = ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe")


@pytest.fixture
def copy(build: Build, tmp_path: Path) -> Copy:
    """A checkpoint that may be damaged."""

    def make(model_type: str = "qwen3", **options: Any) -> Path:
        return shutil.copytree(build(model_type, **options), tmp_path / model_type)

    return make


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longgen.model.checkpoint.AutoModelForCausalLM.from_pretrained", _loaded)


def _loaded(*_: object, **__: object) -> None:
    pytest.fail("a weight was loaded")


def edit(folder: Path, change: Callable[[Weights], object]) -> Path:
    """Rewrites a folder's single weight file."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def split(folder: Path) -> Path:
    """Makes two files and an index of a folder's single weight file."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    index: dict[str, str] = {}
    for file, held in {"a.safetensors": names[::2], "b.safetensors": names[1::2]}.items():
        save_file({name: weights[name] for name in held}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(held, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def named(weights: Weights, part: str) -> str:
    return next(name for name in sorted(weights) if part in name)


def refused(folder: Path, pattern: str) -> None:
    with pytest.raises(CheckpointError, match=pattern) as caught:
        load_model(folder, torch.float32, torch.device("cpu"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_type", SUPPORTED_TYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_sound_folders_pass(build: Build, model_type: str, tied: bool) -> None:
    folder = build(model_type, tied=tied)
    check_weights(folder, read_config(folder), read_shards(folder))


def test_sound_shards_pass(copy: Copy) -> None:
    folder = split(copy("qwen3_moe"))
    check_weights(folder, read_config(folder), read_shards(folder))


@pytest.mark.parametrize("model_type", DENSE_AND_EXPERTS)
def test_a_missing_weight_is_named(copy: Copy, model_type: str) -> None:
    folder = edit(copy(model_type), lambda w: w.pop(named(w, "layers.1.input_layernorm")))
    refused(folder, r"missing 1 weight that config\.json calls for in .*layers\.1\.input_layernorm.*; get the")


@pytest.mark.parametrize("model_type", DENSE_AND_EXPERTS)
@pytest.mark.parametrize("layer", [1, 40])
def test_a_weight_without_a_place_is_named_within_and_beyond_the_layers(
    copy: Copy, model_type: str, layer: int
) -> None:
    prefix = "model.language_model" if model_type.startswith("qwen3_5") else "model"
    folder = edit(copy(model_type), lambda w: w.update({f"{prefix}.layers.{layer}.extra.weight": torch.zeros(2)}))
    refused(
        folder,
        r"1 weight that its config\.json has no place for: "
        rf".*layers\.{layer}\.extra\.weight \(model\.safetensors\); get",
    )


def test_fewer_layers_than_there_are_weights_for_are_noticed(copy: Copy) -> None:
    folder = copy()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "layer_types": None}))
    refused(folder, r"has no place for: model\.layers\.2\.")


@pytest.mark.parametrize("model_type", DENSE_AND_EXPERTS)
def test_a_wrong_shape_is_named_with_both_shapes(copy: Copy, model_type: str) -> None:
    folder = edit(copy(model_type), lambda w: w.update({named(w, "layers.1.input_layernorm"): torch.zeros(7)}))
    refused(
        folder,
        r"do not fit its config\.json, 1 weight of another shape: "
        r".*layernorm.weight \(model\.safetensors\) is \[7\] where \[64\] belo",
    )


def test_an_expert_of_another_shape_is_noticed(copy: Copy) -> None:
    folder = edit(copy("qwen3_moe"), lambda w: w.update({named(w, "experts.2.up_proj"): torch.zeros(31, 64)}))
    odd = r"layers\.0\.mlp\.experts\.2\.up_proj\.weight \(model\.safetensors\) is \[31, 64\]"
    refused(folder, rf"{odd} where the others are \[32, 64\]; get")


def test_experts_whose_parts_do_not_go_together_are_noticed(copy: Copy) -> None:
    def narrow(weights: Weights) -> None:
        weights |= {name: torch.zeros(32, 60) for name in weights if "layers.0" in name and "up_proj" in name}

    parts = r"gate_proj\.weight \[32, 64\], up_proj\.weight \[32, 60\]"
    refused(edit(copy("qwen3_moe"), narrow), rf"experts\.gate_up_proj \(.*{parts}.*\) do not make \[4, 64, 64\]; get")


@pytest.mark.parametrize("part", ["experts.2.up_proj", "experts.2.down_proj"])
def test_a_missing_part_of_an_expert_is_noticed(copy: Copy, part: str) -> None:
    folder = edit(copy("qwen3_moe"), lambda w: w.pop(named(w, part)))
    refused(folder, r"model\.layers\.0\.mlp\.experts")


def test_an_expert_under_anothers_number_is_noticed(copy: Copy) -> None:
    def renumber(weights: Weights) -> None:
        for name in [name for name in weights if ".experts.1." in name]:
            weights[name.replace(".experts.1.", ".experts.4.")] = weights.pop(name)

    refused(edit(copy("qwen3_moe"), renumber), r"lacks experts .*experts\.1\.down_proj")


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe"])
def test_multi_token_prediction_is_ignored_where_transformers_does(copy: Copy, model_type: str) -> None:
    folder = edit(copy(model_type), lambda w: w.update({"mtp.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(2)}))
    check_weights(folder, read_config(folder), read_shards(folder))


def test_multi_token_prediction_in_a_model_that_has_none_is_left_over(copy: Copy) -> None:
    refused(edit(copy(), lambda w: w.update({"mtp.fc.weight": torch.zeros(2)})), r"no place for: mtp\.fc\.weight")


def test_a_vision_part_is_ignored_whatever_it_holds(copy: Copy) -> None:
    folder = edit(copy("qwen3_5"), lambda w: w.update({"model.visual.more": torch.zeros(2, dtype=torch.int8)}))
    check_weights(folder, read_config(folder), read_shards(folder))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8])
def test_quantised_weights_without_a_word_in_the_config_are_named(copy: Copy, dtype: torch.dtype) -> None:
    folder = edit(copy(), lambda w: w.update({named(w, "q_proj"): torch.zeros(64, 64, dtype=dtype)}))
    refused(
        folder,
        r"model\.safetensors holds model\.layers\.0\.self_attn\.q_proj\.weight as .*: longgen does not run quantised",
    )


def test_an_empty_file_is_named(copy: Copy) -> None:
    folder = split(copy())
    (folder / "b.safetensors").write_bytes(b"")
    refused(folder, r"b\.safetensors is empty; get it again")


def test_a_pointer_file_is_named(copy: Copy) -> None:
    folder = split(copy())
    (folder / "a.safetensors").write_text(POINTER)
    refused(folder, r"a\.safetensors is a git-lfs pointer, not the file itself; run git lfs pull in ")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_a_pointer_in_place_of_a_json_file_is_named(copy: Copy, file: str) -> None:
    folder = split(copy())
    (folder / file).write_text(POINTER)
    refused(folder, rf"{file} is a git-lfs pointer, not the file itself; run git lfs pull in ")


def test_a_pointer_in_place_of_the_tokenizer_is_named(copy: Copy) -> None:
    folder = copy()
    (folder / "tokenizer.json").write_text(POINTER)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a git-lfs pointer"):
        TextTokenizer.load(folder)


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def test_two_tensors_in_one_place_are_noticed(copy: Copy) -> None:
    def overlap(header: dict[str, Any]) -> None:
        parts = [header[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qo"]
        parts[0]["data_offsets"] = parts[1]["data_offsets"]

    folder = copy()
    rewrite_header(folder / "model.safetensors", overlap)
    refused(folder, r"model\.safetensors has a damaged safetensors header; get it again")


def test_a_negative_size_is_noticed(copy: Copy) -> None:
    folder = copy()
    name = "model.layers.0.self_attn.q_proj.weight"
    rewrite_header(folder / "model.safetensors", lambda header: header[name].update(shape=[-64, -64]))
    refused(folder, rf"model\.safetensors has a damaged safetensors header \({name}\)")


def test_the_file_that_is_loaded_is_the_one_that_is_checked(copy: Copy) -> None:
    """transformers takes model.safetensors first, also where there is an index."""
    folder = copy()
    single = (folder / "model.safetensors").read_bytes()
    split(folder)
    (folder / "model.safetensors").write_bytes(single[:-1])
    refused(folder, r"model\.safetensors holds \d+ bytes where its header promises")


def test_an_index_that_transformers_cannot_read_is_refused(copy: Copy) -> None:
    folder = split(copy())
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))
    refused(folder, r"index\.json is not a safetensors index with weight_map and metadata; get it again")


def test_what_is_there_in_place_of_weights_is_named(copy: Copy) -> None:
    folder = split(copy())
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, r"index\.json, which a\.safetensors, b\.safetensors would need; get the index too")
    (folder / "model.safetensors").symlink_to(folder / "nowhere")
    refused(folder, r"model\.safetensors is no file, or a link to one that is not there; get it again")
    (folder / "model.safetensors").unlink()
    for name in "ab":
        (folder / f"{name}.safetensors").rename(folder / f"{name}.gguf")
    refused(folder, r"no weights: .*; a\.gguf, b\.gguf cannot be read here, get the safetensors version")


def test_a_tensor_smaller_than_its_shape_is_named(copy: Copy) -> None:
    folder = copy()
    path = folder / "model.safetensors"
    content = path.read_bytes()
    assert b'"shape":[64,64]' in content
    path.write_bytes(content.replace(b'"shape":[64,64]', b'"shape":[64,65]', 1))
    refused(folder, r"model\.safetensors has a damaged safetensors header \(model\.")


def test_a_tensor_in_another_file_than_the_index_says_is_named(copy: Copy) -> None:
    folder = split(copy())
    (folder / "a.safetensors").rename(folder / "c.safetensors")
    (folder / "b.safetensors").rename(folder / "a.safetensors")
    (folder / "c.safetensors").rename(folder / "b.safetensors")
    refused(folder, r"index\.json says that .* is in a\.safetensors, but it is in b\.safetensors")


def test_a_tensor_that_the_index_does_not_name_is_named(copy: Copy) -> None:
    folder = split(copy())
    weights = load_file(folder / "a.safetensors")
    save_file({**weights, "model.more": torch.zeros(2)}, folder / "a.safetensors", metadata={"format": "pt"})
    refused(folder, r"a\.safetensors holds 1 weight that .*index\.json does not name: model\.more")


def test_a_tensor_stored_twice_is_named(copy: Copy) -> None:
    folder = split(copy())
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    refused(folder, r"is in both a\.safetensors and b\.safetensors")


@pytest.mark.parametrize("name", ["../out.safetensors", "pytorch_model.bin"])
def test_an_index_that_names_other_folders_or_pickles_is_refused(copy: Copy, name: str) -> None:
    folder = split(copy())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"a": name}}))
    refused(folder, r"index\.json names (files outside its folder|pickles)")


def test_pickled_weights_are_refused_by_name(copy: Copy) -> None:
    folder = copy()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, r"only as pickles \(pytorch_model\.bin\).*; get or make a safetensors version")


def test_code_of_the_text_part_is_refused(copy: Copy) -> None:
    folder = copy("qwen3_5")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "auto_map")
