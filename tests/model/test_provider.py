"""What a Provider says of its model, and how the recurrent states of slots are kept apart, kept back and given back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longgen.errors import LongGenError, SlotError, UsageError
from longgen.kv.layout import AttentionLayer
from longgen.model.provider import Provider
from longgen.model.rope import trained_window
from longgen.model.tiny import make_checkpoint
from tests.checkpoints import HYBRID_TYPES, Build, random_ids
from tests.model.running import feed, load
from tests.plain_pass import PlainStore

STATEFUL = pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe"])


def test_facts_of_a_dense_model(build: Build) -> None:
    provider, _ = load(build("qwen2", head_dim=64, yarn=True))
    assert provider.layer_specs() == (AttentionLayer(0), AttentionLayer(1), AttentionLayer(2))
    assert (provider.kv_heads, provider.head_dim, provider.vocab_size) == (2, 64, 320)
    assert (provider.dtype, provider.device) == (torch.float32, torch.device("cpu"))
    assert not provider.is_recurrent


@pytest.mark.parametrize("model_type", HYBRID_TYPES)
def test_recurrent_layers_are_not_the_stores(build: Build, model_type: str) -> None:
    provider, _ = load(build(model_type))
    assert provider.layer_specs() == (AttentionLayer(1), AttentionLayer(3))
    assert provider.is_recurrent


@pytest.mark.parametrize(
    ("model_type", "windows"),
    [
        ("qwen2", (48, None, 48)),
        ("qwen3", (48, None, 48)),
        ("qwen2_moe", (48, None, 48)),
        ("qwen3_moe", (48, 48, 48)),
    ],
)
def test_windows_come_from_the_config(build: Build, model_type: str, windows: tuple[int | None, ...]) -> None:
    provider, _ = load(build(model_type, sliding=True, window=48))
    assert tuple(layer.window for layer in provider.layer_specs()) == windows


def test_yarn_stretches_the_trained_window(build: Build) -> None:
    assert trained_window(load(build("qwen3", max_position=4096))[0].config) == 4096
    provider, _ = load(build("qwen3", max_position=4096, yarn=True))  # by 4, over a quarter of 4096
    assert trained_window(provider.config) == 4096
    provider.config.rope_parameters["original_max_position_embeddings"] = 4096  # as Qwen2.5 documents it
    assert trained_window(provider.config) == 4 * 4096


def test_only_the_last_rows_of_logits_are_computed(build: Build) -> None:
    provider, store = load(build("qwen3"))
    ids, positions = random_ids(40), torch.arange(40)[None]
    every = provider.forward(store.begin([(0, 40)]), ids, positions, keep=40)
    last = provider.forward(store.begin([(0, 40)]), ids, positions)
    assert every.shape == (1, 40, 320)
    assert last.shape == (1, 1, 320)
    torch.testing.assert_close(last, every[:, -1:], atol=1e-5, rtol=0)


def test_logits_are_float32_in_a_bfloat16_model(build: Build) -> None:
    provider = Provider.load(build("qwen3_5"), dtype=torch.bfloat16, device=torch.device("cpu"))
    logits = feed(provider, PlainStore(provider.layer_specs()), random_ids(70), (64, 5, 1))
    assert provider.dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()


def test_a_batch_of_single_tokens_equals_one_slot_at_a_time(build: Build) -> None:
    for model_type in ("qwen3", "qwen3_5_moe"):
        provider, store = load(build(model_type), slots=3)
        prompts = {2: random_ids(70, seed=1), 0: random_ids(33, seed=2)}
        alone = {}
        for slot, ids in prompts.items():
            alone[slot] = feed(provider, store, ids, (ids.shape[1] - 2, 1, 1), slot=slot)[:, -1]
            provider.reset(slot)
            store.reset(slot)
        for slot, ids in prompts.items():
            feed(provider, store, ids[:, :-2], (ids.shape[1] - 2,), slot=slot)
        for step in (2, 1):
            pass_ = store.begin([(2, 1), (0, 1)])
            ids = torch.stack([prompts[2][0, -step], prompts[0][0, -step]])[:, None]
            positions = torch.tensor([[70 - step], [33 - step]])
            logits = provider.forward(pass_, ids, positions)
            pass_.commit()
        torch.testing.assert_close(logits[:, 0], torch.cat((alone[2], alone[0])), atol=1e-4, rtol=0)


@STATEFUL
def test_states_of_two_slots_do_not_mix(build: Build, model_type: str) -> None:
    provider, store = load(build(model_type), slots=2)
    first, second = random_ids(130, seed=1), random_ids(130, seed=2)
    alone = feed(provider, store, first, (64, 64, 1, 1))
    provider.reset(0)
    store.reset(0)
    interleaved = []
    for start, count in ((0, 64), (64, 64), (128, 1), (129, 1)):
        interleaved.append(feed(provider, store, first[:, start : start + count], (count,), slot=0))
        feed(provider, store, second[:, start : start + count], (count,), slot=1)
    assert torch.equal(torch.cat(interleaved, dim=1), alone)


@STATEFUL
def test_an_aborted_pass_leaves_the_states_as_they_were(build: Build, model_type: str) -> None:
    provider, store = load(build(model_type))
    ids = random_ids(131)
    feed(provider, store, ids[:, :128], (64, 64))
    before = provider.snapshot(0)
    for count in (1, 3):
        pass_ = store.begin([(0, count)])
        provider.forward(pass_, ids[:, 128 : 128 + count], torch.arange(128, 128 + count)[None])
        pass_.abort()
    after = provider.snapshot(0)
    assert all(torch.equal(a, b) for a, b in zip(before.tensors, after.tensors, strict=True))
    assert before.tensors[1].abs().max() > 0


@STATEFUL
def test_a_snapshot_takes_a_slot_back(build: Build, model_type: str) -> None:
    provider, store = load(build(model_type))
    ids, other = random_ids(130, seed=1), random_ids(5, seed=2)
    straight = feed(provider, store, ids, (128, 1, 1))
    provider.reset(0)
    store.reset(0)
    feed(provider, store, ids[:, :128], (128,))
    snapshot, kv, length = provider.snapshot(0), dict(store.kv), store.length[0]
    feed(provider, store, other, (5,))
    provider.restore(0, snapshot)
    store.kv, store.length[0] = kv, length
    assert torch.equal(feed(provider, store, ids[:, 128:], (1, 1)), straight[:, 128:])


def test_a_snapshot_without_recurrent_layers_is_empty(build: Build) -> None:
    provider, _ = load(build("qwen3"))
    assert provider.snapshot(0).tensors == ()
    provider.restore(0, provider.snapshot(0))
    provider.reset(0)
    provider.poison()


@STATEFUL
def test_poison_shows_and_reset_removes_it(build: Build, model_type: str) -> None:
    provider, store = load(build(model_type))
    ids = random_ids(66)
    clean = feed(provider, store, ids, (64, 1, 1))
    provider.poison()
    store.reset(0)
    assert feed(provider, store, ids, (64, 1, 1)).isnan().any()
    provider.poison()
    provider.reset(0)
    store.reset(0)
    assert torch.equal(feed(provider, store, ids, (64, 1, 1)), clean)


def test_recurrent_models_refuse_to_give_tokens_back(build: Build) -> None:
    provider, store = load(build("qwen3_next"))
    pass_ = store.begin([(0, 4)])
    provider.forward(pass_, random_ids(4), torch.arange(4)[None])
    with pytest.raises(LongGenError, match="run the accepted tokens again"):
        pass_.commit([2])
    assert provider.snapshot(0).tensors[1].abs().max() == 0


def test_a_slot_without_states_is_refused(build: Build) -> None:
    provider, store = load(build("qwen3_next"), slots=2)
    with pytest.raises(SlotError, match="slot 2"):
        provider.forward(store.begin([(2, 1)]), random_ids(1), torch.zeros(1, 1, dtype=torch.int64))


@pytest.mark.parametrize("keep", [0, 5])
def test_keep_out_of_range_is_refused(build: Build, keep: int) -> None:
    provider, store = load(build("qwen3"))
    with pytest.raises(UsageError, match="4 tokens"):
        provider.forward(store.begin([(0, 4)]), random_ids(4), torch.arange(4)[None], keep=keep)


def test_ids_that_do_not_fit_the_pass_are_refused(build: Build) -> None:
    provider, store = load(build("qwen3"))
    with pytest.raises(UsageError, match="1 x 3"):
        provider.forward(store.begin([(0, 4)]), random_ids(3), torch.arange(3)[None])


def test_the_same_seed_makes_the_same_checkpoint(build: Build, tmp_path: Path) -> None:
    weights = [(make_checkpoint(tmp_path / str(i), "qwen2", seed=i // 2) / "model.safetensors") for i in range(3)]
    first, again, other = (path.read_bytes() for path in weights)
    assert first == again
    assert first != other
