"""The script that compares longgen with transformers, on a tiny random checkpoint."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from longgen.allocation import Ticket
from longgen.engine import Engine
from longgen.model.tiny import make_checkpoint
from longgen.model.tokenizer import TextTokenizer

SCRIPTS = Path(__file__).parents[1] / "scripts"
SIZES = ("--prompt-tokens", "150", "--new-tokens", "10", "--needle-tokens", "200", "--depths", "0.1,0.9")
BLOCKS = ("--dtype", "float32", "--device", "cpu", "--block-size", "16", "--chunk-size", "64")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, imported as Python does when it runs the file: its folder comes first on the path."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("compare_with_transformers")


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("prose_prompts")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("compare") / "tiny")


def _run(script: Any, checkpoint: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, Any, str]:
    """Exit code, the JSON of the last line on stdout (None if there is none) and stderr."""
    code = script.main([str(checkpoint), *SIZES, *BLOCKS, *options])
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    return code, json.loads(lines[-1]) if lines else None, captured.err


def test_random_weights_cannot_answer_and_equal_transformers(
    script: Any, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report, table = _run(script, checkpoint, capsys)
    assert code == 0
    assert report["passed"] is True
    assert [result["name"] for result in report["results"]] == ["greedy", "needle at 10%", "needle at 90%"]
    for result in report["results"]:
        assert result["passed"] and result["prompt_ids_equal"] and not result["answered"]
        assert result["comparison"]["equal"] and result["comparison"]["logit_difference"] < 1e-3
        assert result["name"] in table
    greedy = report["results"][0]
    assert greedy["new_tokens"] == greedy["comparison"]["equal_tokens"] == 10
    assert greedy["prompt_tokens"] > 150
    assert report["settings"]["block_size"] == 16 and report["settings"]["chunk_size"] == 64
    assert set(report["versions"]) == {"python", "torch", "transformers", "longgen"}


def test_a_wrong_engine_fails_and_the_first_difference_is_shown(
    script: Any, checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Engine.decode_requests

    def decode_wrongly(engine: Engine, tickets: Sequence[Ticket], tokens: Sequence[int]) -> torch.Tensor:
        return -decode(engine, tickets, tokens)

    monkeypatch.setattr(Engine, "decode_requests", decode_wrongly)
    code, report, table = _run(script, checkpoint, capsys, "--depths", "")
    assert code == 1
    assert report["passed"] is False
    comparison = report["results"][0]["comparison"]
    first = comparison["first_difference"]
    assert comparison["equal_tokens"] == first["step"] == 1
    assert comparison["logit_difference"] > 1
    assert first["longgen"]["top_tokens"][0] != first["transformers"]["top_tokens"][0]
    assert first["transformers"]["margin"] > 0
    assert "FAILED" in table


def test_an_answered_needle_needs_no_transformers(
    script: Any, checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("transformers was run")

    monkeypatch.setattr(script, "transformers_answers", never)
    monkeypatch.setattr(script, "is_answered", lambda prompt, text: True)
    code, report, _ = _run(script, checkpoint, capsys, "--prompt-tokens", "0")
    assert code == 0
    assert [(result["answered"], result["comparison"]) for result in report["results"]] == [(True, None)] * 2


def test_other_prompt_ids_fail_an_answered_needle(
    script: Any, checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "transformers_ids", lambda folder, prompts: [(0,)] * len(prompts))
    monkeypatch.setattr(script, "is_answered", lambda prompt, text: True)
    code, report, table = _run(script, checkpoint, capsys, "--prompt-tokens", "0", "--depths", "0.5")
    assert code == 1
    assert not report["passed"]
    assert "other prompt ids" in table


def test_a_text_too_short_is_a_usage_error(
    script: Any, checkpoint: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = tmp_path / "short.txt"
    text.write_text("One sentence. And another one.", encoding="utf-8")
    code, report, message = _run(script, checkpoint, capsys, "--text", str(text))
    assert (code, report) == (2, None)
    assert "150 are needed" in message and "--text" in message


@pytest.mark.parametrize(
    "options", [["--depths", "1.5"], ["--new-tokens", "0"], ["--prompt-tokens", "0", "--depths", ""]]
)
def test_options_that_make_no_sense_are_refused(script: Any, options: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        script.main(["folder", *options])
    assert exit_.value.code == 2


def test_the_needle_stands_at_its_depth_between_whole_sentences(prompts: Any, checkpoint: Path) -> None:
    tokenizer = TextTokenizer.load(checkpoint)
    prose = prompts.reference_prose()
    made = list(prompts.needle_prompts(tokenizer, prose, 4000, (0.0, 0.1, 0.5, 0.9, 1.0)))
    assert len({prompt.number for prompt in made}) == len(made)
    for prompt, depth in zip(made, (0.0, 0.1, 0.5, 0.9, 1.0), strict=True):
        needle = f"The registration number of the red bicycle is {prompt.number}."
        body, _, question = prompt.text.rpartition("\n\n")
        before, _, after = body.partition(needle)
        assert prompt.text.count(prompt.number) == 1 and len(prompt.number) == 7
        assert question.startswith("What is the registration number")
        assert len(before) / (len(before) + len(after)) == pytest.approx(depth, abs=0.05)
        assert not before or before.rstrip().endswith((".", "!", "?", ")", '"'))
        assert prose.startswith((before.rstrip(" ") + after).lstrip())
        assert 4000 <= len(prompt.ids) < 4600


def test_the_default_text_is_prose_and_long_enough(prompts: Any) -> None:
    prose = prompts.reference_prose()
    assert len(prose) > 130_000  # 24,000 tokens of English are about 120,000 characters
    assert ">>>" not in prose and "::=" not in prose
    assert len(set(prose.split("\n\n"))) == len(prose.split("\n\n"))


@pytest.mark.parametrize(
    ("text", "answered"),
    [("1234567", True), ("It is 1,234,567.", True), ("11234567", False), ("1234568", False), ("", False)],
)
def test_a_number_is_answered_only_as_a_whole(prompts: Any, text: str, answered: bool) -> None:
    assert prompts.is_answered(prompts.Prompt("needle", "", (), "1234567"), text) is answered
    assert not prompts.is_answered(prompts.Prompt("greedy", "", ()), text)
