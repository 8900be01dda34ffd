"""Past the trained window: which factor, what is said of it, and angles that equal transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longgen.engine import Engine, EngineOptions
from longgen.errors import CheckpointError, UsageError
from longgen.model.checkpoint import read_config
from longgen.model.rope import rotary_frequencies
from longgen.model.window import choose_stretch, stretch_config
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
    copied = tmp_path / "yarn"
    copied.mkdir()
    for file in folder.iterdir():
        (copied / file.name).symlink_to(file)
    raw = json.loads((folder / "config.json").read_text())
    text = raw.get("text_config", raw)
    text["rope_parameters"] |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
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
    ],
)
def test_other_rotary_settings_are_taken(build: Build, tmp_path: Path, changes: dict[str, Any]) -> None:
    config = read_config(_edited(build("qwen3"), tmp_path, **changes))
    assert config.rope_parameters["rope_theta"] == 1e4
