"""Scores as a table and as a heat map."""

from __future__ import annotations

from pathlib import Path

import pytest

from longgen.errors import LongGenError, UsageError
from longgen.evaluation.score_grid import check_plot, draw, table
from longgen.units import show_length

SCORES = {(1024, 0.0): 1.0, (1024, 1.0): 0.5, (65536, 1.0): 0.0, (65536, 0.0): None}


def test_the_table_has_a_column_for_each_length_and_a_row_for_each_depth() -> None:
    assert [line.split() for line in table(SCORES).splitlines()] == [
        ["depth", "1,024", "65,536"],
        ["0%", "100", "failed"],
        ["100%", "50", "0"],
        ["mean", "75", "failed"],
    ]


def test_the_heat_map_is_a_png_that_shows_the_scores(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the heat map needs matplotlib")
    from matplotlib.image import imread

    pictures = []
    for name, first in (("right", 1.0), ("wrong", 0.0)):
        path = tmp_path / f"{name}.png"
        draw(path, "a title", {**SCORES, (1024, 0.0): first})
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        pictures.append(imread(path))
    right, wrong = pictures
    changed = (right != wrong).any(axis=-1)
    assert 0.05 < changed.mean() < 0.3  # one cell of four
    assert (right[changed].mean(axis=0)[1] > right[changed].mean(axis=0)[0]).all()  # green
    assert (wrong[changed].mean(axis=0)[0] > wrong[changed].mean(axis=0)[1]).all()  # red


def test_a_heat_map_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the heat map needs matplotlib")
    check_plot(tmp_path / "a.png")
    for path in (tmp_path / "a.pdf", tmp_path / "nowhere" / "a.png"):
        with pytest.raises(UsageError, match=path.name):
            check_plot(path)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UsageError, match="cannot be written: Is a directory"):  # before anything is answered
        check_plot(tmp_path / "folder.png")
    with pytest.raises(LongGenError, match="cannot be written"):
        draw(tmp_path / "folder.png", "a title", SCORES)


def test_lengths_are_written_as_people_write_them() -> None:
    assert [show_length(n) for n in (1024, 65536, 1 << 20, 1000, 1536)] == ["1K", "64K", "1M", "1,000", "1,536"]
