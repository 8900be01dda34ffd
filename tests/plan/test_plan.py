"""Memory plans against hand arithmetic, against a real store, and against too little memory."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from longgen.attention.backends import default_kernels
from longgen.errors import CapacityError, UsageError
from longgen.kv.layout import KVLayout
from longgen.kv.memory_plan import MeasuredUse, MemoryPlan, PlanOptions
from longgen.kv.plan import MEASURED_BLOCKS, RUNTIME_BYTES, SEARCH_LIMIT, SPARE_PART, Planner
from longgen.kv.predict import reference_rates
from longgen.kv.sizes import StoreSizes
from longgen.kv.store import KVStore
from longgen.kv.transfer import CpuTransfer
from longgen.model_shape import WINDOW, ModelShape
from longgen.planning.plans import correction, find_shape
from tests.plan.machines import GIB
from tests.plan.shapes import SEVEN, SLIDING, SMALL, machine


def plan(shape: ModelShape, gpu: float | None, prompt: int, new: int = 256, **options: Any) -> MemoryPlan:
    return Planner(shape, machine(gpu), PlanOptions(**options)).plan(prompt, new)


def test_bytes_per_token_by_hand() -> None:
    assert SMALL.kv(1024).cached_token_bytes == 28 * 2 * 8 * 128 * 2 == 114_688
    assert SEVEN.kv(1024).cached_token_bytes == 28 * 2 * 4 * 128 * 2 == 57_344


def test_parts_by_hand() -> None:
    result = plan(SMALL, 24, 524_288, chunk_size=4096, resident_blocks=10)
    token = 2 * 8 * 128 * 2  # bytes of one layer
    device = result.device
    assert device.weights == 596_049_920 * 2
    assert device.store.ring == result.sizes.ring_entries * result.sizes.run_blocks * 1024 * token
    assert device.store.prefill == result.sizes.prefill_depth * 4096 * token
    assert device.store.decode == 28 * (1024 + 16) * token
    assert device.store.resident == 28 * 10 * 1024 * token
    assert device.runtime == RUNTIME_BYTES
    assert device.total == sum(
        (device.runtime, device.weights, device.states, device.activations, device.allocator, device.store.total)
    )
    assert result.host_blocks == -(-(524_288 + 256) // 1024) - 10 == 503
    assert result.host.kv == 503 * 1024 * 28 * token


@pytest.mark.parametrize("shape", [SMALL, SEVEN, SLIDING])
@pytest.mark.parametrize("gpu", [16, 24, 100])
@pytest.mark.parametrize("prompt", [1, 1000, 65_536, 1_000_000])
def test_what_is_planned_fits_and_fills_the_device(shape: ModelShape, gpu: float, prompt: int) -> None:
    result = plan(shape, gpu, prompt)
    assert result.device.total <= gpu * GIB
    full = len(result.kv.full_layers)
    if result.host.kv:
        spare, left = gpu * GIB // SPARE_PART, gpu * GIB - result.device.total
        assert left < spare + full * result.kv.block_bytes
        assert left >= spare or not result.sizes.resident_blocks
    assert result.host.kv + result.device.store.resident >= full * result.kv.token_bytes * result.tokens
    assert result.sizes.chunk_tokens % 1024 == 0


def test_the_device_is_the_same_at_every_length_but_for_resident_blocks() -> None:
    totals = {plan(SMALL, 24, length, resident_blocks=0).device.total for length in (65_536, 262_144, 524_288)}
    assert len(totals) == 1


def test_a_request_that_fits_the_device_is_kept_there_whole() -> None:
    result = plan(SMALL, 24, 65_536)
    assert (result.host.kv, result.host_blocks, result.resident_blocks) == (0, 0, 65)
    assert "nothing is copied" in result.reasons[2]


def test_the_chunk_is_as_large_as_wanted_where_memory_allows() -> None:
    result = plan(SMALL, 16, 524_288, 16)
    assert result.sizes.chunk_tokens == 33_792
    assert result.reasons[0] == (
        "chunk 33,792: attention hides loads from 6,245 tokens on, and larger passes start fewer kernels"
    )


def test_chunks_of_compiled_code_leave_little_of_the_prompt_over() -> None:
    for prompt, chunk in ((131_072, 32_768), (786_432, 32_768), (100_000, 32_768), (30_000, 29_696), (900, 1024)):
        compiled = Planner(SMALL, machine(80), PlanOptions(compiled=True)).plan(prompt, 16)
        assert compiled.sizes.chunk_tokens == chunk
        left = prompt % chunk
        assert left < 1024 * -(-prompt // chunk)
    given = Planner(SMALL, machine(80), PlanOptions(chunk_size=16_384, compiled=True)).plan(100_000, 16)
    assert given.sizes.chunk_tokens == 16_384


def test_reasons_speak_of_loads_only_where_there_are_any() -> None:
    assert plan(SMALL, 80, 131_072).reasons[0] == "chunk 33,792: larger passes start fewer kernels"
    assert plan(replace(SMALL, kinds=(WINDOW,) * 28, window=512), 24, 131_072).reasons[0] == (
        "chunk 33,792: larger passes start fewer kernels"
    )
    rates = replace(reference_rates(128), load=8e9)
    slow = Planner(SMALL, machine(16, rates=rates)).plan(524_288, 256)
    assert slow.reasons[0] == "chunk 33,792: the most; attention hides loads from 43,250 tokens on"


def test_a_smaller_chunk_is_taken_where_decoding_would_pay_for_the_larger() -> None:
    short, long = (plan(SEVEN, 24, 131_072, new) for new in (16, 16_384))
    assert short.sizes.chunk_tokens > long.sizes.chunk_tokens
    assert short.resident_blocks < long.resident_blocks
    assert "a larger chunk would take more from the resident blocks than it gains" in long.reasons[0]


def test_little_memory_makes_chunk_and_ring_smaller_and_says_so() -> None:
    result = plan(SEVEN, 15.6, 65_536)
    assert result.sizes.chunk_tokens < 4096
    assert "chunk" in result.reasons[0]
    assert result.device.total <= 15.6 * GIB


def test_what_the_user_fixed_is_kept() -> None:
    result = plan(SMALL, 24, 262_144, chunk_size=2048, resident_blocks=3, block_size=512)
    assert (result.sizes.chunk_tokens, result.resident_blocks, result.kv.block_size) == (2048, 3, 512)
    assert result.reasons[0] == "chunk 2,048: given"
    assert result.sizes.window_keep == 512


def test_of_what_the_user_fixed_no_more_is_taken_than_the_request_has_use_for() -> None:
    result = plan(SMALL, 24, 10_000, chunk_size=1 << 20, resident_blocks=1 << 20)
    assert (result.sizes.chunk_tokens, result.resident_blocks) == (10_240, 11)
    assert result.reasons[0] == "chunk 10,240: the whole prompt"
    assert "nothing is copied" in result.reasons[2]


def test_a_chunk_that_is_no_whole_number_of_blocks_is_refused() -> None:
    with pytest.raises(UsageError, match="chunk size 100 is not a multiple of the block size 64"):
        plan(SMALL, 24, 10_000, chunk_size=100, block_size=64)


def test_without_a_known_device_no_block_is_said_to_be_on_it() -> None:
    result = plan(SMALL, None, 65_536)
    assert result.reasons[2] == "no block of 65 a layer is counted on the device, whose memory is not known"


def test_what_is_measured_and_does_not_fit_is_planned_with_a_smaller_chunk() -> None:
    planner = Planner(SEVEN, machine(16.2))
    before = planner.plan(524_288, 256)
    use = MeasuredUse(runtime=before.device.runtime, allocator=before.device.allocator, activations=1 << 30)
    after = planner.again(before, use)
    assert after.sizes.chunk_tokens == before.sizes.chunk_tokens // 2
    assert 1 << 28 < after.device.activations < 1 << 30
    assert after.device.total <= 16.2 * GIB
    given = Planner(SEVEN, machine(16.2), PlanOptions(chunk_size=before.sizes.chunk_tokens))
    with pytest.raises(CapacityError):
        given.again(given.plan(524_288, 256), use)


def test_a_chunk_is_measured_within_what_the_host_has_for_loading() -> None:
    result = plan(SMALL, 24, 524_288)
    blocks = 16 + MEASURED_BLOCKS + 1  # a chunk, what comes before it and the open block
    assert result.host.measuring == result.host.first == blocks * 1024 * 114_688 > SMALL.weight_bytes
    assert plan(SEVEN, 24, 524_288).host.first == SEVEN.weight_bytes
    with pytest.raises(CapacityError, match=r"host memory \(2\.30 GiB for the chunk that is measured then"):
        Planner(SMALL, machine(24, 3), PlanOptions(chunk_size=16_384)).plan(20_000, 16)


def test_measured_activations_take_the_place_of_the_estimate() -> None:
    planner = Planner(SMALL, machine(24))
    before = planner.plan(524_288, 256)
    use = MeasuredUse(runtime=900 << 20, allocator=100 << 20, activations=before.device.activations + (2 << 30))
    after = planner.again(before, use)
    assert (after.device.runtime, after.device.allocator, after.device.activations) == (
        use.runtime,
        use.allocator,
        use.activations,
    )
    assert after.sizes.chunk_tokens == before.sizes.chunk_tokens
    more = use.runtime + use.allocator + use.activations
    less = before.device.runtime + before.device.allocator + before.device.activations
    blocks = (more - less) / (28 * before.kv.block_bytes)
    assert before.resident_blocks - after.resident_blocks in (int(blocks), int(blocks) + 1)
    assert after.device.total <= 24 * GIB
    assert after.host_blocks + after.resident_blocks == before.host_blocks + before.resident_blocks


def test_a_measured_step_takes_the_place_of_the_time_that_kernels_are_thought_to_take() -> None:
    planner = Planner(SMALL, machine(24))
    before = planner.plan(30_000, 256)
    assert before.prediction is not None and before.prediction.decode_bound == "starting kernels"
    after = planner.again(before, MeasuredUse(500 << 20, 0, 1 << 20, step_seconds=0.1))
    assert after.prediction is not None and after.prediction.decode_rate == pytest.approx(10)
    assert "decode about 10.0 tok/s" in str(correction(before, after))
    hybrid = Planner(find_shape("qwen3.5-0.8b"), machine(24))  # whose layers do not take the same time
    measured = hybrid.again(hybrid.plan(30_000, 256), MeasuredUse(500 << 20, 0, 1 << 20, step_seconds=0.1))
    assert measured.prediction is not None and measured.prediction.decode_rate == pytest.approx(10)


def test_a_chunk_that_takes_less_than_was_thought_leaves_more_blocks_on_the_device() -> None:
    planner = Planner(SMALL, machine(24))
    before = planner.plan(524_288, 256)
    after = planner.again(before, MeasuredUse(500 << 20, 0, before.device.activations // 2))
    assert after.resident_blocks > before.resident_blocks
    given = Planner(SMALL, machine(24), PlanOptions(resident_blocks=5))
    assert given.again(given.plan(524_288, 256), MeasuredUse(500 << 20, 0, 1 << 20)).resident_blocks == 5


def test_a_chunk_that_takes_more_than_there_is_is_refused_with_numbers() -> None:
    planner = Planner(SEVEN, machine(17))
    with pytest.raises(
        CapacityError,
        match=r"seven with 65,792 tokens needs 17\.\d GiB of GPU memory at least .* 2 GiB activations.* 17 GiB",
    ):
        planner.again(planner.plan(65_536, 256), MeasuredUse(1 << 30, 0, 2 << 30))


def test_a_short_prompt_needs_no_large_buffers() -> None:
    result = plan(SMALL, None, 1500)
    assert result.sizes.chunk_tokens == 2048
    assert result.sizes.run_blocks <= 2


def test_on_the_cpu_everything_is_one_memory_and_nothing_is_resident() -> None:
    result = Planner(SMALL, machine(None, 16, shared=True)).plan(65_536, 256)
    assert (result.resident_blocks, result.sizes.chunk_tokens, result.device.runtime) == (0, 4096, 0)
    with pytest.raises(CapacityError, match=r"needs .* GiB of host memory .* for weights, activations and buffers"):
        Planner(SMALL, machine(None, 8, shared=True)).plan(65_536, 256)


def one_line(shape: ModelShape, gpu: float | None, host: float, prompt: int, **options: Any) -> str:
    with pytest.raises(CapacityError) as caught:
        Planner(shape, machine(gpu, host), PlanOptions(**options)).plan(prompt, 256)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_cap_below_the_weights_is_refused() -> None:
    text = one_line(SEVEN, 8, 120, 1000)
    assert text == (
        "seven with 1,256 tokens needs 14.2 GiB of GPU memory for its weights and 768 MiB for CUDA, 6.94 GiB more than "
        "the 8 GiB that are usable (a test); give more, or take a smaller model"
    )


def test_a_device_too_small_for_any_buffers_is_refused_with_each_number() -> None:
    text = one_line(SMALL, 2, 120, 65_536)
    for part in ("at least (1.11 GiB weights", "CUDA and its allocator", "activations", "states and buffers)", "2 GiB"):
        assert part in text


def test_too_little_host_memory_is_refused_with_the_longest_prompt_that_fits() -> None:
    text = one_line(SMALL, 8, 64, 4 << 20)
    assert "small with 4,194,560 tokens needs" in text
    assert "more than the 64 GiB that are usable (a test; 0 B in reserve)" in text
    longest = Planner(SMALL, machine(8, 64)).longest_prompt(256)
    assert f"the longest prompt that fits is {longest:,} tokens, with 256 generated" in text
    plan_of = Planner(SMALL, machine(8, 64)).plan
    assert plan_of(longest, 256).host.total <= 64 * GIB
    with pytest.raises(CapacityError):
        plan_of(longest + 1, 256)


@pytest.mark.parametrize("shape", [SMALL, SLIDING])
@pytest.mark.parametrize(
    "options",
    [
        PlanOptions(),
        PlanOptions(block_size=64, slots=4),
        PlanOptions(chunk_size=1 << 20),
        PlanOptions(resident_blocks=1 << 20),
        PlanOptions(block_size=1000, chunk_size=3000, resident_blocks=7),
    ],
)
@pytest.mark.parametrize(("gpu", "host", "shared"), [(8, 20, False), (3, None, False), (None, 12, True)])
def test_the_longest_prompt_fits_and_none_that_is_longer(
    shape: ModelShape, options: PlanOptions, gpu: float | None, host: float | None, shared: bool
) -> None:
    planner = Planner(shape, machine(gpu, host, shared=shared), options)
    longest = planner.longest_prompt(256)
    if longest:
        assert planner.plan(longest, 256).prompt == longest
    if longest < SEARCH_LIMIT:
        with pytest.raises(CapacityError, match=f"{longest:,}" if longest else "no prompt fits"):
            planner.plan(longest + 1, 256)


def test_amounts_that_look_alike_are_told_apart() -> None:
    needed = plan(SMALL, None, 524_288).host.total
    text = one_line(SMALL, None, (needed - 4096) / GIB, 524_288)
    assert ", 4 KiB more than the " in text


def test_a_device_that_holds_shorter_prompts_is_refused_with_the_longest() -> None:
    options: dict[str, Any] = {"resident_blocks": 1 << 20}
    text = one_line(SMALL, 8, 120, 524_288, **options)
    assert re.search(
        r"small with 524,544 tokens needs .* GiB of GPU memory at least .*, 56\.1 GiB resident blocks\)", text
    )
    longest = Planner(SMALL, machine(8), PlanOptions(**options)).longest_prompt(256)
    assert longest > 40_000
    fits = f"the longest prompt that fits is {longest:,} tokens, with 256 generated"
    assert text.endswith(f"{fits}; a lower --resident-blocks leaves more room")
    assert plan(SMALL, 8, longest, **options).prompt == longest
    one_line(SMALL, 8, 120, longest + 1, **options)


def test_a_refusal_names_what_was_set_too_high() -> None:
    text = one_line(SMALL, 8, 120, 1 << 20, chunk_size=1 << 20, slots=3)
    assert text.endswith("a lower --chunk-size or --slots leaves more room")
    assert "small with 100,000 times 1,256 tokens needs" in (text := one_line(SMALL, 8, 120, 1000, slots=100_000))
    assert text.endswith("no prompt fits: give more, or lower --slots")
    assert one_line(SMALL, 8, 120, 1000, block_size=4 << 20).endswith("give more, or lower --block-size")
    assert one_line(SMALL, 2, 120, 1000).endswith("no prompt fits: give more, or take a smaller model")


@pytest.mark.parametrize(("gpu", "host"), [(8, 32), (None, 12)])
def test_new_tokens_that_leave_no_room_for_a_prompt_are_told_to_be_fewer(gpu: float | None, host: float) -> None:
    planner = Planner(SMALL, machine(gpu, host), PlanOptions())
    assert planner.longest_prompt(1) > 0
    with pytest.raises(CapacityError, match=r"no prompt fits: give more, or lower --max-new-tokens$"):
        planner.plan(10, 100_000_000)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"resident_blocks": 8}, set()),  # what does not stay on the device is on the host
        ({"chunk_size": 16384}, {"chunk_size"}),  # resident blocks take its place
        ({"chunk_size": 16384, "resident_blocks": 8}, set()),
        ({"resident_blocks": 8, "slots": 3}, {"slots"}),
    ],
)
def test_what_is_short_of_host_memory_is_told_to_lower_what_helps(options: dict[str, Any], named: set[str]) -> None:
    text = one_line(SMALL, 8, 32, 4 << 20, **options)
    assert " of host memory (" in text
    assert {name for name in options if f"--{name.replace('_', '-')}" in text.rpartition(";")[2]} == named
    lower = {"resident_blocks": 0, "chunk_size": 1024, "slots": 1}
    longest = Planner(SMALL, machine(8, 32), PlanOptions(**options)).longest_prompt(256)
    for name in options:
        changed = PlanOptions(**(options | {name: lower[name]}))
        assert (Planner(SMALL, machine(8, 32), changed).longest_prompt(256) > longest) is (name in named)


def test_weights_must_pass_through_host_memory() -> None:
    assert "14.2 GiB for the weights while they are loaded" in one_line(SEVEN, 24, 10, 1000)


def tensor_bytes(store: KVStore) -> dict[str, int]:
    """Bytes of the device buffers of a store, counted on their tensors."""
    parts = store._parts
    slots = range(len(store.slots))
    groups = {
        "ring": parts.ring.entries,
        "prefill": parts.prefill.all(),
        "decode": [b for slot in slots for b in parts.decode.of_slot(slot).values()],
        "resident": [b for slot in slots for b in parts.resident.of_slot(slot).values()],
        "window": [parts.windows.scratch(), *(b for slot in slots for b in parts.windows.of_slot(slot).values())],
    }
    return {name: sum(b.k.nbytes + b.v.nbytes for b in buffers) for name, buffers in groups.items()}


@pytest.mark.parametrize("resident", [0, 2, 5])
@pytest.mark.parametrize("slots", [1, 3])
def test_a_store_takes_exactly_what_is_planned(resident: int, slots: int) -> None:
    options = PlanOptions(block_size=16, chunk_size=64, resident_blocks=resident, slots=slots)
    result = Planner(SLIDING, machine(24), options).plan(250, 13)
    layout = KVLayout(SLIDING.layers, SLIDING.kv_heads, SLIDING.head_dim, torch.float32, 16)
    assert layout.shape == result.kv
    device = torch.device("cpu")
    store = KVStore(layout, result.sizes, transfer=CpuTransfer(), kernels=default_kernels(device))
    planned = result.device.store
    assert tensor_bytes(store) == {
        name: getattr(planned, name) for name in ("ring", "prefill", "decode", "resident", "window")
    }
    for slot in range(slots):
        store.announce(slot, result.tokens)
        with store.begin([(slot, 16)]):
            pass
        store._parts.host.grow(slot, result.tokens)
    assert store.host_bytes == result.host.kv


def test_resident_blocks_may_differ_by_layer() -> None:
    shape = SLIDING.kv(16)
    sizes = StoreSizes(resident_blocks={0: 3, 2: 1})
    assert sizes.device_bytes(shape).resident == 4 * shape.block_bytes
    assert sizes.host_bytes(shape, 40) == (0 + 2 + 3 + 3) * shape.block_bytes


def test_planning_does_not_load_torch() -> None:
    program = (
        "import sys; import longgen.kv.plan, longgen.kv.budget, longgen.kv.predict, longgen.names; "
        "longgen.names.known_models(); longgen.kv.budget.host_budget(); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
