"""The engine as a library: what it tells a policy, errors inside a pass, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longgen.attention.kernels import Kernels
from longgen.engine import EngineOptions
from longgen.errors import CapacityError, SlotError, UsageError
from longgen.sampling import Sampler, SamplingSettings
from longgen.sparse.base import AvailableBlocks, BlockSelection, Phase
from longgen.sparse.full import FullAttentionPolicy
from tests.checkpoints import Build, random_ids
from tests.engine.running import open_engine


class Recorder(FullAttentionPolicy):
    """Takes down what it is asked in layer 0."""

    def __init__(self) -> None:
        self.asked: list[tuple[Phase, int]] = []

    def select_blocks(
        self, layer: int, phase: Phase, query: torch.Tensor | None, available: AvailableBlocks
    ) -> BlockSelection:
        if layer == 0:
            self.asked.append((phase, available.count))
        return super().select_blocks(layer, phase, query, available)


def test_the_rest_of_a_prompt_is_prefill_however_short(build: Build) -> None:
    policy = Recorder()
    engine = open_engine(build("qwen3"), policy=policy)
    engine.prefill(random_ids(67)[0].tolist())
    engine.decode_step(5)
    assert policy.asked == [(Phase.PREFILL, 0), (Phase.PREFILL, 4), (Phase.DECODE, 4)]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
def test_an_error_inside_the_model_empties_its_slot_and_no_other(
    build: Build, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_ids(90)[0]
    expected = open_engine(build(kind)).prefill(ids)
    engine = open_engine(build(kind), slots=3)
    for slot in range(3):
        engine.prefill(ids[:64], slot)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.provider.model.model.norm, "forward", fail)
        with pytest.raises(KeyboardInterrupt):
            engine.extend(ids[:20] + 1, 1)
        assert [engine.store.length(slot) for slot in range(3)] == [64, 0, 64]
    torch.testing.assert_close(engine.extend(ids[64:], 0), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(engine.extend(ids[64:], 2), expected, atol=1e-4, rtol=0)
    assert engine.store._parts.host._extents[1] == []


def test_an_error_in_a_batch_empties_the_slots_of_the_batch_and_no_other(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(build("qwen3"), slots=3)
    for slot in range(3):
        engine.prefill(random_ids(64)[0], slot)
    with monkeypatch.context() as patch, pytest.raises(CapacityError, match="running 1 token after 64"):
        patch.setattr(engine.provider.model.model.norm, "forward", run_out)
        engine.decode_slots([2, 0], [5, 6])
    assert [engine.store.length(slot) for slot in range(3)] == [0, 64, 0]


def run_out(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("no memory")


def test_device_memory_that_runs_out_in_a_pass_is_one_error(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(build("qwen3"))
    engine.prefill(random_ids(64)[0])
    with monkeypatch.context() as patch, pytest.raises(CapacityError, match="running 10 tokens after 64"):
        patch.setattr(engine.provider.model.model.norm, "forward", run_out)
        engine.extend(random_ids(10)[0])


def test_device_memory_that_runs_out_while_loading_is_one_error(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longgen.engine.Provider.load", run_out)
    with pytest.raises(CapacityError, match="while loading the model"):
        open_engine(build("qwen3"))


def test_reset_all_empties_every_slot(build: Build) -> None:
    engine = open_engine(build("qwen3"), slots=2)
    for slot in (0, 1):
        engine.prefill(random_ids(40)[0].tolist(), slot)
    engine.reset_all()
    assert [engine.store.length(slot) for slot in (0, 1)] == [0, 0]


def test_progress_is_told_in_order_and_to_the_end(build: Build) -> None:
    told: list[int] = []
    open_engine(build("qwen3")).prefill(random_ids(150)[0].tolist(), on_chunk=told.append)
    assert told == [64, 128, 150]


def test_a_stop_id_ends_the_answer_and_is_not_part_of_it(build: Build) -> None:
    engine, prompt = open_engine(build("qwen3")), random_ids(40)[0].tolist()

    def run(stop_ids: tuple[int, ...]) -> tuple[list[int], str | None]:
        sampler = Sampler(SamplingSettings(), seed=0)
        generation = engine.generate(prompt, max_new_tokens=8, stop_ids=stop_ids, sampler=sampler)
        return list(generation), generation.finish_reason

    whole, reason = run(())
    assert (len(whole), reason) == (8, "length")
    stop = whole[5]
    assert run((stop,)) == (whole[: whole.index(stop)], "stop")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_size": 1000}, "multiple of the block size 1024"),
        ({"block_size": 0}, "block size 0 is not a positive number of tokens"),
        ({"block_size": 0, "chunk_size": 1024}, "block size 0 is not a positive number of tokens"),
        ({"device": "cuda:999"}, "torch sees"),
        ({"device": "cuda:-1"}, "not one of"),
        ({"device": "tpu"}, "not one of"),
        ({"dtype": "int8"}, "not one of"),
    ],
)
def test_options_that_cannot_work_are_refused(build: Build, options: dict[str, object], message: str) -> None:
    chosen = EngineOptions(**options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message):
        if "dtype" in options:
            chosen.torch_dtype()
        chosen.chunk_tokens()
        chosen.torch_device()


def test_a_cuda_device_gets_its_number_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    for name, index in (("cuda", 2), ("auto", 2), ("cuda:0", 0), ("cuda:1", 1)):
        assert EngineOptions(device=name).torch_device() == torch.device("cuda", index)
    with pytest.raises(UsageError, match="cuda:3 is not there: torch sees 3"):
        EngineOptions(device="cuda:3").torch_device()


def test_the_device_is_current_before_a_kernel_is_tried_on_it(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the device that is current, whatever device the tensors are on."""
    seen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr("longgen.engine.make_current", lambda device: seen.append(("current", device)))
    prepare = Kernels.prepare

    def prepare_and_note(kernels: Kernels, *arguments: Any, **others: Any) -> None:
        seen.append(("tried", arguments[3]))
        prepare(kernels, *arguments, **others)

    monkeypatch.setattr(Kernels, "prepare", prepare_and_note)
    open_engine(build("qwen3"))
    assert seen == [("current", torch.device("cpu")), ("tried", torch.device("cpu"))]


def test_misuse_names_the_slot(build: Build) -> None:
    engine = open_engine(build("qwen3"))
    with pytest.raises(SlotError, match="slot 3"):
        engine.prefill([1, 2], 3)
    with pytest.raises(SlotError, match="slot 0 before prefill"):
        engine.decode_step(1)
    with pytest.raises(UsageError, match="empty prompt"):
        engine.prefill([])
    for token in (-1, 320):
        with pytest.raises(UsageError, match=f"token id {token} is not in the model's vocabulary of 320"):
            engine.prefill([4, token, 5])
