"""Settings: lengths, the order of defaults, file and flags, and what is refused with which words."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from longgen import config
from longgen.config import Settings, load_settings, parse_length, sampling_settings
from longgen.errors import UsageError
from longgen.sampling import SamplingSettings

DEFAULT_YAML = Path(__file__).parents[1] / "configs" / "default.yaml"


def _write(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1", 1),
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("25.6k", 25_600),
        ("0.5k", 500),
        ("0.001k", 1),
        ("1.50k", 1500),
        ("4m", 4_000_000),
        ("4M", 4_194_304),
        ("16M", 16_777_216),
        ("1.5m", 1_500_000),
        ("0.000001m", 1),
    ],
)
def test_lengths(text: str, tokens: int) -> None:
    assert parse_length(text) == tokens


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-1",
        "+1",
        "0k",
        "0.0k",
        "007",
        "1.5",
        "1.5K",
        "2.0K",
        "1.5M",
        "1.2345k",
        "0.0001k",
        ".5k",
        "5.k",
        "4MB",
        "4MiB",
        "4G",
        "4 K",
        " 4K",
        "4K\n",
        "1e3",
        "1_000",
        "1,000",
        "0x10",
        "٤K",
        "k",
        "inf",
        "9" * 5000,
        "010",
        "1_6",
        "True",
        "null",
    ],
)
def test_other_spellings_of_a_length_are_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(UsageError, match="is not a length; write a whole number of tokens above 0"):
        parse_length(text)


def test_the_annotated_file_equals_the_built_in_defaults_and_names_every_setting() -> None:
    written = yaml.safe_load(DEFAULT_YAML.read_text(encoding="utf-8"))
    assert list(written) == [field.name for field in fields(Settings)]
    assert load_settings(DEFAULT_YAML, {}) == Settings() == load_settings(None, {})


def test_every_setting_in_the_annotated_file_has_a_comment_above_it() -> None:
    lines = DEFAULT_YAML.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if line and not line.startswith("#"):
            assert lines[number - 1].startswith("#"), line


def test_every_setting_has_a_parser_that_takes_its_default() -> None:
    assert set(config._PARSERS) == {field.name for field in fields(Settings)}
    for field in fields(Settings):
        if field.default is not None:
            assert config._PARSERS[field.name](str(field.default)) == field.default


def test_flags_come_before_the_file_and_the_file_before_the_defaults(tmp_path: Path) -> None:
    path = _write(tmp_path, "max_len: 4K\nmax_new_tokens: 7\n")
    settings = load_settings(path, {"max_len": "8K", "seed": None})
    assert settings == Settings(max_len=8192, max_new_tokens=7)


def test_a_flag_that_is_false_or_zero_counts_as_given(tmp_path: Path) -> None:
    path = _write(tmp_path, "chat: true\nresident_blocks: 3\ntemperature: 0.5\n")
    settings = load_settings(path, {"chat": False, "resident_blocks": "0", "temperature": "0.0"})
    assert (settings.chat, settings.resident_blocks, settings.temperature) == (False, 0, 0.0)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("max_new_tokens", "010"),
        ("block_size", "1_6"),
        ("block_size", "0x10"),
        ("max_len", "1e3"),
        ("seed", "1_0"),
        ("seed", "+1"),
        ("seed", "9" * 30),
        ("top_k", "1:30"),
        ("temperature", "1_0.5"),
        ("temperature", "1e999"),
        ("temperature", ".inf"),
        ("top_p", "٠.٩"),
        ("chat", "yes"),
        ("dtype", "Float32"),
    ],
)
def test_what_a_flag_refuses_a_file_refuses_in_the_same_words(tmp_path: Path, name: str, text: str) -> None:
    path = _write(tmp_path, f"{name}: {text}")
    with pytest.raises(UsageError) as from_flag:
        load_settings(None, {name: text})
    with pytest.raises(UsageError) as from_file:
        load_settings(path, {})
    assert str(from_file.value) == f"{path}: {from_flag.value}"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "1e-1", 0.1),
        ("temperature", "1", 1.0),
        ("top_p", ".9", 0.9),
        ("min_p", "5E-2", 0.05),
        ("seed", "0", 0),
        ("seed", str(2**63 - 1), 2**63 - 1),
        ("max_len", "4M", 4_194_304),
        ("chat", "True", True),
    ],
)
def test_what_a_flag_takes_a_file_takes_alike(tmp_path: Path, name: str, text: str, value: object) -> None:
    for settings in (load_settings(None, {name: text}), load_settings(_write(tmp_path, f"{name}: {text}"), {})):
        assert getattr(settings, name) == value
    assert load_settings(_write(tmp_path, f"{name}: '{text}'"), {}) == settings


def test_a_null_in_the_file_is_the_default_where_that_is_none(tmp_path: Path) -> None:
    assert load_settings(_write(tmp_path, "max_len: null\nchat: ~\ntop_k:\n"), {}) == Settings()
    with pytest.raises(UsageError, match="max_len: 'null' is not a length"):
        load_settings(_write(tmp_path, "max_len: 'null'"), {})


def test_an_empty_file_is_no_setting(tmp_path: Path) -> None:
    assert load_settings(_write(tmp_path, "# nothing\n"), {}) == Settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_length: 4K", r"settings.yaml: there is no setting 'max_length'; did you mean max_len\?"),
        ("chunk-size: 4K", r"did you mean chunk_size\?"),
        ("raw: true", r"there is no setting 'raw'; did you mean chat\? \(raw: true is chat: false\)"),
        ("model: demo", "there is no setting 'model'; the nearest is the flag --model; give it on the command"),
        ("prompt: a.txt", "there is no setting 'prompt'; the nearest is the flag --prompt; give it on the command"),
        ('stop: "a\\udcff"', r"stop: 'a\\udcff' is no text, so nothing can match; give stop strings in UTF-8"),
        ("qqqq: 1", "there are max_len, max_new_tokens"),
        ("1: 2", "there is no setting '1'"),
        ("max_len: 4MB", "settings.yaml: max_len: '4MB' is not a length"),
        ("max_new_tokens: null", "max_new_tokens: 'null' is not a length"),
        ("max_len: 1.5", "max_len: '1.5' is not a length"),
        ("max_len: [4K]", "max_len: a sequence is not allowed; give one value"),
        ("? [max_len]\n: 4K", "has a sequence for a name at line 1"),
        ("dtype: int8", "dtype: 'int8' is not allowed; it must be one of auto, bfloat16, float16, float32"),
        ("device: gpu", "device: 'gpu' is not allowed; it must be one of auto, cpu, cuda, cuda:N"),
        ("device: 'cuda:x'", "device: "),
        ("sampling: maybe", "sampling: "),
        ("chat: 1", "chat: '1' is not allowed; it must be true or false"),
        ("seed: 9223372036854775808", "seed: 9223372036854775808 is more than 9,223,372,036,854,775,807, the most"),
        (f"seed: {'9' * 5000}", f"seed: {'9' * 80} is more than 9,223,372,036,854,775,807, the most"),
        ("resident_blocks: -1", "resident_blocks: '-1' is not allowed; it must be a whole number, 0 or more"),
        ("resident_blocks: true", "resident_blocks: "),
        ("top_k: 1.5", "top_k: "),
        ("temperature: warm", "temperature: 'warm' is not a number"),
        ("temperature: .nan", "temperature: '.nan' is not a number"),
        ("seed: 1\nmax_len: 4K\nseed: 2", "settings.yaml sets seed more than once"),
        ("- max_len", "must hold lines of 'name: value', not a sequence"),
        ("max_len: [", "is not YAML at line "),
        ("seed: \0", "is not YAML: unacceptable character"),
        ("[" * 5000, "is nested too deep"),
    ],
)
def test_a_wrong_file_is_one_usage_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load_settings(_write(tmp_path, text), {})
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_or_not_utf8_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.yaml cannot be read: No such file"):
        load_settings(tmp_path / "nowhere.yaml", {})
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"seed: 1 # caf\xe9")
    with pytest.raises(UsageError, match="is not UTF-8 at byte 13"):
        load_settings(path, {})


def test_a_cuda_device_with_a_number_is_allowed() -> None:
    assert load_settings(None, {"device": "cuda:1"}).device == "cuda:1"


QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}


@pytest.mark.parametrize(
    ("settings", "checkpoint", "expected"),
    [
        (Settings(), QWEN, SamplingSettings()),
        (Settings(temperature=0.7, top_p=0.9), QWEN, SamplingSettings(temperature=0.7, top_p=0.9)),
        (Settings(repetition_penalty=1.1), QWEN, SamplingSettings(repetition_penalty=1.1)),
        (Settings(sampling="checkpoint"), QWEN, SamplingSettings(temperature=0.6, top_k=20, top_p=0.95)),
        (Settings(sampling="checkpoint"), {**QWEN, "do_sample": False}, SamplingSettings(top_k=20, top_p=0.95)),
        (Settings(sampling="checkpoint"), {"do_sample": True}, SamplingSettings(temperature=1.0)),
        (Settings(sampling="checkpoint"), {}, SamplingSettings()),
        (Settings(sampling="checkpoint", top_k=5), QWEN, SamplingSettings(temperature=0.6, top_k=5, top_p=0.95)),
        (Settings(sampling="checkpoint", temperature=0.0), QWEN, SamplingSettings(top_k=20, top_p=0.95)),
        (Settings(temperature=0.0, top_k=5), QWEN, SamplingSettings(top_k=5)),
    ],
)
def test_sampling_settings(settings: Settings, checkpoint: dict[str, object], expected: SamplingSettings) -> None:
    assert sampling_settings(settings, checkpoint) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("top_k", 1.5),
        ("top_p", [0.9]),
        ("do_sample", "yes"),
    ],
)
def test_a_setting_of_the_checkpoint_of_another_type_is_refused(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"{name} is .* in the checkpoint's generation_config.json") as caught:
        sampling_settings(Settings(sampling="checkpoint"), {**QWEN, name: value})
    assert len(str(caught.value)) < 200
    assert sampling_settings(Settings(), {**QWEN, name: value}) == SamplingSettings()


@pytest.mark.parametrize("settings", [Settings(top_p=0.9), Settings(sampling="checkpoint", top_p=0.9)])
def test_a_filter_that_greedy_decoding_would_ignore_is_refused(settings: Settings) -> None:
    with pytest.raises(UsageError, match="top_p has no effect on greedy decoding"):
        sampling_settings(settings, {})


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {
            "max_len": "4M",
            "chat": False,
            "gpu_memory": "0.5",
            "cpu_memory": "1.5GB",
            "temperature": "1e-05",
            "top_k": "0",
        },
        {
            "gpu_memory": "1.0",
            "cpu_memory": "123.456789012GB",
            "device": "cuda:1",
            "rope": "yarn:1.5",
            "progress": True,
        },
        {"trace": 'a: "b" #\\ ü.json', "trace_chunks": "5"},
        {"stop": ["a\n\n", "\\n", 'ü "😀"', "null", " x ", "\u2028\x85\x00\x7f", "[,]"], "truncate": "middle"},
    ],
)
def test_settings_that_are_shown_are_read_back_the_same(tmp_path: Path, flags: dict[str, Any]) -> None:
    settings = load_settings(None, flags)
    path = _write(tmp_path, config.show_settings(settings))
    assert load_settings(path, {}) == settings
    assert [line.split(":")[0] for line in path.read_text().splitlines()] == [field.name for field in fields(Settings)]


def test_stop_strings_are_one_or_several_and_flags_replace_those_of_the_file(tmp_path: Path) -> None:
    assert load_settings(_write(tmp_path, "stop: '\\n\\n'"), {}).stop == ("\\n\\n",)
    path = _write(tmp_path, 'stop: ["\\n\\n", 12]')
    assert load_settings(path, {"stop": []}).stop == ("\n\n", "12")
    assert load_settings(path, {"stop": ["x"]}).stop == ("x",)
    with pytest.raises(UsageError, match="stop: a stop string must have at least one character"):
        load_settings(None, {"stop": ["x", ""]})
    with pytest.raises(UsageError, match="max_len: a sequence is not allowed; give one value"):
        load_settings(_write(tmp_path, "max_len: [1, 2]"), {})


@pytest.mark.parametrize("rope", ["auto", "none", "yarn", "yarn:1", "yarn:4", "yarn:1.25"])
def test_rope_choices(rope: str) -> None:
    assert load_settings(None, {"rope": rope}).rope == rope


@pytest.mark.parametrize(
    "rope", ["", "yarn:", "yarn:0.5", "yarn:x", "yarn:-4", "yarn:nan", "yarn:1e9", "none:2", "YaRN", "4"]
)
def test_other_rope_choices_are_refused(rope: str) -> None:
    with pytest.raises(UsageError, match=r"rope: .* is not allowed; it must be one of auto, none, yarn, yarn:FACTOR"):
        load_settings(None, {"rope": rope})
