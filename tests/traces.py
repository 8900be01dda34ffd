"""Traces, read as a test needs them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


def ranges(path: Path) -> list[str]:
    """Names of all ranges of a trace that the program itself made, in the order of time."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text(encoding="utf-8")
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    ours = [event for event in events if event.get("cat") == "user_annotation"]
    return [str(event["name"]) for event in sorted(ours, key=lambda event: event["ts"])]
