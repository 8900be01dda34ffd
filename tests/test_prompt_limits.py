"""What is refused of prompts and checkpoints, and what happens at the limits, through the command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.batches.running import Result, batch, read_lines, run
from tests.checkpoints import Build
from tests.test_prompts import TEXT, answer, as_text

Edit = Callable[[dict[str, Any]], Any]


def ask(folder: Path, model: Path, prompt: Path | str, *flags: str) -> Result:
    """Answers a prompt, which is a text written here if it is not a file."""
    if isinstance(prompt, str):
        (folder / "prompt.txt").write_text(prompt)
        prompt = folder / "prompt.txt"
    return run(folder / "run", *batch(model, prompt, *flags))


def refusal(done: Result) -> str:
    """The one line that a run which was refused says."""
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done.err
    return done.err


def edited(folder: Path, copied: Path, edit: Edit) -> Path:
    """A checkpoint whose config.json `edit` has changed."""
    shutil.copytree(folder, copied)
    config = json.loads((copied / "config.json").read_text())
    edit(config)
    (copied / "config.json").write_text(json.dumps(config))
    return copied


@pytest.fixture
def narrow(build: Build) -> Path:
    """A window of 64 tokens."""
    return build("qwen3", max_position=64)


@pytest.fixture
def own(build: Build, tmp_path: Path) -> Path:
    """A window of 64 tokens that YaRN of its own makes 256, with fields of its own."""
    fields = {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.25}
    return edited(
        build("qwen3", yarn=True, max_position=256), tmp_path / "own", lambda c: c["rope_parameters"].update(fields)
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b"\xff\xfea\0\0\xd8b\0",
            "is not UTF-16: byte 0x00 at offset 4; correct it, or give --encoding-errors replace",
        ),
        (b"\xff\xfea\0b", "is not UTF-16: byte 0x62 at offset 4; correct it, or give --encoding-errors replace"),
        (b"\xfe\xff\0a\xdc\0", "is not UTF-16: byte 0xdc at offset 4; correct it, or give --encoding-errors replace"),
        ("\ufefftext".encode("utf-32-le"), "is UTF-32; write it as UTF-8 or UTF-16"),
        (b"\xef\xbb\xbf", "is empty; it must hold at least one character"),
        (b"\xff\xfe", "is empty; it must hold at least one character"),
        (b"\xfe\xff", "is empty; it must hold at least one character"),
    ],
)
def test_files_that_are_no_text_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(data)
    assert refusal(ask(tmp_path, tmp_path / "nowhere", path)) == f"longgen: error: the prompt {path} {message}\n"


def test_a_nul_in_utf16_is_a_prompt_and_so_is_a_file_whose_name_is_no_text(build: Build, tmp_path: Path) -> None:
    (tmp_path / "nul.txt").write_bytes(b"\xff\xfe\0\0")
    strange = tmp_path / "bad\udcff.txt"
    strange.write_bytes(b"\0")
    prompts = [tmp_path / "nul.txt", strange]
    done = run(tmp_path / "run", *batch(build("qwen3"), prompts, "--raw", "--max-new-tokens", "4"))
    expected = answer(build("qwen3"), as_text(build("qwen3"), "\0"), 4)
    assert (done.code, done.out) == (0, f"{expected}\n" * 2)
    sampled = batch(build("qwen3"), strange, "--raw", "--max-new-tokens", "4", "--temperature", "1", "--output-format")
    assert run(tmp_path / "sampled", *sampled, "jsonl").lines[0]["id"] == "bad\udcff.txt"


def test_jsonl_in_utf16_is_read_as_text_in_utf16_is(build: Build, tmp_path: Path) -> None:
    text = '{"id": 1, "prompt": "one\\n\u0a0a"}\n{"id": 2, "prompt": "two \u010a\u0a00"}\n'
    preds = []
    for name, encoding in (("utf8", "utf-8"), ("signed", "utf-8-sig"), ("little", "utf-16-le"), ("big", "utf-16-be")):
        sign = "\ufeff".encode(encoding) if "16" in encoding else b""
        (tmp_path / f"{name}.jsonl").write_bytes(sign + text.encode(encoding))
        done = ask(tmp_path, build("qwen3"), tmp_path / f"{name}.jsonl", "--raw", "--max-new-tokens", "4")
        assert done.code == 0, done.err
        preds.append([(line["id"], line["pred"], line["prompt_hash"]) for line in done.lines])
    assert preds[0] == preds[1] == preds[2] == preds[3]
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b"\xff\xfe" + text.encode("utf-16-le") + b"\0\xdc\n\0")
    assert f"{bad} line 3 is not UTF-16: byte 0x00 at offset {2 + 2 * len(text)}, 0 of the line;" in refusal(
        ask(tmp_path, tmp_path / "nowhere", bad)
    )


def test_replacing_covers_half_a_character_in_a_record(build: Build, tmp_path: Path) -> None:
    path = tmp_path / "half.jsonl"
    path.write_text('{"prompt": "x\\ud83d"}\n')
    strict = ask(tmp_path, build("qwen3"), path, "--raw", "--max-new-tokens", "2")
    assert strict.code == 1 and "half a character" in strict.lines[0]["error"]
    replaced = ask(tmp_path, build("qwen3"), path, "--raw", "--max-new-tokens", "2", "--encoding-errors", "replace")
    assert replaced.code == 0
    assert replaced.lines[0]["pred"] == answer(build("qwen3"), as_text(build("qwen3"), "x\ufffd"), 2)


YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def yarn_without(*names: str, **others: Any) -> Edit:
    settings = {name: value for name, value in YARN.items() if name not in names}
    return lambda config: config["rope_parameters"].update(settings | others)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (yarn_without("factor"), "rope_parameters in config.json asks for YaRN without factor\n"),
        (
            yarn_without("original_max_position_embeddings"),
            "rope_parameters in config.json asks for YaRN without original_max_position_embeddings\n",
        ),
        (yarn_without(original_max_position_embeddings=0.5), "original_max_position_embeddings is 0.5 in config.json;"),
        (yarn_without(factor=1e308), "factor is 1e+308 in config.json's rotary settings; it must be a number above"),
        (yarn_without(rope_type="default", type="yran"), "names two types, default and yran; give one\n"),
        (yarn_without(rope_type="YARN"), "rope type 'YARN' is not supported; supported are default, linear, yarn\n"),
        (
            lambda config: config.update(rope=YARN),
            "rope in config.json is not a setting; rotary settings go into rope_",
        ),
        (lambda config: config.update(rope_scaling=YARN), "rope_scaling and rope_parameters in config.json differ;"),
        (lambda config: config.update(rope_type="yarn", factor=4.0), "rope_type in config.json is not a setting;"),
    ],
)
def test_yarn_that_is_misspelt_incomplete_or_misplaced_is_refused(
    narrow: Path, tmp_path: Path, edit: Edit, message: str
) -> None:
    assert message in refusal(ask(tmp_path, edited(narrow, tmp_path / "copy", edit), "text"))


def test_rotary_settings_beside_the_text_config_are_refused(build: Build, tmp_path: Path) -> None:
    model = edited(build("qwen3_5"), tmp_path / "copy", lambda config: config.update(rope_scaling=YARN))
    expected = "longgen: error: rope_scaling in config.json stands beside text_config; it belongs inside\n"
    assert refusal(ask(tmp_path, model, "text")) == expected


def test_a_checkpoints_own_yarn_is_kept_within_its_window_and_stretched_beyond(own: Path, tmp_path: Path) -> None:
    short, long = TEXT, TEXT * 3
    ids = {text: as_text(own, text) for text in (short, long)}
    total = len(ids[long]) + 5
    assert 64 < len(ids[short]) < 250 and total > 256
    flags = ("--raw", "--max-new-tokens", "5")
    kept = ask(tmp_path, own, short, *flags)
    assert (kept.code, kept.out) == (0, answer(own, ids[short], 5) + "\n")
    assert "window" not in kept.err
    told = ask(tmp_path, own, short, *flags, "--max-len", "4K")
    assert told.out == kept.out
    assert "within the trained window of 256; rope: the checkpoint's own YaRN, factor 4 of 64\n" in told.err
    refused = refusal(ask(tmp_path, own, long, *flags))
    assert (
        f"has {len(ids[long])} tokens, with one generated {len(ids[long]) + 1}, which is more than the 256" in refused
    )
    factor = -(-total * 100 // 64) / 100
    stretched = ask(tmp_path, own, long, *flags, "--max-len", "4K")
    assert (stretched.code, stretched.out) == (0, answer(own, ids[long], 5, factor=factor) + "\n")
    how = f"YaRN, factor {factor:.10g} of 64, up to {int(64 * factor)}\n"
    assert f"= {total} tokens, beyond the trained window of 256; rope: {how}" in stretched.err
    none = ask(tmp_path, own, long, *flags, "--max-len", "4K", "--rope", "none")
    assert (none.code, none.out) == (0, answer(own, ids[long], 5) + "\n")
    assert "beyond the trained window of 256; rope: the checkpoint's own YaRN, factor 4 of 64\n" in none.err


def test_a_window_beside_the_settings_counts_as_one_among_them(own: Path, tmp_path: Path) -> None:
    def move(config: dict[str, Any]) -> None:
        name = "original_max_position_embeddings"
        config[name] = config["rope_parameters"].pop(name)

    beside = edited(own, tmp_path / "beside", move)
    for flags in (("--max-new-tokens", "9"), ("--max-new-tokens", "9", "--rope", "none")):
        inside, outside = (
            ask(tmp_path, model, TEXT * 3, "--raw", "--max-len", "8K", *flags) for model in (own, beside)
        )
        assert (outside.code, outside.out) == (0, inside.out)
        assert [line for line in outside.err.splitlines() if "rope" in line] == [
            line for line in inside.err.splitlines() if "beyond the trained window of 256" in line
        ]
    assert "which is more than the 256 that the checkpoint was trained for" in refusal(
        ask(tmp_path, beside, TEXT * 3, "--raw")
    )


def test_a_window_beyond_the_reach_of_its_own_yarn_is_noted(own: Path, tmp_path: Path) -> None:
    model = edited(own, tmp_path / "wide", lambda config: config.update(max_position_embeddings=1_000_000))
    done = ask(tmp_path, model, "text", "--raw", "--max-new-tokens", "2")
    assert done.code == 0
    assert "note: max_position_embeddings is 1,000,000 in config.json, and its YaRN, factor 4 of 64, reaches 256;" in (
        done.err
    )


def test_linear_scaling_is_not_stretched(narrow: Path, tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    model = edited(narrow, tmp_path / "linear", lambda config: config["rope_parameters"].update(linear))
    ids = as_text(model, TEXT)
    flags = ("--raw", "--max-new-tokens", "5", "--max-len", "4K")
    for rope in ("auto", "yarn", "yarn:4"):
        done = ask(tmp_path, model, TEXT, *flags, "--rope", rope)
        assert (done.code, done.out) == (2, "")
        assert f"the request takes {len(ids) + 5:,} tokens, the checkpoint's window is 64 with linear" in done.err
        assert "which YaRN cannot be added to; give --rope none\n" in done.err
    none = ask(tmp_path, model, TEXT, *flags, "--rope", "none")
    assert (none.code, none.out) == (0, answer(model, ids, 5) + "\n")


def cut_ids(ids: Sequence[int], place: str, kept: int) -> list[int]:
    first = {"head": 0, "middle": (kept + 1) // 2, "tail": kept}[place]
    return [*ids[:first], *ids[len(ids) - kept + first :]]


@pytest.mark.parametrize("place", ["head", "middle", "tail"])
def test_a_text_is_cut_to_the_trained_window(narrow: Path, tmp_path: Path, place: str) -> None:
    ids = as_text(narrow, TEXT)
    done = ask(tmp_path, narrow, TEXT, "--raw", "--max-new-tokens", "6", "--truncate", place)
    assert (done.code, done.out) == (0, answer(narrow, cut_ids(ids, place, 58), 6) + "\n")
    assert f"58 prompt tokens ({place} cut: {len(ids) - 58} of the text's {len(ids)} tokens left out)" in done.err
    assert "warning" not in done.err
    line = ask(
        tmp_path, narrow, TEXT, "--raw", "--max-new-tokens", "6", "--truncate", place, "--output-format", "jsonl"
    )
    assert line.lines[0]["pred"] + "\n" == done.out
    assert line.lines[0]["cut"] == {"place": place, "removed": len(ids) - 58, "total": len(ids)}


def test_what_cannot_be_cut_is_refused(narrow: Path, tmp_path: Path) -> None:
    def refused(*flags: str) -> str:
        return refusal(ask(tmp_path, narrow, TEXT, "--truncate", "head", *flags))

    path = tmp_path / "prompt.txt"
    assert refused("--raw") == (
        f"longgen: error: the prompt {path} cannot be cut to the trained window, 64, less --max-new-tokens, 256, "
        "which leaves no room for it; give fewer new tokens\n"
    )
    assert "cannot be cut to --max-len, 100, less --max-new-tokens, 100, which leaves no room" in refused(
        "--raw", "--max-len", "100", "--max-new-tokens", "100"
    )
    assert "less --max-new-tokens, 62: there is room for 2 tokens, of which the template takes" in refused(
        "--chat", "--max-new-tokens", "62"
    )


def test_settings_that_can_only_be_a_mistake_are_refused(build: Build, tmp_path: Path) -> None:
    stop = refusal(ask(tmp_path, build("qwen3"), "text", "--stop", "\udcff"))
    assert stop == "longgen: error: stop: '\\udcff' is no text, so nothing can match; give stop strings in UTF-8\n"
    settings = tmp_path / "settings.yaml"
    for line, hint in (
        ("raw: true", "did you mean chat? (raw: true is chat: false)"),
        ("model: demo", "the nearest is the flag --model; give it on the command line"),
        ("Max-Len: 4K", "did you mean max_len?"),
    ):
        settings.write_text(line)
        error = refusal(ask(tmp_path, build("qwen3"), "text", "--config", str(settings)))
        assert error == f"longgen: error: {settings}: there is no setting {line.partition(':')[0]!r}; {hint}\n"


def test_a_batch_answers_messages_only_if_they_say_something(build: Build, tmp_path: Path) -> None:
    path, out = tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    contents: list[Any] = ["", [], [{"type": "text", "text": ""}], "x"]
    records = [{"messages": [{"role": "user", "content": content}]} for content in contents]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    done = ask(tmp_path, build("qwen3"), path, "--max-new-tokens", "2", "--output", str(out))
    empty = "the messages are empty; one of them must hold at least one character"
    assert done.code == 1
    assert [line["error"] for line in read_lines(out)] == [empty, empty, empty, None]
