"""Plain solvers for RULER's tasks, which read nothing but the prompt."""

from __future__ import annotations

import re
from collections import Counter

_NEEDLE = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")


def needles(prompt: str) -> list[tuple[str, str]]:
    """Key and value of every needle, in their order."""
    return [(key, value) for _, key, value in _NEEDLE.findall(prompt)]


def solve_niah(prompt: str) -> set[str]:
    """The values of the keys that the last line asks for."""
    asked = re.split(r", and |, ", prompt.rpartition(" for ")[2].partition(" mentioned in")[0])
    return {value for key, value in needles(prompt) if key in asked}


def solve_tracking(prompt: str) -> list[str]:
    """The variables that have the value that is asked for, in the order in which they get it."""
    text = prompt.rpartition("Memorize and track")[2]
    wanted = re.findall(r"assigned the value (\d+) in", text)[-1]
    values: dict[str, str] = {}
    for name, right in re.findall(r"^VAR (\w+) = (?:VAR )?(\w+) ?$", text, re.MULTILINE):
        values[name] = values.get(right, right)
    return [name for name, value in values.items() if value == wanted]


def solve_common(prompt: str) -> set[str]:
    """The ten most frequent words of the last list; no eleventh may be as frequent."""
    entries = re.findall(r"(\d+)\. (\S+)", prompt.rpartition("Below is a numbered list")[2])
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    ranking = Counter(word for _, word in entries).most_common()
    assert ranking[9][1] > ranking[10][1]
    return {word for word, _ in ranking[:10]}


def solve_frequent(prompt: str) -> list[str]:
    """The three most frequent coded words, from the most frequent; no two of four may be equally frequent."""
    text = prompt.partition("coded words. ")[2].rpartition("\nQuestion")[0]
    ranking = Counter(word for word in text.split() if word != "...").most_common()
    assert len({count for _, count in ranking[:4]}) == 4
    return [word for word, _ in ranking[:3]]
