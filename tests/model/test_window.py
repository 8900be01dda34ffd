"""Past the trained window: which factor, what is said of it, and angles that equal transformers'."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longgen.engine import Engine, EngineOptions
from longgen.errors import CheckpointError, UsageError
from longgen.model.checkpoint import read_config
from longgen.model.rope import original_window, rotary_frequencies, trained_window
from longgen.model.window import choose_stretch, stretch_config, window_note
from tests.checkpoints import Build, random_ids, reference_logits
from tests.model.test_rope import text_config


def windowed(window: int, **rope: Any) -> Any:
    config = text_config(**rope)
    config.max_position_embeddings = window
    return config


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}


@pytest.mark.parametrize(
    ("rope", "tokens", "factor"),
    [
        ("auto", 1000, None),
        ("auto", 1001, 1.01),
        ("auto", 4000, 4.0),
        ("auto", 2345, 2.35),
        ("none", 4000, None),
        ("yarn", 1000, None),
        ("yarn", 2500, 2.5),
        ("yarn:4", 10, 4.0),
        ("yarn:1.5", 4000, 1.5),
    ],
)
def test_the_factor_is_the_one_that_the_request_needs(rope: str, tokens: int, factor: float | None) -> None:
    assert choose_stretch(windowed(1000), rope, tokens - 5, 5, beyond=True).factor == factor


@pytest.mark.parametrize(
    ("rope", "tokens", "factor"),
    [
        ("auto", 4000, None),
        ("auto", 4001, 4.01),
        ("auto", 8000, 8.0),
        ("none", 8000, None),
        ("yarn", 2000, None),
        ("yarn", 5000, 5.0),
        ("yarn:2", 2000, 2.0),
    ],
)
@pytest.mark.parametrize("window", [1000, 4000])
def test_a_checkpoints_own_yarn_counts_as_its_window(rope: str, tokens: int, factor: float | None, window: int) -> None:
    assert choose_stretch(windowed(window, **YARN), rope, tokens - 5, 5, beyond=True).factor == factor


def test_what_is_said_has_the_numbers() -> None:
    def notice(config: Any, rope: str, prompt: int, *, beyond: bool = True) -> str | None:
        return choose_stretch(config, rope, prompt, 5, beyond=beyond).notice

    plain, own = windowed(1000), windowed(1000, **YARN)
    assert notice(plain, "auto", 100, beyond=False) is None
    assert notice(plain, "auto", 1495) == (
        "warning: the longest request takes 1,495 + 5 = 1,500 tokens, beyond the trained window of 1,000; "
        "rope: YaRN, factor 1.5 of 1,000, up to 1,500"
    )
    assert notice(plain, "none", 1495) == (
        "warning: the longest request takes 1,495 + 5 = 1,500 tokens, beyond the trained window of 1,000; "
        "rope: none, as trained"
    )
    assert notice(plain, "auto", 95) == (
        "the longest request takes 95 + 5 = 100 tokens, within the trained window of 1,000; rope: none, as trained"
    )
    assert (notice(plain, "yarn:1.2", 1495) or "").endswith("up to 1,200, which is less than the request")
    assert (notice(plain, "yarn:4", 95, beyond=False) or "").endswith("rope: YaRN, factor 4 of 1,000, up to 4,000")
    assert (notice(own, "auto", 95) or "").endswith(
        "the trained window of 4,000; rope: the checkpoint's own YaRN, factor 4 of 1,000"
    )


def test_a_window_beyond_the_reach_of_its_own_yarn_is_noted() -> None:
    assert window_note(windowed(4001, **YARN)) == (
        "note: max_position_embeddings is 4,001 in config.json, and its YaRN, factor 4 of 1,000, reaches 4,000; 4,001 "
        "is taken for the trained window"
    )
    assert all(window_note(windowed(window, **YARN)) is None for window in (1000, 4000))
    assert window_note(windowed(4001)) is None


def test_yarn_does_not_go_with_linear_scaling() -> None:
    config = windowed(1000, rope_type="linear", factor=2.0)
    for rope in ("auto", "yarn", "yarn:4"):
        with pytest.raises(UsageError, match=r"takes 2,000 tokens, .* 1,000 with linear scaling .* --rope none"):
            choose_stretch(config, rope, 1995, 5, beyond=True)
    assert choose_stretch(config, "none", 1995, 5, beyond=True).factor is None
    assert choose_stretch(config, "auto", 95, 5, beyond=True).factor is None


def test_a_checkpoints_own_yarn_fields_are_kept() -> None:
    config = windowed(1000, **YARN, beta_fast=16, beta_slow=2, attention_factor=1.25, partial_rotary_factor=0.5)
    before = dict(config.rope_parameters)
    stretch_config(config, 8.0)
    assert config.rope_parameters == before | {"factor": 8.0}
    assert rotary_frequencies(config)[1] == 1.25


TYPES = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe_text")


@pytest.mark.parametrize("kind", TYPES)
def test_yarn_by_four_equals_transformers_with_the_same_config_at_every_position(
    build: Build, tmp_path: Path, kind: str
) -> None:
    """A window of 64 stretched to 256, in chunks of 64; and none of it is what the model would say unstretched."""
    folder = build(kind, max_position=64, head_dim=32)
    ids = random_ids(256)
    options = EngineOptions(device="cpu", dtype="float32", block_size=16, chunk_size=64, yarn_factor=4.0)
    engine = Engine.load(folder, options)
    mine = torch.cat([logits_of_chunk(engine, ids[:, start : start + 64]) for start in range(0, 256, 64)])
    theirs = reference_logits(_with_yarn(folder, tmp_path), ids)[0]
    tolerance = 2e-4 if "next" in kind or "3_5" in kind else 5e-5
    torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=0)
    unstretched = reference_logits(folder, ids)[0]
    assert (theirs - unstretched).abs().amax(dim=1)[8:].min() > 100 * tolerance


def logits_of_chunk(engine: Engine, ids: torch.Tensor) -> torch.Tensor:
    """Appends ids [1, n] to slot 0; logits of every one of them, [n, vocab]."""
    length, count = engine.store.length(0), ids.shape[1]
    positions = (length + torch.arange(count))[None]
    with engine.store.begin([(0, count)]) as pass_:
        logits = engine.provider.forward(pass_, ids, positions, keep=count)[0]
        pass_.commit()
    return logits


def _with_yarn(folder: Path, tmp_path: Path) -> Path:
    """The same checkpoint, whose config says of YaRN what Qwen's documentation has people write."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    return _copy_with(folder, tmp_path / "yarn", lambda text: text["rope_parameters"].update(yarn))


def _copy_with(folder: Path, copied: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """The same checkpoint with a text config that `edit` has changed."""
    copied.mkdir()
    for file in folder.iterdir():
        (copied / file.name).symlink_to(file)
    raw = json.loads((folder / "config.json").read_text())
    edit(raw.get("text_config", raw))
    (copied / "config.json").unlink()
    (copied / "config.json").write_text(json.dumps(raw))
    return copied


def _edited(folder: Path, tmp_path: Path, **changes: Any) -> Path:
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_parameters": None} | changes))
    return tmp_path


FULL = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in FULL.items() if name not in names}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": _without("factor")}, "asks for YaRN without factor$"),
        ({"rope_scaling": _without("factor")}, "rope_scaling in config.json asks for YaRN without factor$"),
        ({"rope_parameters": FULL | {"factor": None}}, "asks for YaRN without factor$"),
        (
            {"rope_parameters": _without("original_max_position_embeddings")},
            "without original_max_position_embeddings$",
        ),
        ({"rope_parameters": {"type": "yarn"}}, "without factor and original_max_position_embeddings$"),
        ({"rope_parameters": _without("factor") | {"factr": 4}}, "factr in .* is not a setting; did you mean factor"),
        ({"rope_parameters": FULL | {"beta_fst": 4}}, "did you mean beta_fast"),
        ({"rope_parameters": FULL | {"attn_factor": 1.0}}, "did you mean attention_factor"),
        ({"rope_parameters": FULL | {"zzz": 1.0}}, "zzz in .* is not a setting; YaRN has factor, original_max"),
        ({"rope_parameters": _without("rope_type") | {"rope_typ": "yarn"}}, "did you mean rope_type"),
        ({"rope_parameters": _without("rope_type")}, "sets factor but no rope_type that uses it"),
        ({"rope_parameters": FULL | {"rope_type": "default"}}, "sets factor but no rope_type that uses it"),
        ({"rope_parameters": FULL | {"rope_type": "default", "type": "yarn"}}, "names two types, default and yarn"),
        ({"rope_parameters": FULL | {"rope_type": "yran"}}, "'yran' is not supported"),
        ({"rope_scalling": FULL}, "rope_scalling in config.json is not a setting; did you mean rope_scaling"),
        ({"rope_parameters": "yarn"}, "rope_parameters is 'yarn' in config.json; it must be an object"),
        ({"rope_parameters": FULL | {"factor": 0.5}}, "factor is 0.5 .* YaRN's must be 1 or more"),
        ({"rope_parameters": FULL | {"beta_fast": 1, "beta_slow": 32}}, "beta_fast is 1 .* above beta_slow, 32"),
        ({"rope_parameters": FULL | {"truncate": "no"}}, "truncate is 'no' .* true or false"),
        ({"rope_parameters": FULL | {"type": "yran", "rope_type": "linear"}}, "names two types, linear and yran; give"),
        ({"rope_parameters": FULL | {"type": "YARN", "rope_type": "default"}}, "names two types, YARN and default"),
        ({"rope_parameters": FULL | {"rope_type": ["yarn"]}}, r"rope_type is \['yarn'\] .* it must be a string"),
        ({"rope_parameters": FULL, "rope_scaling": {"type": "default"}}, "rope_scaling and rope_parameters .* differ"),
        ({"rope_parameters": FULL, "rope_scaling": {"type": "linear", "factor": 2.0}}, "differ; keep one of them$"),
        ({"rope_parameters": FULL, "rope_scaling": _without("rope_theta")}, "differ; keep one of them$"),
        ({"rope_parameters": FULL, "original_max_position_embeddings": 128}, "is 64 in .*, and 128 beside it; keep"),
        ({"rope": FULL}, "rope in config.json is not a setting; rotary settings go into rope_scaling or rope_param"),
        ({"scaling": FULL}, "scaling in config.json is not a setting; rotary"),
        ({"position": {"kind": "yarn"}}, "position in config.json is not a setting; rotary"),
        ({"yarn_scaling": {"scale": 4}}, "yarn_scaling in config.json is not a setting; rotary"),
        ({"RopeConfig": {"scale": 4}}, "RopeConfig in config.json is not a setting; rotary"),
        ({"ROPE_SCALING": FULL}, "ROPE_SCALING in config.json is not a setting; did you mean rope_scaling"),
        ({"rope_scalling": "yarn"}, "rope_scalling in config.json is not a setting; did you mean rope_scaling"),
        ({"rope_type": "yarn", "factor": 4.0}, "rope_type in config.json is not a setting; rotary"),
        ({"rope_type": "yran"}, "rope_type in config.json is not a setting; rotary"),
        ({"factor": 4.0, "original_max_position_embeddings": 64}, "factor in config.json is not a setting; rotary"),
        *(
            ({"rope_parameters": {"rope_theta": 1e4, name: value}}, f"{name} in .*rope_parameters is not a setting")
            for name, value in (
                ("ROPE_TYPE", "yarn"),
                ("method", "yarn"),
                ("rope", "YaRN"),
                ("yarn", True),
                ("yarn_factor", 4),
                ("FACTOR", 4),
            )
        ),
        *(
            ({"rope_parameters": FULL | {name: value}}, f"{name} is .* it must be a")
            for name, value in (
                ("factor", 1e308),
                ("factor", 10**400),
                ("factor", True),
                ("beta_fast", 1e308),
                ("beta_slow", 1e-320),
                ("attention_factor", "x"),
                ("original_max_position_embeddings", 0.5),
                ("original_max_position_embeddings", 0),
                ("original_max_position_embeddings", 64.5),
                ("original_max_position_embeddings", 1e300),
            )
        ),
        (
            {
                "rope_parameters": _without("original_max_position_embeddings"),
                "original_max_position_embeddings": "lots",
            },
            "original_max_position_embeddings is 'lots' .* it must be a whole number of tokens, 1",
        ),
    ],
)
def test_yarn_that_is_misspelt_or_incomplete_is_refused(
    build: Build, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(_edited(build("qwen3"), tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": FULL},
        {"rope_theta": 1e4, "rope_scaling": FULL | {"beta_fast": 16, "beta_slow": 2, "truncate": False}},
        {"rope_parameters": _without("original_max_position_embeddings"), "original_max_position_embeddings": 64},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "finetuned": True}},
        {"rope_parameters": {"rope_theta": 1e4, "type": "default", "mrope_section": [2, 1, 1]}},
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "type": "mrope", "mrope_section": [2, 1, 1]}},
        {
            "rope_theta": 1e4,
            "rope_scaling": None,
            "use_mrope": False,
            "properties": {"a": 1},
            "_name_or_path": "a-yarn",
        },
        {"rope_theta": 1e4, "rope_scaling": {}, "rope_parameters": FULL, "use_yarn": False},
        {"rope_theta": 1e4, "rope_scaling": _without("rope_theta"), "rope_parameters": FULL | {"factor": 4}},
        {
            "rope_theta": 1e4,
            "dual_chunk_attention_config": {
                "chunk_size": 262144,
                "local_size": 8192,
                "original_max_position_embeddings": 262144,
                "sparse_attention_enabled": True,
            },
        },
    ],
)
def test_other_rotary_settings_are_taken(build: Build, tmp_path: Path, changes: dict[str, Any]) -> None:
    config = read_config(_edited(build("qwen3"), tmp_path, **changes))
    assert config.rope_parameters["rope_theta"] == 1e4


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_a_window_beside_the_settings_is_that_of_the_checks_and_of_the_angles(
    build: Build, tmp_path: Path, kind: str
) -> None:
    folder = _copy_with(build(kind, max_position=256, head_dim=64), tmp_path / "beside", _window_beside)
    config = read_config(folder)
    assert (original_window(config), trained_window(config)) == (64, 256)
    expected = rotary_frequencies(config)[0]
    engine = Engine.load(folder, EngineOptions(device="cpu", dtype="float32", block_size=16, chunk_size=64))
    loaded = engine.provider.config
    assert (original_window(loaded), trained_window(loaded)) == (64, 256)
    assert torch.equal(engine.provider.model.get_submodule("model").rotary_emb.inv_freq, expected)
    parameters = dict(config.rope_parameters)
    config.rope_parameters = parameters | {"original_max_position_embeddings": 256}
    assert not torch.equal(rotary_frequencies(config)[0], expected)


def _window_beside(text: dict[str, Any]) -> None:
    text["rope_parameters"] |= {"rope_type": "yarn", "factor": 4.0}
    text["original_max_position_embeddings"] = 64


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters", "rope_scalling", "yarn"])
def test_rotary_settings_beside_a_text_config_are_refused(build: Build, tmp_path: Path, name: str) -> None:
    raw = json.loads((build("qwen3_5") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {name: FULL}))
    with pytest.raises(CheckpointError, match=f"^{name} in config.json (stands beside text_config|is not a setting)"):
        read_config(tmp_path)
