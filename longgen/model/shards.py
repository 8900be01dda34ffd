"""Checks safetensors files by their headers, so that a broken download is named before minutes of loading."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from longgen.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_POINTER_START = b"version https://git-lfs"
# Bytes of the types that weights can have here; packed and 8-bit ones belong to quantised checkpoints.
_TYPE_BYTES: Mapping[str, int] = MappingProxyType({"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4})


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file's header describes it. dtype: safetensors' name of the type, such as BF16."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def reason(error: BaseException) -> str:
    """A library's error in one line of at most 300 characters, for the end of a message of ours."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def listed(names: list[str]) -> str:
    """The first few names, for a message."""
    return f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"


def shard_files(folder: Path) -> list[Path]:
    """The weight files of a folder, in the order of its index.

    Raises:
        CheckpointError: there are none, or only pickled ones, or the index is unreadable or names a file that is not
            there or elsewhere.
    """
    index = folder / INDEX_NAME
    if not index.is_file():
        single = folder / SINGLE_NAME
        if not single.is_file():
            raise CheckpointError(_without_weights(folder))
        return [single]
    names = sorted(set(_weight_map(index).values()))
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{len(absent)} of the {len(names)} weight files that {index} names are not there: {listed(absent)}; "
            "get them again"
        )
    return [folder / name for name in names]


def read_shards(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder's weight files, by name.

    Raises CheckpointError, naming the file, if one is missing, empty, truncated, a git-lfs pointer or not safetensors,
    if a name is stored twice, or if the index and the files do not say the same.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in shard_files(folder):
        for name, tensor in _read_header(path).items():
            if name in tensors:
                raise CheckpointError(f"{name} is in both {tensors[name].file} and {path.name} of {folder}")
            tensors[name] = tensor
    index = folder / INDEX_NAME
    if index.is_file():
        _check_index(index, tensors)
    return tensors


def _without_weights(folder: Path) -> str:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_ENDINGS)
    if pickles:
        return (
            f"{folder} has its weights only as pickles ({listed(pickles)}), which can run any code when they are read; "
            "get or make a safetensors version"
        )
    return f"{folder} has no weights: neither {SINGLE_NAME} nor {INDEX_NAME}"


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = set(weight_map.values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {reason(error)}; get it again") from error
    outside = sorted(str(name) for name in names if not isinstance(name, str) or Path(name).name != name)
    if outside:
        raise CheckpointError(f"{index} names files outside its folder: {listed(outside)}")
    pickles = sorted(name for name in names if Path(name).suffix in PICKLE_ENDINGS)
    if pickles:
        raise CheckpointError(f"{index} names pickles ({listed(pickles)}), which can run any code when they are read")
    return weight_map


def _check_index(index: Path, tensors: Mapping[str, StoredTensor]) -> None:
    weight_map = _weight_map(index)
    lost = sorted(weight_map.keys() - tensors.keys())
    if lost:
        raise CheckpointError(
            f"{len(lost)} weights that {index} promises are in none of its files: {listed(lost)}; get them again"
        )
    extra = sorted(tensors.keys() - weight_map.keys())
    if extra:
        raise CheckpointError(
            f"{tensors[extra[0]].file} holds {len(extra)} weights that {index} does not name: {listed(extra)}; the "
            "files are not of one checkpoint, get them again"
        )
    moved = sorted(name for name, file in weight_map.items() if tensors[name].file != file)
    if moved:
        raise CheckpointError(
            f"{index} says that {moved[0]} is in {weight_map[moved[0]]}, but it is in {tensors[moved[0]].file}; the "
            "files are not of one checkpoint, get them again"
        )


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file: 8 bytes of header length, a JSON header, then the tensors' bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(len(_POINTER_START))
        if size == 0:
            raise CheckpointError(f"{path} is empty; get it again")
        if prefix == _POINTER_START:
            raise CheckpointError(f"{path} is a git-lfs pointer, not the weights; run git lfs pull in {path.parent}")
        length = struct.unpack("<Q", prefix[:8])[0] if len(prefix) >= 8 else 0
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{path} ({size} bytes) is truncated or not a safetensors file; get it again")
        file.seek(8)
        try:
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            tensors = {name: _stored(path.name, entry) for name, entry in entries.items()}
            expected = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            wrong = sorted(name for name, entry in entries.items() if not _size_agrees(entry))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} has a damaged safetensors header; get it again") from error
    if wrong:
        raise CheckpointError(f"{path} has a damaged safetensors header ({listed(wrong)}); get it again")
    if size != expected:
        raise CheckpointError(f"{path} holds {size} bytes where its header promises {expected}; get it again")
    return tensors


def _stored(file: str, entry: dict[str, Any]) -> StoredTensor:
    return StoredTensor(file, str(entry["dtype"]), tuple(int(size) for size in entry["shape"]))


def _size_agrees(entry: dict[str, Any]) -> bool:
    """Whether a tensor's place in the file is as large as its shape; types not known here are left to others."""
    start, stop = entry["data_offsets"]
    each = _TYPE_BYTES.get(entry["dtype"])
    return each is None or stop - start == each * math.prod(entry["shape"])
