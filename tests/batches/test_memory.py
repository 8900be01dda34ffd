"""Thousands of long records: their texts are not kept."""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path

import pytest

from longgen.config import Settings
from longgen.run.batch import run
from longgen.run.records import RequestFiles
from tests.batches.running import as_lines, write_records

SIZE = 200_000
COUNT = 60


def _peak(model: Path, prompts: Path, settings: Settings) -> tuple[int, int]:
    """Bytes that Python held at most in a run, and how many records failed."""
    out = io.BytesIO()
    tracemalloc.start()
    try:
        run(str(model), RequestFiles([str(prompts)], None), settings, out, io.StringIO())
        return tracemalloc.get_traced_memory()[1], sum(
            line["error"] is not None for line in as_lines(out.getvalue().decode())
        )
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("own", [{}, {"top_k": "x"}])
def test_records_that_fail_leave_neither_text_nor_tokens(tiny: Path, tmp_path: Path, own: dict[str, str]) -> None:
    records = [{"id": n, "prompt": "the dog " * (SIZE // 8), **own} for n in range(COUNT)]
    one = write_records(tmp_path / "one.jsonl", records[:1])
    many = write_records(tmp_path / "many.jsonl", records)
    settings = Settings(max_len=200, output_format="jsonl", device="cpu")
    _peak(tiny, one, settings)  # what is made once
    alone, _ = _peak(tiny, one, settings)
    together, failed = _peak(tiny, many, settings)
    assert failed == COUNT
    assert together - alone < COUNT * SIZE / 10
