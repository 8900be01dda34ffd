"""RULER's tasks by their names, with the settings that are published for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

from longgen.errors import UsageError
from longgen.evaluation.scoring import string_match_all, string_match_part
from ruler.counting import CommonWords, FrequentWords
from ruler.niah import Niah
from ruler.sample import Task
from ruler.tracking import VariableTracking, example_size

NIAH = MappingProxyType(
    {
        "niah_single_1": Niah("noise"),
        "niah_single_2": Niah("essay"),
        "niah_single_3": Niah("essay", value="uuids"),
        "niah_multikey_1": Niah("essay", keys=4),
        "niah_multikey_2": Niah("needle"),
        "niah_multikey_3": Niah("needle", key="uuids", value="uuids"),
        "niah_multivalue": Niah("essay", values=4),
        "niah_multiquery": Niah("essay", keys=4, queries=4),
    }
)
OTHERS = ("vt", "cwe", "fwe")
ESSAY_ONLY = frozenset({"niah_single_2"})  # with another haystack it is the same as niah_single_1


def task_names(has_essay: bool) -> list[str]:
    """All tasks, in the order of the paper. Without an essay, those that are nothing of their own are left out."""
    return [name for name in (*NIAH, *OTHERS) if has_essay or name not in ESSAY_ONLY]


def make_task(name: str, length: int, essay: Sequence[str], count: Callable[[str], int]) -> Task:
    """A task at a length, in tokens.

    Args:
        essay: words; empty: noise stands in for essays.
        count: tokens of a text.

    Raises:
        UsageError: there is no such task, or it needs an essay.
    """
    if name not in task_names(bool(essay)):
        hint = "it needs --essay FILE" if name in ESSAY_ONLY else f"there are {', '.join(task_names(bool(essay)))}"
        raise UsageError(f"there is no task {name!r}; {hint}")
    if name == "vt":
        return VariableTracking(example_size(count))
    if name == "cwe":
        return CommonWords(length)
    if name == "fwe":
        return FrequentWords(length)
    task = NIAH[name]
    return replace(task, haystack="noise") if task.haystack == "essay" and not essay else replace(task, essay=essay)


def metric(name: str) -> Callable[[str, Sequence[str]], float]:
    """The score of a task's answers, as published: questions over documents (qa) want one string, all others all."""
    return string_match_part if name.startswith("qa") else string_match_all
