"""Files of a checkpoint folder, read so that what is wrong with one is a line that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longgen.errors import CheckpointError

_POINTER_START = b"version https://git-lfs"


def hub_cache() -> Path:
    """Where the hub's library keeps what it downloads."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def reason(error: BaseException) -> str:
    """A library's error in one line of at most 300 characters, for the end of a message of ours."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def listed(names: list[str]) -> str:
    """The first few names, for a message."""
    return f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"


def read_bytes(path: Path, most: int = -1) -> bytes:
    """The bytes of a file, the first `most` of them if that is given. Raises CheckpointError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def refuse_pointer(path: Path) -> None:
    """Raises CheckpointError if a file is what git leaves in the place of a large one that was not fetched."""
    if read_bytes(path, len(_POINTER_START)) == _POINTER_START:
        raise CheckpointError(f"{path} is a git-lfs pointer, not the file itself; run git lfs pull in {path.parent}")


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises CheckpointError if it cannot be read or holds something else."""
    refuse_pointer(path)
    try:
        content = json.loads(read_bytes(path))
    except RecursionError as error:
        raise CheckpointError(f"{path} cannot be read: its lists and objects are nested too deep") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {reason(error)}; get it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object; get it again")
    return content
