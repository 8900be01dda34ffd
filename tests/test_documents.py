"""README.md and docs/ name the options, files and modules that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from longgen.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "configs").glob("*.yaml"))]


def _options(*names: str) -> set[str]:
    """The flags of a command; --no-x counts as --x."""
    command = typer.main.get_command(app)
    for name in names:
        command = command.commands[name]  # type: ignore[attr-defined]
    flags = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    return {flag.replace("--no-", "--") for flag in flags if flag.startswith("--")}


def _in_table(page: str, heading: str) -> set[str]:
    section = (ROOT / page).read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.replace("\\|", "/") for line in section.splitlines() if line.startswith("| `--")]
    flags = {flag for row in rows for flag in re.findall(r"--[a-z0-9-]+", row.split("|")[1])}
    return {flag.replace("--no-", "--") for flag in flags}


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("README.md", ("run",)),
        ("README.md", ("plan",)),
        ("README.md", ("bench",)),
        ("docs/evaluation.md", ("eval", "needle")),
    ],
)
def test_tables_of_options_are_complete(page: str, names: tuple[str, ...]) -> None:
    assert _in_table(page, f"`longgen {' '.join(names)}`") == _options(*names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_documents_name_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(
        re.findall(
            r"(?<![\w./-])(?:longgen|scripts|tests|docs|configs|examples)/[\w./-]+\.(?:py|sh|md|yaml|txt)\b", text
        )
    )
    named |= {
        str(Path(module.replace(".", "/") + ".py")) for module in re.findall(r"from (longgen[\w.]*) import", text)
    }
    assert [
        name for name in sorted(named) if not (ROOT / name).exists() and not (ROOT / name).with_suffix("").is_dir()
    ] == []
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_design_lists_every_module() -> None:
    parts = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split("## The seam")[0]
    for table in re.split(r"\n\n(?=\| )", parts)[1:]:
        head, *rows = [line for line in table.splitlines() if line.startswith("| ")]
        folder = ROOT / "longgen" / (match[1] if (match := re.match(r"\| in `(\w+)/`", head)) else "")
        listed = {name.rstrip("/") for row in rows for name in re.findall(r"`([\w./]+)`", row.split("|")[1])}
        there = {p.name for p in folder.iterdir() if p.suffix == ".py" or p.is_dir()} - {"__init__.py", "__pycache__"}
        assert listed == there, folder
