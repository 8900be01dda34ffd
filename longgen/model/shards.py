"""Checks safetensors files by their headers, so that a broken download is named before minutes of loading."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from longgen.errors import CheckpointError
from longgen.model.files import listed, read_bytes, read_json_object, refuse_pointer
from longgen.units import show_count

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
# Bytes of the types that weights can have here; packed and 8-bit ones belong to quantised checkpoints.
_TYPE_BYTES: Mapping[str, int] = MappingProxyType({"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4})


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file's header describes it. dtype: safetensors' name of the type, such as BF16."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def read_shards(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the weight files that transformers would load from a folder, by name.

    Raises CheckpointError, naming the file, if one is missing, empty, truncated, a git-lfs pointer or not safetensors,
    if a name is stored twice, or if the index and the files do not say the same; and if there are no such files.
    """
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    if single.is_file():  # transformers takes it first, whatever else is there
        return _read_header(single)
    if not index.is_file():
        raise CheckpointError(_without_weights(folder))
    weight_map = _weight_map(index)
    tensors: dict[str, StoredTensor] = {}
    for path in _shard_files(index, weight_map):
        for name, tensor in _read_header(path).items():
            if name in tensors:
                raise CheckpointError(
                    f"{name} is in both {tensors[name].file} and {path.name} of {folder}; the files are not of one "
                    "checkpoint, get them again"
                )
            tensors[name] = tensor
    _check_index(index, weight_map, tensors)
    return tensors


def _shard_files(index: Path, weight_map: Mapping[str, str]) -> list[Path]:
    names = sorted(set(weight_map.values()))
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise CheckpointError(
            f"missing {show_count(len(absent), 'weight file')} of the {len(names)} that {index} names: "
            f"{listed(absent)}; get them again"
        )
    return [index.parent / name for name in names]


def _without_weights(folder: Path) -> str:
    """Why a folder has no weights that can be used, by what it has instead."""
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith(PICKLE_ENDINGS)]
    if pickles:
        return (
            f"{folder} has its weights only as pickles ({listed(pickles)}), which can run any code when they are read; "
            "get or make a safetensors version"
        )
    if SINGLE_NAME in names:
        return f"{folder / SINGLE_NAME} is no file, or a link to one that is not there; get it again"
    without = f"{folder} has no weights: neither {SINGLE_NAME} nor {INDEX_NAME}"
    if shards := [name for name in names if name.endswith(".safetensors")]:
        return f"{without}, which {listed(shards)} would need; get the index too"
    if others := [name for name in names if name.endswith(".gguf")]:
        return f"{without}; {listed(others)} cannot be read here, get the safetensors version"
    return f"{without}; get them"


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor. Raises CheckpointError for what is no index, and for files that are not to be read."""
    content = read_json_object(index)
    weight_map = content.get("weight_map")
    # transformers asks for metadata, whatever is in it.
    if not isinstance(weight_map, dict) or not isinstance(content.get("metadata"), dict):
        raise CheckpointError(f"{index} is not a safetensors index with weight_map and metadata; get it again")
    names = weight_map.values()
    outside = sorted({str(name) for name in names if not isinstance(name, str) or Path(name).name != name})
    if outside:
        raise CheckpointError(f"{index} names files outside its folder: {listed(outside)}; get it again")
    pickles = sorted({name for name in names if name.endswith(PICKLE_ENDINGS)})
    if pickles:
        raise CheckpointError(
            f"{index} names pickles ({listed(pickles)}), which can run any code when they are read; get or make a "
            "safetensors version"
        )
    return weight_map


def _check_index(index: Path, weight_map: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> None:
    lost = sorted(weight_map.keys() - tensors.keys())
    if lost:
        raise CheckpointError(
            f"missing {show_count(len(lost), 'weight')} that {index} promises: {listed(lost)}; get the files again"
        )
    extra = sorted(tensors.keys() - weight_map.keys())
    if extra:
        raise CheckpointError(
            f"{tensors[extra[0]].file} holds {show_count(len(extra), 'weight')} that {index} does not name: "
            f"{listed(extra)}; the files are not of one checkpoint, get them again"
        )
    moved = sorted(name for name, file in weight_map.items() if tensors[name].file != file)
    if moved:
        raise CheckpointError(
            f"{index} says that {moved[0]} is in {weight_map[moved[0]]}, but it is in {tensors[moved[0]].file}; the "
            "files are not of one checkpoint, get them again"
        )


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file: 8 bytes of header length, a JSON header, then the tensors' bytes."""
    refuse_pointer(path)
    start, size = read_bytes(path, 8), path.stat().st_size
    if size == 0:
        raise CheckpointError(f"{path} is empty; get it again")
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(f"{path} ({size} bytes) is truncated or not a safetensors file; get it again")
    try:
        header = json.loads(read_bytes(path, 8 + length)[8:])
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: _stored(path.name, entry) for name, entry in entries.items()}
        wrong = sorted(name for name, entry in entries.items() if not _size_agrees(entry))
        stop = _end_of_data(entries.values())
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has a damaged safetensors header; get it again") from error
    if wrong:
        raise CheckpointError(f"{path} has a damaged safetensors header ({listed(wrong)}); get it again")
    if size != 8 + length + stop:
        raise CheckpointError(f"{path} holds {size} bytes where its header promises {8 + length + stop}; get it again")
    return tensors


def _stored(file: str, entry: dict[str, Any]) -> StoredTensor:
    return StoredTensor(file, str(entry["dtype"]), tuple(int(size) for size in entry["shape"]))


def _size_agrees(entry: dict[str, Any]) -> bool:
    """Whether a tensor's place in the file is as large as its shape; types not known here are left to others."""
    start, stop = entry["data_offsets"]
    each = _TYPE_BYTES.get(entry["dtype"])
    return min(entry["shape"], default=0) >= 0 and (each is None or stop - start == each * math.prod(entry["shape"]))


def _end_of_data(entries: Collection[dict[str, Any]]) -> int:
    """Where the last tensor ends. Raises ValueError unless each begins where another ends, as the format demands."""
    end = 0
    for start, stop in sorted(tuple(entry["data_offsets"]) for entry in entries):
        if start != end or stop < start:
            raise ValueError(f"a tensor begins at {start}, and those before it end at {end}")
        end = stop
    return end
