"""Needle prompts: exact lengths, depths, answers, seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from longgen.errors import UsageError
from longgen.evaluation.haystack import Kind, NeedlePrompt, even_depths, make_prompts
from longgen.evaluation.needle import Needle
from longgen.model.checkpoint import resolve_checkpoint
from longgen.model.tokenizer import TextTokenizer
from tests.checkpoints import Build

LENGTHS = (640, 777, 3001)


@pytest.fixture(scope="module", params=["tiny", "demo"])
def folder(request: pytest.FixtureRequest, build: Build) -> Path:
    return build("qwen3") if request.param == "tiny" else resolve_checkpoint("demo")


def _prompts(folder: Path, kind: Kind, chat: bool = False, seed: int = 0) -> list[NeedlePrompt]:
    return list(make_prompts(TextTokenizer.load(folder), chat, kind, LENGTHS, even_depths(4), seed))


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_has_exactly_the_tokens_asked_for_as_transformers_counts_them(
    folder: Path, kind: Kind, chat: bool
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    prompts = _prompts(folder, kind, chat)
    assert [prompt.wanted for prompt in prompts] == [length for length in LENGTHS for _ in range(4)]
    for prompt in prompts:
        if chat:
            message = [{"role": "user", "content": prompt.input}]
            ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
        else:
            ids = tokenizer(prompt.input)["input_ids"]
        assert len(ids) == prompt.length == prompt.wanted


@pytest.mark.parametrize("kind", list(Kind))
def test_the_needle_stands_at_its_depth_in_tokens_too(folder: Path, kind: Kind) -> None:
    tokenizer = TextTokenizer.load(folder)
    for prompt in _prompts(folder, kind):
        sentence = _needle(prompt).text
        assert prompt.input.count(sentence) == 1
        filler = len(tokenizer.encode(prompt.input.partition(sentence)[0].partition("\n")[2], chat=False))
        rest = len(tokenizer.encode(prompt.input.partition(sentence)[2].rpartition("\n")[0], chat=False))
        longest = 120 + 3 * len(sentence)  # a sentence of filler, and the other needles; no more than a token each
        assert abs(filler - prompt.depth * (filler + rest)) <= longest


def test_depths_are_even_and_both_ends_are_among_them() -> None:
    assert even_depths(5) == [0, 0.25, 0.5, 0.75, 1]
    assert even_depths(1) == [0.5]


@pytest.mark.parametrize("kind", list(Kind))
def test_the_prompt_asks_for_its_output_and_does_not_give_it_away(folder: Path, kind: Kind) -> None:
    for prompt in _prompts(folder, kind):
        needle = _needle(prompt)
        assert prompt.input.endswith("\n" + needle.question)
        assert prompt.outputs[0] not in needle.question
        hidden = prompt.input.count("One of the special magic numbers for ")
        assert hidden == {Kind.passkey: 0, Kind.magic: 1, Kind.multi: 4}[kind]


def test_prompts_follow_from_the_seed(folder: Path) -> None:
    assert _prompts(folder, Kind.multi) == _prompts(folder, Kind.multi)
    first, other = _prompts(folder, Kind.multi), _prompts(folder, Kind.multi, seed=1)
    assert all(a.outputs != b.outputs and a.input != b.input for a, b in zip(first, other, strict=True))
    assert len({prompt.outputs for prompt in first}) == len(first)
    plain, different = _prompts(folder, Kind.passkey)[-1], _prompts(folder, Kind.passkey, seed=1)[-1]
    filler = [prompt.input.splitlines()[1][:100] for prompt in (plain, different)]  # its needle stands at the end
    assert filler[0] != filler[1]


def test_a_length_without_room_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"a length of 64 is too short for the needles: [0-9]+ tokens at the smallest"):
        list(make_prompts(TextTokenizer.load(folder), False, Kind.multi, [64], [0.5], 0))


def _needle(prompt: NeedlePrompt) -> Needle:
    """The needle that the prompt's last line asks for."""
    question = prompt.input.rpartition("\n")[2]
    key = "" if prompt.kind is Kind.passkey else question.partition("number for ")[2].partition(" mentioned")[0]
    return Needle(prompt.kind.template, prompt.outputs[0], key)
