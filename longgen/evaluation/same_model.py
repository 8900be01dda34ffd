"""Whether scores that are there are those of the model that is asked for."""

from __future__ import annotations

import os
from pathlib import Path

from longgen.errors import UsageError
from longgen.names import checkpoint_name
from longgen.run.results import read_line


def check_same_model(results: Path, model: str) -> None:
    """Raises UsageError if a file of results, if there is one, holds answers of another model than `model`.

    A folder is the same under any path. Lines that are no results are passed over: who resumes the file refuses them.
    """
    if not results.is_file():
        return
    with open(results, "rb") as file:
        for number, line in enumerate(file, 1):
            written = read_line(line, "jsonl")
            other = (written.settings or {}).get("model") if written is not None else None
            if other is not None and not _same(str(other), model):
                raise UsageError(
                    f"{results} line {number} has an answer of the model {other}, and this run is of {model}; give the "
                    "results of this model a place of their own, or --overwrite to replace those"
                )


def _same(one: str, other: str) -> bool:
    one, other = checkpoint_name(one), checkpoint_name(other)
    return one == other or (os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other))
