"""Folders that cannot be used are refused before or while loading, in one line that names what is wrong."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import logging as hub_logging
from safetensors.torch import load_file, save_file

from longgen.errors import CheckpointError, UsageError
from longgen.model.checkpoint import SUPPORTED_TYPES, check_folder, load_model, read_config, resolve_checkpoint
from longgen.model.tiny import make_checkpoint
from tests.checkpoints import Build

Copy = Callable[..., Path]


@pytest.fixture
def copy(build: Build, tmp_path: Path) -> Copy:
    """A checkpoint that may be damaged."""

    def make(model_type: str = "qwen3", **options: Any) -> Path:
        return shutil.copytree(build(model_type, **options), tmp_path / model_type)

    return make


def edit_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def load(folder: Path) -> torch.nn.Module:
    return load_model(folder, torch.float32, torch.device("cpu"))


def drop_weights(folder: Path, ending: str) -> Path:
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.endswith(ending)}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def split_weights(folder: Path) -> tuple[Path, Path]:
    """Turns the single file of a folder into two shards and an index."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: weights[name] for name in held}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    return folder / "a.safetensors", folder / "b.safetensors"


@pytest.mark.parametrize("model_type", SUPPORTED_TYPES)
def test_the_model_is_ready_for_inference(build: Build, model_type: str) -> None:
    model = load(build(model_type))
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())
    assert not any("visual" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_keep_the_type_that_the_config_names(copy: Copy, dtype: str) -> None:
    checked = check_folder(edit_config(copy(), dtype=dtype))
    assert checked.config.dtype is getattr(torch, dtype)
    model = load_model(checked, None, torch.device("cpu"))
    assert {weight.dtype for weight in model.parameters()} == {getattr(torch, dtype)}


def test_a_vision_language_folder_holds_a_vision_part(build: Build) -> None:
    names = load_file(build("qwen3_5") / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in names)
    assert any(name.startswith("model.language_model.") for name in names)
    assert read_config(build("qwen3_5")).model_type == "qwen3_5_text"


def test_experts_are_stored_one_by_one(build: Build) -> None:
    names = load_file(build("qwen3_moe") / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in names


@pytest.mark.parametrize("model_type", ["llama", "qwen2_vl", "mixtral", None])
def test_other_model_types_are_refused_by_name(copy: Copy, model_type: str | None) -> None:
    with pytest.raises(CheckpointError, match=f"{model_type!r}.*qwen2, qwen2_moe, qwen3, .*qwen3_5_moe"):
        read_config(edit_config(copy(), model_type=model_type))


def test_code_of_the_checkpoint_is_refused(copy: Copy) -> None:
    with pytest.raises(CheckpointError, match="never run"):
        read_config(edit_config(copy(), auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"}))


def test_quantised_weights_are_refused(copy: Copy) -> None:
    with pytest.raises(CheckpointError, match="fp8"):
        read_config(edit_config(copy(), quantization_config={"quant_method": "fp8"}))


def test_weight_files_under_names_of_their_own_are_refused(copy: Copy) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json names weight files of its own \(transformers_weights\)"):
        read_config(edit_config(copy(), transformers_weights="other.safetensors"))


def test_transformers_is_kept_off_standard_error(copy: Copy, caplog: pytest.LogCaptureFixture) -> None:
    folder = edit_config(copy(), pad_token_id=-1)  # it warns of that when it makes the model
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        check_folder(folder)
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records


def test_an_adapter_beside_the_weights_is_refused(copy: Copy) -> None:
    folder = copy()
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"holds an adapter \(adapter_config\.json\).*; merge it into the weights"
    ):
        check_folder(folder)


def edit_text(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw.get("text_config", raw).update(changes)
    path.write_text(json.dumps(raw))
    return folder


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("qwen3", {"quantization_config": "fp8"}, r"quantised weights \(fp8\)"),
        ("qwen3_5", {"quantization_config": "fp8"}, r"quantised weights \(fp8\)"),
        ("qwen3", {"num_attention_heads": 0}, "num_attention_heads is 0"),
        ("qwen3", {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ("qwen3", {"num_key_value_heads": 3}, "num_attention_heads is 4 in .* multiple of num_key_value_heads, 3"),
        ("qwen2", {"hidden_size": -64}, "hidden_size is -64"),
        ("qwen3", {"intermediate_size": 0}, "intermediate_size is 0"),
        ("qwen2", {"head_dim": 16.0}, r"head_dim is 16\.0 in .* must be a whole number"),
        ("qwen3_moe", {"num_local_experts": [4]}, r"num_experts is \[4\] in .* must be a whole number"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9 .* there are 4 experts"),
        ("qwen3_5_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ("qwen3_moe", {"num_local_experts": -1}, "num_experts is -1"),
        ("qwen2_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_5_moe", {"mlp_only_layers": 2}, "mlp_only_layers is 2 in .* must be a list of layer numbers"),
        ("qwen3_next", {"linear_num_key_heads": 0}, "linear_num_key_heads is 0"),
        ("qwen3_5", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
        ("qwen3", {"dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn .* supported are bfloat16, float16, float32"),
        ("qwen3_5", {"dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn"),
        ("qwen3", {"dtype": 3}, "dtype 3 "),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "layer 0 is of type 'chunked_attention'"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "layer 1 is of type"),
        ("qwen3_next", {"layer_types": ["sliding_attention"] * 4}, "full_attention or linear_attention"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 4}, "no attention layer"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False}, "sliding_window is None"),
        ("qwen3_moe", {"sliding_window": -5, "use_sliding_window": True}, "sliding_window is -5"),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}}, "rope_theta is '1e4'"),
        ("qwen3", {"rope_parameters": YARN | {"rope_theta": 1}}, "rope_theta is 1 "),
        ("qwen3", {"rope_parameters": YARN | {"factor": "4"}}, "factor is '4'"),
        ("qwen3", {"rope_parameters": YARN | {"factor": 0}}, "factor is 0"),
        ("qwen3", {"rope_parameters": YARN | {"factor": -1.5}}, "factor is -1.5"),
        ("qwen3", {"rope_parameters": YARN | {"factor": float("nan")}}, "factor is nan"),
        ("qwen3", {"rope_parameters": YARN | {"attention_factor": "1"}}, "attention_factor is '1'"),
        ("qwen3", {"rope_parameters": YARN | {"mscale": "1"}}, "mscale is '1'"),
        ("qwen3", {"rope_parameters": YARN | {"partial_rotary_factor": "half"}}, "partial_rotary_factor is 'half'"),
        ("qwen3", {"rope_parameters": YARN | {"partial_rotary_factor": 0.45}}, "rotary angles for 7 of a head's 16"),
        ("qwen3", {"rope_parameters": YARN | {"mrope_section": [1]}}, r"mrope_section is \[1\]"),
        ("qwen3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": -2}}, "factor is -2"),
        ("qwen3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": None}}, "needs a factor"),
    ],
)
def test_a_config_that_no_model_can_be_made_of_is_refused(
    copy: Copy, model_type: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_config(edit_text(copy(model_type), **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [None, "qwen3_5_text", [1]])
def test_a_text_part_that_is_no_object_is_refused(copy: Copy, text: object) -> None:
    with pytest.raises(CheckpointError, match=r"text_config of .*config\.json is not a JSON object"):
        read_config(edit_config(copy("qwen3_5"), text_config=text))


@pytest.mark.parametrize("model_type", [None, 3, "qwen3"])
def test_a_text_part_of_another_type_is_refused(copy: Copy, model_type: object) -> None:
    with pytest.raises(CheckpointError, match=r"text_config of .* is of model type .*; that of qwen3_5 is qwen"):
        read_config(edit_text(copy("qwen3_5"), model_type=model_type))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_json_that_is_nested_too_deep_is_refused(copy: Copy, file: str) -> None:
    folder = copy()
    split_weights(folder)
    (folder / file).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=re.escape(file)):
        load(folder)


def test_whatever_the_loading_raises_is_one_line(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the library's own\ncheck")

    monkeypatch.setattr("longgen.model.checkpoint.AutoModelForCausalLM.from_pretrained", fail)
    with pytest.raises(CheckpointError, match=r"do not fit its config\.json: the library's own check"):
        load(copy())


@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_dynamic_rope_is_refused(copy: Copy, name: str) -> None:
    folder = edit_config(copy(), rope_parameters=None, rope_scaling={name: "dynamic", "factor": 2.0})
    with pytest.raises(CheckpointError, match="dynamic"):
        read_config(folder)


def test_an_old_style_yarn_config_is_understood(copy: Copy) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = read_config(edit_config(copy(), rope_parameters=None, rope_theta=1e6, rope_scaling=scaling))
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.rope_parameters["rope_theta"] == 1e6


def test_an_unreadable_config_is_refused(copy: Copy) -> None:
    folder = copy()
    (folder / "config.json").write_text("{not json")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON: .*; get it again"):
        read_config(folder)


def test_a_config_with_more_layers_than_weights_is_refused(copy: Copy) -> None:
    folder = edit_config(copy("qwen3_moe"), num_hidden_layers=5)
    with pytest.raises(CheckpointError, match=r"missing.*model\.layers\.3\."):
        load(folder)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5"])
def test_a_missing_head_is_refused_unless_it_is_tied(copy: Copy, build: Build, model_type: str) -> None:
    with pytest.raises(CheckpointError, match=r"missing 1 weight that .*lm_head\.weight"):
        load(drop_weights(copy(model_type), "lm_head.weight"))
    assert not any(name.startswith("lm_head") for name in load_file(build(model_type, tied=True) / "model.safetensors"))
    model: Any = load(build(model_type, tied=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5"])
def test_a_stored_head_must_be_the_embedding_where_they_are_tied(copy: Copy, model_type: str) -> None:
    folder = edit_text(edit_config(copy(model_type), tie_word_embeddings=True), tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match="the head is not the embedding, as tie_word_embeddings says; set it to"):
        load(folder)
    weights = load_file(folder / "model.safetensors")
    (embedding,) = (tensor for name, tensor in weights.items() if name.endswith("embed_tokens.weight"))
    weights["lm_head.weight"] = embedding.clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model: Any = load(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_missing_weight_is_refused(copy: Copy) -> None:
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight"):
        load(drop_weights(copy(), "layers.1.self_attn.k_proj.weight"))


def test_weights_of_another_shape_are_refused(copy: Copy) -> None:
    with pytest.raises(CheckpointError, match="do not fit"):
        load(edit_config(copy(), intermediate_size=104))


def test_shards_with_an_index_load(copy: Copy, build: Build) -> None:
    folder = copy()
    split_weights(folder)
    expected = load(build("qwen3")).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load(folder).state_dict().items())


@pytest.mark.parametrize("keep", [4, 200, -1])
def test_a_truncated_shard_is_named(copy: Copy, keep: int) -> None:
    folder = copy()
    _, shard = split_weights(folder)
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"b\.safetensors"):
        load(folder)


@pytest.mark.parametrize("header", [b"{not json", b"[1, 2]   ", b'{"a": 1}  ', b'{"a": {"data_offsets": "x"}}'])
def test_a_damaged_header_is_named(copy: Copy, header: bytes) -> None:
    folder = copy()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has a damaged"):
        load(folder)


def test_a_shard_that_is_not_there_is_named(copy: Copy) -> None:
    folder = copy()
    shard, _ = split_weights(folder)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"missing 1 weight file of the 2 that .* names: a\.safetensors; get"):
        load(folder)


def test_an_index_that_promises_too_much_is_refused(copy: Copy) -> None:
    folder = copy()
    split_weights(folder)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.9.extra"] = "a.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"model\.layers\.9\.extra"):
        load(folder)


def test_a_folder_without_weights_is_refused(copy: Copy) -> None:
    folder = copy()
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        load(folder)


def test_a_folder_resolves_to_itself(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build("qwen3")
    assert resolve_checkpoint(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve_checkpoint(folder.name).resolve() == folder
    assert resolve_checkpoint(f"./{folder.name}/").resolve() == folder


@pytest.mark.parametrize(
    "name",
    [
        "./none",
        "/none/such",
        "~/none-such",
        "a/b/c",
        "models/",
        "../none",
        "",
        "~nosuchuser/x",
        "./" + "x" * 300,
        "out/tinny",
    ],
)
def test_a_path_is_never_taken_for_a_hub_id(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="there is no folder" if name else "name is empty"):
        resolve_checkpoint(name)


def test_a_file_and_a_folder_without_config_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_checkpoint(str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        resolve_checkpoint(str(tmp_path))


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_asks_the_cache_only(variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variable, "1")
    for call in ("getaddrinfo", "socket.connect", "socket.connect_ex"):
        monkeypatch.setattr(f"socket.{call}", lambda *_, **__: pytest.fail("touched the network"))
    with pytest.raises(CheckpointError, match="offline"):
        resolve_checkpoint("nobody/no-such-checkpoint")


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("qwn3-8b", "not in the hub cache; did you mean qwen3-8b?"),
        ("gpt2", "not in the hub cache; longgen plan lists the short names"),
        ("nobody/qwn3-8b", "not in the hub cache"),
    ],
)
def test_a_name_that_is_almost_a_short_name_is_told_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, ending: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(name)
    assert str(caught.value).endswith(ending)


def test_the_hubs_library_is_kept_off_standard_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    logger = hub_logging.get_logger("huggingface_hub.utils._http")
    shown = []

    def download(*_: object, **__: object) -> str:
        shown.append(logger.isEnabledFor(logging.WARNING))
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert logger.isEnabledFor(logging.WARNING)
    with pytest.raises(CheckpointError, match=r"cannot be reached|offline"):
        resolve_checkpoint("nobody/no-such-checkpoint")
    assert shown == [False]
    assert logger.isEnabledFor(logging.WARNING)


def test_a_hub_id_is_downloaded(build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def download(repo_id: str, **options: Any) -> str:
        asked.append((repo_id, options["local_files_only"]))
        return str(build("qwen3"))

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_checkpoint("Qwen/Qwen3-0.6B") == build("qwen3")
    assert asked == [("Qwen/Qwen3-0.6B", False)]


@pytest.mark.parametrize("name", ["not a model!", "x" * 300])
def test_a_name_that_is_neither_is_refused(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="neither a folder here nor a valid hub id"):
        resolve_checkpoint(name)


def test_tiny_checkpoints_of_unknown_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="llama"):
        make_checkpoint(tmp_path, "llama")
    with pytest.raises(UsageError, match="sliding"):
        make_checkpoint(tmp_path, "qwen3_next", sliding=True)
