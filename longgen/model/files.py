"""JSON files of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longgen.errors import CheckpointError
from longgen.model.shards import reason


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises CheckpointError if it cannot be read or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise CheckpointError(f"{path} cannot be read: its lists and objects are nested too deep") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content
