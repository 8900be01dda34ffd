"""RULER's tasks: published templates and budgets, answers that a plain solver finds too, lengths that are kept."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from longgen.errors import UsageError
from longgen.model.tokenizer import TextTokenizer
from tests.checkpoints import Build
from tests.ruler.solving import needles, solve_common, solve_frequent, solve_niah, solve_tracking

SCRIPTS = Path(__file__).parents[2] / "scripts"
NIAH = {  # haystack, needles, outputs
    "niah_single_1": ("noise", 1, 1),
    "niah_single_2": ("essay", 1, 1),
    "niah_single_3": ("essay", 1, 1),
    "niah_multikey_1": ("essay", 4, 1),
    "niah_multikey_2": ("needle", None, 1),
    "niah_multikey_3": ("needle", None, 1),
    "niah_multivalue": ("essay", 4, 4),
    "niah_multiquery": ("essay", 4, 4),
}
BUDGETS = {**dict.fromkeys(NIAH, 128), "vt": 30, "cwe": 120, "fwe": 50}
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
ESSAY = "It was late. Nobody knew why the lamp was lit! Was it the wind? Someone had been there before us. " * 30
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, build: Build) -> Any:
    """make(name, length, ...) -> records of a task, counted by the tiny checkpoint's tokenizer."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    tasks, records = importlib.import_module("ruler.tasks"), importlib.import_module("ruler.records")
    tokenizer = TextTokenizer.load(build("qwen3"))

    def made(
        name: str, length: int = 8192, *, samples: int = 2, seed: int = 42, chat: bool = False, essay: str = ""
    ) -> list[dict[str, Any]]:
        task = tasks.make_task(name, length, essay.split(), lambda text: len(tokenizer.encode(text, chat=False)))
        return list(records.make_records(tokenizer, chat, name, task, length, samples, seed))

    return made


@pytest.mark.parametrize("name", NIAH)
@pytest.mark.parametrize("essay", ["", ESSAY])
def test_needles_are_those_that_are_asked_for(make: Any, name: str, essay: str) -> None:
    haystack, hidden, answers = NIAH[name]
    if not essay and name == "niah_single_2":
        pytest.skip("without an essay it is niah_single_1")
    for record in make(name, essay=essay):
        found = needles(record["input"])
        assert len(found) == hidden or (hidden is None and len(found) > 50)
        assert solve_niah(record["input"]) == set(record["outputs"]) and len(set(record["outputs"])) == answers
        assert record["haystack"] == (haystack if essay or haystack == "needle" else "noise")
        uuids = name in ("niah_single_3", "niah_multikey_3")
        assert all(bool(UUID.fullmatch(value)) == uuids for value in record["outputs"])
        assert all(uuids or re.fullmatch(r"[1-9]\d{6}", value) for value in record["outputs"])


def test_values_of_several_queries_come_in_the_order_of_the_question(make: Any) -> None:
    (record,) = make("niah_multiquery", samples=1)
    values = dict(needles(record["input"]))
    asked = re.split(r", and |, ", record["answer_prefix"].partition(" for ")[2].partition(" mentioned")[0])
    assert [values[key] for key in asked] == record["outputs"]


@pytest.mark.parametrize("length", [2048, 8192])
def test_the_outputs_of_the_other_tasks_are_what_a_solver_finds(make: Any, length: int) -> None:
    for record in make("vt", length):
        assert solve_tracking(record["input"]) == record["outputs"] and len(record["outputs"]) == 5
        example = record["input"].partition("\n\nMemorize")[0]
        assert solve_tracking(example) == re.findall(r"they are:  (.*)", example)[0].split()
    for record in make("cwe", length):
        assert solve_common(record["input"]) == set(record["outputs"])
        example = record["input"].rpartition("\nBelow")[0]
        question, _, answer = example.partition(" Answer: The top 10 words that appear most often in the list are: ")
        assert solve_common(question) == set(re.findall(r"\d+\. (\S+)", answer))
    for record in make("fwe", length):
        assert solve_frequent(record["input"]) == record["outputs"]


def test_common_words_are_repeated_as_published(make: Any) -> None:
    for length, common, others in ((2048, 6, 1), (8192, 30, 3)):
        (record,) = make("cwe", length, samples=1)
        words = re.findall(r"\d+\. (\S+)", record["input"].rpartition("Below")[2])
        assert {words.count(word) for word in record["outputs"]} == {common}
        assert {words.count(word) for word in words if word not in record["outputs"]} == {others}


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize("chat", [False, True])
def test_the_length_counts_the_budget_and_is_kept(make: Any, build: Build, name: str, chat: bool) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(build("qwen3"))
    for record in make(name, 8000, chat=chat, essay=ESSAY):
        assert record["max_new_tokens"] == BUDGETS[name]
        raw = tokenizer(record["input"] + record["answer_prefix"])["input_ids"]
        assert record["length"] == len(raw) + BUDGETS[name]
        whole = raw
        if chat:
            message = [{"role": "user", "content": record["input"]}]
            text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            whole = tokenizer(text + record["answer_prefix"])["input_ids"]
            assert len(whole) > len(raw)
        assert record["length_w_model_temp"] == len(whole) + BUDGETS[name] <= 8000
        sentence = len(tokenizer(f"{NOISE}\n")["input_ids"])
        assert 8000 - record["length_w_model_temp"] <= 3 * sentence  # the most that one more unit of a task takes


def test_prompts_are_those_that_are_published(make: Any) -> None:
    (record,) = make("niah_single_1", samples=1)
    key = needles(record["input"])[0][0]
    head = (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards.\n"
    )
    assert record["input"].startswith(head)
    lines = record["input"].removeprefix(head).splitlines()
    assert lines[-1] == f"What is the special magic number for {key} mentioned in the provided text?"
    assert {line for line in lines[:-1] if not line.startswith("One of the special magic numbers for ")} == {NOISE}
    assert record["answer_prefix"] == f" The special magic number for {key} mentioned in the provided text is"
    (record,) = make("niah_multivalue", samples=1)
    key = needles(record["input"])[0][0]
    assert record["input"].startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the numbers afterwards.\n"
    )
    assert record["input"].endswith(
        f"\nWhat are all the special magic numbers for {key} mentioned in the provided text?"
    )
    assert record["answer_prefix"] == f" The special magic numbers for {key} mentioned in the provided text are"
    (record,) = make("vt", samples=1)
    value = re.findall(r"assigned the value (\d+)", record["input"])[-1]
    opening = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    assert record["input"].startswith(opening) and record["input"].count(opening) == 2
    assert record["input"].endswith(
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
    )
    assert record["answer_prefix"] == (
        " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are assigned the "
        f"value {value}, they are: "
    )
    (record,) = make("fwe", samples=1)
    assert record["input"].endswith(
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text?"
    )


def test_samples_follow_from_the_seed(make: Any) -> None:
    for name in ("niah_multikey_2", "vt", "cwe", "fwe"):
        first = make(name)
        assert first == make(name)
        assert first[0]["input"] != first[1]["input"]
        assert all(a["outputs"] != b["outputs"] for a, b in zip(first, make(name, seed=1), strict=True))
    assert make("vt", samples=1) == make("vt", samples=2)[:1]


def test_needles_stand_anywhere(make: Any) -> None:
    places = [r["input"].index("One of the special") / len(r["input"]) for r in make("niah_single_1", 4000, samples=20)]
    assert min(places) < 0.25 and max(places) > 0.75


def test_tasks_that_do_not_fit_or_are_not_there_are_refused(make: Any) -> None:
    with pytest.raises(
        UsageError, match=r"1,000 tokens are too few for cwe, 120 of them for the answer: [0-9,]+ tokens"
    ):
        make("cwe", 1000)
    with pytest.raises(UsageError, match="no task 'qa_1'; there are niah_single_1, "):
        make("qa_1")
    with pytest.raises(UsageError, match="needs --essay"):
        make("niah_single_2")
