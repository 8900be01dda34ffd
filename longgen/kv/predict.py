"""How long a planned request will take, and what bounds it. Pure arithmetic, without torch.

A chunk of c tokens after p earlier ones takes the longest of four things that run side by side:

    compute   attention FLOP / attention rate  +  merging the runs: 5 bytes * query channels * c * runs / memory rate
              + the larger of matrix FLOP / matrix rate and weight bytes / memory rate
              + traffic_bytes * c / memory rate
    loads     bytes of the past that is not resident / load rate
    offloads  bytes of the chunk's own K and V that are not resident / offload rate
    launches  started layers * layer seconds + runs read * RUN_PART of them, the host's time to start the kernels

Attention and matrix products run at 93% of their rates, which are measured over a moment: in longer work the card's
power limit lowers its clock. Decoding takes the longest of loads, launches, and reading the active weights and all K
and V from device memory.

Host memory is pinned beside all this, from before the prefill on; no prefill is faster than that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from longgen.costs import attention_flop, layer_flop, started_layers, traffic_bytes
from longgen.kv.shape import KVShape
from longgen.kv.sizes import StoreSizes
from longgen.model_shape import FULL, WINDOW, ModelShape

# Of eager modules, attention and an MLP: a decode step of 28 layers takes 16 to 22 ms on hosts of one kind, up to 50
# where they have other work. It takes a host as long as so many small operations alone: 70 to 118 of them, as seen.
LAYER_SECONDS = 0.7e-3
LAYER_STARTS = 85
RUN_PART = 0.1  # of a layer's time, to start a load, one attention call and its merge
HELD = 0.93  # of the FLOP rates of a moment, what a card at its power limit holds
MERGE_BYTES = 5  # moved per query channel and row to merge one run, by the Triton kernel: two at a time into the sum
CHUNKS_SUMMED = 256  # longer prompts are summed over this many evenly spaced chunks

# Measured on an H200 (PCIe 5 x16): attention through cuDNN by head size, matrix products, copies, and the device
# memory rate that eager modules reach.
H200_ATTENTION = ((64, 478e12), (128, 692e12), (256, 754e12))
H200_MATMUL = 790e12
H200_COPIES = 55.4e9
H200_MEMORY = 2.7e12
H200_PIN = 8.3e9  # on its host, a virtual machine of 16 cores; 13.6e9 on one of 32


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine does in a second.

    Attributes:
        attention, matmul: FLOP.
        load, offload: bytes copied to and from the device.
        memory: bytes of device memory moved.
        pin: bytes of host memory mapped, touched and pinned by background threads.
        source: where the numbers come from, for people.
        layer: seconds that the host takes to start the kernels of a layer of attention and an MLP.
    """

    attention: float
    matmul: float
    load: float
    offload: float
    memory: float
    pin: float
    source: str
    layer: float = LAYER_SECONDS


@dataclass(frozen=True, slots=True)
class Prediction:
    """prefill_seconds for the prompt, decode_rate in tokens a second after it, and what bounds each in words."""

    prefill_seconds: float
    prefill_bound: str
    decode_rate: float
    decode_bound: str


def reference_rates(head_dim: int) -> Rates:
    """The H200's, for attention heads of this size."""
    attention = min(H200_ATTENTION, key=lambda entry: abs(entry[0] - head_dim))[1]
    return Rates(attention, H200_MATMUL, H200_COPIES, H200_COPIES, H200_MEMORY, H200_PIN, "measured on an H200")


def given_rates(rates: Rates, *, attention: float | None, matmul: float | None, copies: float | None) -> Rates:
    """`rates` with what the user gave in its place. FLOP/s and bytes/s.

    Where only attention is given, matrix products and device memory are scaled with it.
    """
    if attention is None and matmul is None and copies is None:
        return rates
    scale = (attention or rates.attention) / rates.attention
    named = [name for name, value in (("--tflops", attention or matmul), ("--h2d-gbps", copies)) if value]
    return replace(
        rates,
        attention=attention or rates.attention,
        matmul=matmul or rates.matmul * scale,
        load=copies or rates.load,
        offload=copies or rates.offload,
        memory=rates.memory * scale,
        source=f"{' and '.join(named)} given, the rest {rates.source}",
    )


def balanced_chunk(shape: ModelShape, rates: Rates) -> float:
    """Tokens of a chunk whose attention takes as long as loading what it reads.

    A chunk does 4 * c * query channels FLOP for each 2 * KV channels * e bytes loaded.
    """
    flop_per_byte = 2 * shape.groups / shape.element_bytes
    return rates.attention / rates.load / flop_per_byte


def predict(
    shape: ModelShape,
    kv: KVShape,
    sizes: StoreSizes,
    rates: Rates,
    prompt: int,
    new_tokens: int,
    *,
    compiled: bool = False,
) -> Prediction:
    """The times of a request of `prompt` tokens and `new_tokens` more; decoding is rated at its middle.

    compiled: whether norms, rotary angles and MLPs are; prefill is then faster, decoding is rated as without.
    """
    seconds, bounds = _prefill(shape, kv, sizes, rates, prompt, compiled)
    bound = max(bounds, key=lambda name: bounds[name])
    pinning = sizes.host_bytes(kv, prompt) / rates.pin
    if pinning > seconds:
        seconds, bound = pinning, "pinning host memory"
    decode, decode_bound = _decode(shape, kv, sizes, rates, prompt + new_tokens // 2)
    return Prediction(seconds, bound, 1 / decode, decode_bound)


def _prefill(
    shape: ModelShape, kv: KVShape, sizes: StoreSizes, rates: Rates, prompt: int, compiled: bool
) -> tuple[float, dict[str, float]]:
    """Seconds in all, and the seconds of the chunks that each thing bounds."""
    chunks = -(-prompt // sizes.chunk_tokens)
    step = max(1.0, chunks / CHUNKS_SUMMED)
    seconds, done = 0.0, 0.0
    bounds: dict[str, float] = {}
    while done < chunks - 1e-9:
        weight = min(step, chunks - done)
        past = (done + (weight - 1) / 2) * sizes.chunk_tokens
        tokens = min(sizes.chunk_tokens, max(1, prompt - int(past)))
        full = tokens == sizes.chunk_tokens  # others run eager
        parts = chunk_parts(shape, kv, sizes, rates, tokens, past, compiled=compiled and full)
        name = max(parts, key=lambda key: parts[key])
        seconds += weight * parts[name]
        bounds[name] = bounds.get(name, 0.0) + weight * parts[name]
        done += weight
    return seconds, bounds


def chunk_parts(
    shape: ModelShape,
    kv: KVShape,
    sizes: StoreSizes,
    rates: Rates,
    tokens: int,
    past: float,
    *,
    compiled: bool = False,
) -> dict[str, float]:
    """Seconds of each of the things that run side by side in a chunk; see the module."""
    hosted = _hosted(kv, sizes, past)
    runs = hosted / (sizes.run_blocks * kv.block_size)
    layers = shape.count(FULL)
    merged = MERGE_BYTES * shape.q_heads * shape.head_dim * tokens * layers * (runs + min(1.0, past))
    weights = shape.element_bytes * _read_parameters(shape, tokens)
    compute = attention_flop(shape, tokens, past) / (HELD * rates.attention) + merged / rates.memory
    compute += max(layer_flop(shape, tokens) / (HELD * rates.matmul), weights / rates.memory)
    compute += traffic_bytes(shape, compiled=compiled) * tokens / rates.memory
    staged = _hosted(kv, sizes, past + tokens) - hosted
    return {
        "compute": compute,
        "loading KV from host memory": hosted * kv.cached_token_bytes / rates.load,
        "storing KV in host memory": staged * kv.cached_token_bytes / rates.offload,
        "starting kernels": _launches(shape, rates, runs),
    }


def _decode(shape: ModelShape, kv: KVShape, sizes: StoreSizes, rates: Rates, length: int) -> tuple[float, str]:
    """Seconds of one token after `length` others, and what bounds it."""
    hosted = _hosted(kv, sizes, length)
    runs = hosted / (sizes.run_blocks * kv.block_size)
    windows = shape.count(WINDOW) * min(shape.window or 0, length)
    read = length * kv.cached_token_bytes + windows * kv.token_bytes
    weights = shape.element_bytes * (_read_parameters(shape, 1) + shape.vocab * shape.hidden)
    parts = {
        "loading KV from host memory": hosted * kv.cached_token_bytes / rates.load,
        "reading GPU memory": (weights + read) / rates.memory,
        "starting kernels": _launches(shape, rates, runs),
    }
    name = max(parts, key=lambda key: parts[key])
    return parts[name], name


def _launches(shape: ModelShape, rates: Rates, runs: float) -> float:
    """Seconds that the host takes to start a pass whose full-attention layers read `runs` runs each from its memory."""
    return rates.layer * (started_layers(shape) + RUN_PART * shape.count(FULL) * runs)


def _resident_tokens(kv: KVShape, sizes: StoreSizes) -> float:
    """Tokens of a slot that stay on the device, on average over the layers."""
    resident = sizes.resident_by_layer(kv).values()
    return sum(resident) / max(1, len(resident)) * kv.block_size


def _hosted(kv: KVShape, sizes: StoreSizes, tokens: float) -> float:
    """Of a slot's first `tokens` tokens, those in host memory."""
    return max(0.0, tokens - _resident_tokens(kv, sizes))


def _read_parameters(shape: ModelShape, tokens: int) -> float:
    """Weights of the layers that a pass of `tokens` tokens reads; of experts, those that some token goes through."""
    experts = shape.experts
    if experts is None:
        return shape.active_parameters
    layers = len(shape.kinds) - len(experts.dense_layers)
    one = 3 * shape.hidden * experts.width * layers
    # The chance that an expert is left out by every token, for a router without a preference.
    used = experts.count * (1 - (1 - experts.active / experts.count) ** tokens)
    return shape.active_parameters + one * (used - experts.active)
