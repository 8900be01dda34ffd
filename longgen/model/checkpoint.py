"""Checkpoint folders: found, checked before anything is loaded, then loaded through transformers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from longgen.errors import CheckpointError
from longgen.model.adapter import ATTENTION_NAME, register_attention
from longgen.model.files import listed, read_json_object, reason
from longgen.model.quiet import quiet_hub, quiet_transformers
from longgen.model.rope import check_rope
from longgen.model.rope_settings import check_rope_settings, window_beside
from longgen.model.shards import read_shards
from longgen.model.text_config import check_shape
from longgen.model.weights import check_weights
from longgen.names import similar_name

TEXT_TYPES = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# Vision-language folders, of which the text part is used.
VISION_TYPES = MappingProxyType({"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"})
SUPPORTED_TYPES = (*TEXT_TYPES, *VISION_TYPES)

# The checkpoint that ships inside the package.
DEMO_NAME = "demo"
DEMO_FOLDER = Path(__file__).parents[1] / "data" / "demo"

ADAPTER_NAME = "adapter_config.json"  # of peft
_DOWNLOADED = ("*.json", "*.safetensors", "*.jinja", "merges.txt")


def resolve_checkpoint(name: str) -> Path:
    """The folder of a checkpoint named by a path, by a hub id such as `Qwen/Qwen3-0.6B`, or `demo`, the one that ships.

    What exists is a path, and so is what can only be one: a name that starts with `.`, `/` or `~`, ends with a slash,
    has more than one, or begins with a folder that exists. A hub id is taken from the hub cache or downloaded; with
    HF_HUB_OFFLINE=1 or TRANSFORMERS_OFFLINE=1 the network is never touched.

    Raises:
        CheckpointError: no such folder, or the hub id cannot be had.
    """
    return _local_folder(name) or _from_hub(name)


def _local_folder(name: str) -> Path | None:
    """The folder that a name is the path of, or the checkpoint that ships; None for what can only be a hub id."""
    if not name:
        raise CheckpointError("the model's name is empty; give a checkpoint folder or a hub id")
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"there is no folder {name}: its home folder is not known") from error
    # os.path takes a name that the file system refuses, a very long one say, for one that is not there.
    if os.path.exists(path) or not _may_be_hub_id(name):
        return _checked_folder(path)
    return _demo_folder() if name == DEMO_NAME else None


def _demo_folder() -> Path:
    if not (DEMO_FOLDER / "model.safetensors").is_file():
        raise CheckpointError(
            f"the demo checkpoint is not in {DEMO_FOLDER}; write it with scripts/train_demo_checkpoint.py"
        )
    return DEMO_FOLDER


def _may_be_hub_id(name: str) -> bool:
    if name[0] in "./~" or name.endswith(("/", "\\")) or name.count("/") > 1:
        return False
    # A mistyped `out/tiny` is not looked for on the network.
    return "/" not in name or not os.path.isdir(name.split("/")[0])


def _checked_folder(path: Path) -> Path:
    if not os.path.exists(path):
        raise CheckpointError(f"there is no folder {path}")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; give the folder that holds config.json and the weights")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} is not a checkpoint folder: it has no config.json")
    return path


def resolve_config(name: str) -> Path:
    """A folder with the config.json of a checkpoint named as in `resolve_checkpoint`; of a hub id, only that is had.

    Raises:
        CheckpointError: as `resolve_checkpoint`.
    """
    folder = _local_folder(name)
    if folder is not None:
        return folder
    from huggingface_hub import hf_hub_download

    return Path(_asked_of_hub(hf_hub_download, name, filename="config.json")).parent


def _from_hub(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download

    return _checked_folder(Path(_asked_of_hub(snapshot_download, repo_id, allow_patterns=list(_DOWNLOADED))))


def _asked_of_hub(download: Callable[..., str], repo_id: str, **options: Any) -> str:
    """What a download function of the hub's library returns; CheckpointError for whatever it raises."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    offline = any(
        os.environ.get(name, "").upper() in {"1", "TRUE", "YES", "ON"}
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
    missing = f"there is no folder {repo_id!r} here, and as a hub id: "
    try:
        with quiet_hub():
            return download(repo_id, local_files_only=offline, **options)
    except HFValidationError as error:
        raise CheckpointError(f"{repo_id!r} is neither a folder here nor a valid hub id") from error
    except LocalEntryNotFoundError as error:
        why = (
            "offline, and it is not in the hub cache" if offline else "the hub cannot be reached, and it is not cached"
        )
        raise CheckpointError(f"{missing}{why}{_meant(repo_id)}") from error
    # Whatever the hub, the proxy or the disk answers, the user needs one line, not a traceback.
    except Exception as error:
        raise CheckpointError(f"{missing}{reason(error)}{_meant(repo_id)}") from error


def _meant(name: str) -> str:
    """What may be meant by a name that is no folder and no hub id, for the end of a message."""
    if "/" in name:
        return ""
    nearest = similar_name(name)
    return f"; did you mean {nearest}?" if nearest else "; longgen plan lists the short names"


def read_config(folder: Path) -> Any:
    """The transformers config of the folder's text model; for a vision-language folder, of its text part.

    Raises:
        CheckpointError: an unreadable config, a model type that is not supported, code of the checkpoint's own,
            quantised weights, sizes that no model can have, or rotary settings that cannot be used.
    """
    raw = read_json_object(_checked_folder(folder) / "config.json")
    kind = raw.get("model_type")
    if kind not in SUPPORTED_TYPES:
        raise CheckpointError(
            f"model type {kind!r} of {folder} is not supported; supported are {', '.join(SUPPORTED_TYPES)}"
        )
    text = raw.get("text_config", {}) if kind in VISION_TYPES else raw
    if not isinstance(text, dict):
        raise CheckpointError(f"text_config of {folder / 'config.json'} is not a JSON object")
    _refuse_contents(folder, raw, text)
    check_rope_settings(raw, text)
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # The config classes validate with errors of several libraries; each means the same to the user.
    except Exception as error:
        raise CheckpointError(f"{folder / 'config.json'} does not describe a {kind} model: {reason(error)}") from error
    if kind in VISION_TYPES:
        config = _text_config(config)
        if config.model_type != VISION_TYPES[kind]:
            raise CheckpointError(
                f"text_config of {folder / 'config.json'} is of model type {config.model_type!r}; that of {kind} is "
                f"{VISION_TYPES[kind]}"
            )
    if (window := window_beside(text)) is not None:
        # transformers puts it among the settings only when it builds the model; until then it has its own guess there.
        config.rope_parameters["original_max_position_embeddings"] = window
    check_shape(config)
    check_rope(config)
    return config


def _refuse_contents(folder: Path, raw: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """Raises CheckpointError for what a config.json, or its text part, says of files that are not to be used."""
    path = folder / "config.json"
    if raw.get("auto_map") or text.get("auto_map"):
        raise CheckpointError(
            f"{path} asks for Python code of its own (auto_map), which is never run; use a checkpoint without it"
        )
    if raw.get("transformers_weights") or text.get("transformers_weights"):
        raise CheckpointError(
            f"{path} names weight files of its own (transformers_weights); give them their usual names and leave it out"
        )
    quantised = raw.get("quantization_config") or text.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unknown method") if isinstance(quantised, dict) else quantised
        raise CheckpointError(
            f"{folder} holds quantised weights ({method}), which longgen does not run; use the checkpoint that is not "
            "quantised"
        )


def _text_config(config: Any) -> Any:
    """The text part, with what the outer config decides for both parts."""
    text = config.text_config
    text.tie_word_embeddings = text.tie_word_embeddings or config.tie_word_embeddings
    if getattr(text, "dtype", None) is None:
        text.dtype = getattr(config, "dtype", None)
    return text


@dataclass(frozen=True, slots=True)
class CheckedFolder:
    """A checkpoint folder whose files fit each other.

    path: of the folder.   config: of its text model, see read_config.
    """

    path: Path
    config: Any


def check_folder(folder: Path) -> CheckedFolder:
    """Checks all that can be known of a checkpoint without reading its weights, so that loading need not do it again.

    Raises CheckpointError as read_config, read_shards and check_weights, and for an adapter beside the weights.
    """
    config = read_config(folder)
    if (folder / ADAPTER_NAME).exists():
        raise CheckpointError(
            f"{folder} holds an adapter ({ADAPTER_NAME}), which is not applied here; merge it into the weights, or "
            "remove it"
        )
    check_weights(folder, config, read_shards(folder))
    return CheckedFolder(folder, config)


def load_model(folder: Path | CheckedFolder, dtype: torch.dtype | None, device: torch.device) -> nn.Module:
    """Loads the text model for inference, its attention calls going to the Pass.

    Args:
        folder: a checkpoint folder with safetensors weights, checked already or not.
        dtype: of the loaded weights; None is the config's, or float32 where it names none, as in transformers.
        device: where the model is put.

    Returns:
        A causal language model of transformers, in eval mode and without gradients; `model.config` is its text config.

    Raises:
        CheckpointError: as check_folder, weights that cannot be read, or a head that differs from the embedding
            although config.json says that they are one.
    """
    checked = folder if isinstance(folder, CheckedFolder) else check_folder(folder)
    path, config = checked.path, checked.config
    register_attention()
    with quiet_transformers():
        model, report = _from_pretrained(path, config, dtype or config.dtype or torch.float32)
    _check_report(path, report)
    _check_head(path, model)
    return model.to(device).eval().requires_grad_(False)


def _from_pretrained(folder: Path, config: Any, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """The model in host memory, and what transformers says of its keys."""
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    # Weights that do not fit raise errors of three libraries.
    except Exception as error:
        raise CheckpointError(f"the weights in {folder} do not fit its config.json: {reason(error)}") from error


def random_model(config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A model of a text config's shape with random weights, made on `device`: for measuring without a checkpoint."""
    register_attention()
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    return model.eval().requires_grad_(False)


def _check_report(folder: Path, report: dict[str, Any]) -> None:
    """What the check before loading must have found already: transformers fills what is missing with random numbers
    and only logs it."""
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(str(key) for key in report[kind])
        if names:
            raise CheckpointError(f"the weights in {folder} do not fit its config.json: {kind} {listed(names)}")


def _check_head(folder: Path, model: Any) -> None:
    """transformers loads both where both are stored and differ, whatever config.json says: more than was planned."""
    tied = model.config.tie_word_embeddings
    if tied and model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        raise CheckpointError(
            f"the weights in {folder} do not fit its config.json: the head is not the embedding, as "
            "tie_word_embeddings says; set it to false, or get the files again"
        )
