"""Checks safetensors files by their headers, so that a broken download is named before minutes of loading."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from longgen.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format


def reason(error: BaseException) -> str:
    """A library's error in one line of at most 300 characters, for the end of a message of ours."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def shard_files(folder: Path) -> list[Path]:
    """The weight files of a folder, in the order of its index.

    Raises:
        CheckpointError: there are none, or the index is unreadable or names a file that is not there.
    """
    index = folder / INDEX_NAME
    if not index.is_file():
        single = folder / SINGLE_NAME
        if not single.is_file():
            raise CheckpointError(f"{folder} has no weights: neither {SINGLE_NAME} nor {INDEX_NAME}")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {reason(error)}") from error
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{len(absent)} of the {len(names)} weight files that {index} names are not there: {', '.join(absent[:4])}"
        )
    return [folder / name for name in names]


def check_shards(folder: Path) -> None:
    """Raises CheckpointError, naming the file, if a weight file is missing, truncated or not safetensors."""
    held: set[str] = set()
    for path in shard_files(folder):
        held |= _check_shard(path)
    index = folder / INDEX_NAME
    if index.is_file():
        promised = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        lost = sorted(promised - held)
        if lost:
            raise CheckpointError(
                f"{len(lost)} weights that {index} promises are in none of its files: {', '.join(lost[:4])}"
            )


def _check_shard(path: Path) -> set[str]:
    """The tensor names of a safetensors file: 8 bytes of header length, a JSON header, then the tensors' bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{path} ({size} bytes) is truncated or not a safetensors file; get it again")
        try:
            header = json.loads(file.read(length))
            tensors = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
            expected = 8 + length + max(tensors.values(), default=0)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} has a damaged safetensors header; get it again") from error
    if size != expected:
        raise CheckpointError(f"{path} holds {size} bytes where its header promises {expected}; get it again")
    return set(tensors)
