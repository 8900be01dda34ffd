"""The figures of a row for known models, against arithmetic written out here from the models' own sizes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longgen.benchmarking.ceilings import Ceilings
from longgen.benchmarking.measuring import Measured
from longgen.benchmarking.rows import cell, make_row
from longgen.costs import head_flop, layer_flop
from longgen.engine import Engine, EngineOptions
from longgen.kv.counters import Counters
from longgen.kv.sizes import StoreSizes
from longgen.model.from_shape import random_provider
from longgen.model_shape import FULL, RECURRENT, DeltaRule, ModelShape
from longgen.planning.plans import find_shape

TOKENS, CHUNK = 131_072, 8192
PAIRS = 131_072 * 131_073 // 2  # of a query and a key that it sees, in one head of one layer
# Of an H200, about.
CEILINGS = Ceilings(55.0, 54.0, 50.0, 700.0, "fast", {"fast": 700.0}, 750.0, 4200.0, None)


@dataclass(frozen=True)
class ByHand:
    """attention: FLOP of a prefill of TOKENS tokens.   weights: that a token is multiplied with in all layers.
    more: FLOP of a token besides these.   head: weights of the logits.   kv: bytes of a token in all layers.
    states: bytes of a slot's recurrent states."""

    attention: int
    weights: int
    head: int
    kv: int
    more: int = 0
    states: int = 0


KNOWN = {
    # 28 layers, hidden 1024, 16 query and 8 KV heads of 128, MLP 3072; two norms of 128.
    "qwen3-0.6b": ByHand(
        attention=28 * 4 * 16 * 128 * PAIRS,
        weights=28 * (1024 * 2048 + 2 * 1024 * 1024 + 2048 * 1024 + 3 * 1024 * 3072 + 2 * 128),
        head=151_936 * 1024,
        kv=28 * 2 * 8 * 128 * 2,
    ),
    # 28 layers, hidden 3584, 28 query and 4 KV heads of 128, MLP 18944; q, k and v have biases, and no norms.
    "qwen2.5-7b-1m": ByHand(
        attention=28 * 4 * 28 * 128 * PAIRS,
        weights=28 * (3584 * 3584 + 2 * 3584 * 512 + 3584 * 3584 + 3 * 3584 * 18_944 + 3584 + 2 * 512),
        head=152_064 * 3584,
        kv=28 * 2 * 4 * 128 * 2,
    ),
    # 6 of 24 layers attend: 8 query heads of 256 with a gate, 2 KV heads. 18 are recurrent, 16 heads of 128 and 128: q,
    # k, v and z of 2048 each, two numbers a head for decay and beta, a convolution of width 4 over q, k and v. Of the
    # delta rule: three products with a state of 128 x 128 a token, and, in chunks of 64, four products of 64 with keys
    # or values.
    "qwen3.5-0.8b": ByHand(
        attention=6 * 4 * 8 * 256 * PAIRS,
        weights=(
            6 * (1024 * 2 * 2048 + 2 * 1024 * 512 + 2048 * 1024 + 2 * 256)
            + 18 * (1024 * (4 * 2048 + 2 * 16) + 2048 * 1024 + 4 * 3 * 2048 + 2 * 16 + 128)
            + 24 * 3 * 1024 * 3584
        ),
        head=248_320 * 1024,
        kv=6 * 2 * 2 * 256 * 2,
        more=18 * 16 * (3 * 2 * 128 * 128 + 2 * 2 * 64 * (128 + 128)),
        states=18 * (4 * 3 * 2048 * 2 + 16 * 128 * 128 * 4),
    ),
    # 10 of 40 layers attend; every layer has 256 experts of 512, of which 8 are taken, and one that all tokens take.
    "qwen3.5-35b-a3b": ByHand(
        attention=10 * 4 * 16 * 256 * PAIRS,
        weights=(
            10 * (2048 * 2 * 4096 + 2 * 2048 * 512 + 4096 * 2048 + 2 * 256)
            + 30 * (2048 * (8192 + 4096 + 2 * 32) + 4096 * 2048 + 4 * 8192 + 2 * 32 + 128)
            + 40 * (256 * 2048 + (8 + 1) * 3 * 2048 * 512 + 2048)
        ),
        head=248_320 * 2048,
        kv=10 * 2 * 2 * 256 * 2,
        more=30 * 32 * (3 * 2 * 128 * 128 + 2 * 2 * 64 * (128 + 128)),
        states=30 * (4 * 8192 * 2 + 32 * 128 * 128 * 4),
    ),
}


@pytest.mark.parametrize("resident", [0, 100, 128])
@pytest.mark.parametrize("name", KNOWN)
def test_a_row_is_what_arithmetic_by_hand_gives(name: str, resident: int) -> None:
    shape, known = find_shape(name), KNOWN[name]
    outside = (128 - resident) * 1024 * known.kv  # bytes of the blocks that a step loads
    loaded = sum(max(8 * chunk - resident, 0) for chunk in range(16)) * 1024 * known.kv
    measured = Measured(
        tokens=TOKENS,
        pin_seconds=1.0,
        host_bytes=outside,
        prefills=(9.0, 5.0, 4.0),
        prefill=Counters(h2d_bytes=loaded, d2h_bytes=outside),
        steps=(0.3, 0.5, 0.4, 9.0),
        step_loaded=outside,
        copy_bytes=1 << 25 if outside else None,
        copy_rate=54e9 if outside else None,
        device_peak=None,
        host_peak=0,
    )
    row = make_row(shape, shape.kv(1024), StoreSizes(chunk_tokens=CHUNK, resident_blocks=resident), measured, CEILINGS)
    linear = TOKENS * (2 * known.weights + known.more) + 16 * 2 * known.head
    roofline = known.attention / 700e12 + linear / 750e12
    check(
        row,
        {
            "prefill.seconds": 5.0,
            "prefill.attention_flop": known.attention,
            "prefill.linear_flop": linear,
            "prefill.roofline_s": roofline,
            "prefill.times_roofline": 5.0 / roofline,
            "prefill.tflops": (known.attention + linear) / 5.0 / 1e12,
            "prefill.attention_tflops": known.attention / 5.0 / 1e12,
            "prefill.of_attention": known.attention / 5.0 / 700e12,
            "prefill.copied_gbps": (loaded + outside) / 5.0 / 1e9,
            "prefill.of_wire": wire_seconds(loaded, outside) / 5.0,
        },
    )
    read = 2 * (known.weights + known.head) + TOKENS * known.kv + known.states
    step = max(outside / 54e9, read / 4200e9)
    check(
        row,
        {
            "decode.ms_per_token": 450.0,
            "decode.read_bytes": read,
            "decode.of_device": read / 0.45 / 4200e9,
            "decode.of_wire": outside / 0.45 / 54e9 if outside else None,
            "decode.roofline_ms": step * 1e3,
            "decode.times_roofline": 0.45 / step,
        },
    )


def wire_seconds(loaded: int, offloaded: int) -> float:
    """Of a prefill, which loads more than it offloads, or nothing of both, or offloads alone."""
    if loaded > offloaded:
        return offloaded / 50e9 + (loaded - offloaded) / 55e9
    return loaded / 50e9 + (offloaded - loaded) / 54e9


def check(row: dict[str, object], expected: dict[str, float | None]) -> None:
    found = {path: cell(row, path) for path in expected}
    assert found == {
        path: value if value is None else pytest.approx(value, rel=1e-12) for path, value in expected.items()
    }


@pytest.mark.parametrize("kinds", [(FULL, FULL), (RECURRENT, FULL)])
def test_the_products_that_torch_counts_in_a_prefill_are_those_of_the_formula(kinds: tuple[str, ...]) -> None:
    delta = DeltaRule(2, 4, 32, 32, 4) if RECURRENT in kinds else None
    family = "qwen3_5" if delta else "qwen3"
    shape = ModelShape(
        "tiny", kinds, 64, 320, 96, 4, 2, 16, 32768, delta=delta, gated=bool(delta), dtype="float32", family=family
    )
    options = EngineOptions(block_size=64, chunk_size=64, ring_blocks=2)
    engine = Engine.over(random_provider(shape, torch.device("cpu")), options)
    tokens, chunks = 256, 4
    with FlopCounterMode(display=False) as counter:
        engine.prefill(list(range(tokens)), new_tokens=1)
    counted = counter.get_flop_counts()["Global"]
    rule = 4 * (6 * 32 * 32 + 4 * 64 * (32 + 32)) * tokens if delta else 0
    # Norms by head, biases of the delta rule and its convolution are no matrix products.
    small = tokens * 2 * (kinds.count(FULL) * 2 * 16 + kinds.count(RECURRENT) * (4 * 256 + 2 * 4 + 32))
    linear, head = layer_flop(shape, tokens) - rule - small, head_flop(shape, chunks)
    # The logits of one row are a product of matrices or of a batch of one.
    assert head == chunks * 2 * 64 * 320 and counted[torch.ops.aten.mm] - linear in (0, head)
    if not delta:  # whose rule is made of batches of products too
        assert sum(counted.values()) == linear + head
