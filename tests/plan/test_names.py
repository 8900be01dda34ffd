"""Known models."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from longgen.model_shape import RECURRENT
from longgen.names import checkpoint_name, find_known, known_models

CONFIGS = Path(__file__).parents[2] / "configs" / "models.yaml"

# Weights as the hub counts them, of checkpoints that hold nothing but the text model.
PUBLISHED = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen2.5-7b-1m": 7_615_616_512,
    "qwen2.5-14b-1m": 14_770_033_664,
    "qwen3-next-80b-a3b": 79_674_391_296,
}


def _shape(name: str) -> object:
    known = find_known(name)
    assert known is not None
    return known.shape


def test_the_file_in_configs_is_the_one_that_is_installed() -> None:
    assert CONFIGS.resolve() == CONFIGS.parents[1] / "longgen" / "data" / "models.yaml"


@pytest.mark.parametrize(
    ("name", "count"),
    [("qwen3-0.6b", 114_688), ("qwen2.5-7b-1m", 57_344), ("qwen3.5-0.8b", 12_288), ("qwen3.5-27b", 65_536)],
)
def test_kv_bytes_per_token(name: str, count: int) -> None:
    known = find_known(name)
    assert known is not None
    assert known.shape.kv(1024).cached_token_bytes == count


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_weights_are_those_that_are_published(name: str, count: int) -> None:
    known = find_known(name)
    assert known is not None
    assert known.shape.parameters == count


def test_every_entry_states_its_kv_bytes() -> None:
    entries = yaml.safe_load(CONFIGS.read_text(encoding="utf-8"))
    assert len(entries) == len(known_models()) > 15
    assert all("kv_bytes_per_token" in entry and entry["hub"].startswith("Qwen/") for entry in entries.values())


def test_qwen_is_qwen_3_5_2b_and_takes_48_gib_at_4m() -> None:
    known = find_known("qwen")
    assert known is not None
    assert known.hub == "Qwen/Qwen3.5-2B"
    assert known.shape.kv(1024).cached_token_bytes * (4 << 20) == 48 << 30
    assert known.shape.count(RECURRENT) == 18


def test_short_names_stand_for_hub_ids_unless_there_is_such_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert checkpoint_name("qwen") == checkpoint_name("Qwen3.5-2B") == "Qwen/Qwen3.5-2B"
    assert checkpoint_name("someone/else") == "someone/else"
    assert checkpoint_name("unknown") == "unknown"
    (tmp_path / "qwen").mkdir()
    assert checkpoint_name("qwen") == "qwen"


def test_a_hub_id_of_a_known_model_needs_no_network() -> None:
    assert _shape("Qwen/Qwen3-8B") == _shape("qwen3-8b")
