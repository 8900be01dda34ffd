"""What a forward pass costs: bytes of activations, bytes moved, FLOP. Estimates from a model's shape alone.

e is the bytes of one number, h the hidden size, A = query heads * head size, K = KV heads * head size, i the MLP's
intermediate size, k the active experts, V the delta rule's value heads * head size.
"""

from __future__ import annotations

from dataclasses import dataclass

from longgen.model_shape import FULL, RECURRENT, WINDOW, ModelShape

DELTA_CHUNK = 64  # tokens that the delta rule's chunked form works on at once
# What a host takes longer to start a layer with a delta rule, or with experts, than one of attention and an MLP: a
# token of a Qwen3.5-0.8B and of a Qwen3-30B-A3B shape beside one of Qwen3-0.6B, in small operations started meanwhile.
HEAVIER = 0.8


@dataclass(frozen=True, slots=True)
class Activations:
    """Device bytes that a pass holds besides weights and store buffers: fixed + per_token * tokens of the pass."""

    fixed: int
    per_token: int

    def bytes(self, tokens: int) -> int:
        return self.fixed + self.per_token * tokens


def estimate_activations(shape: ModelShape, slots: int = 1) -> Activations:
    """The largest sum of tensors alive at once in a layer, as counted on transformers' own modules.

    Fixed: the logits of one row (model's type and fp32), and a pass's copy of its recurrent states.
    """
    logits = shape.vocab * (shape.element_bytes + 4)
    phases = [_norm(shape)]
    if shape.count(FULL) + shape.count(WINDOW):
        phases.append(_attention(shape))
    if shape.delta is not None:
        phases.append(_delta_rule(shape))
    if shape.experts is None or shape.experts.dense_layers:
        phases.append(_held(shape, 4) + 3 * shape.element_bytes * shape.mlp)
    if shape.experts is not None:
        phases.append(_experts(shape))
    return Activations(logits + shape.state_bytes(slots), max(phases))


def _held(shape: ModelShape, hidden: int) -> int:
    """What is alive in every phase: `hidden` tensors of the hidden size, cos and sin, ids and positions."""
    return shape.element_bytes * (hidden * shape.hidden + 2 * shape.head_dim) + 32


def _norm(shape: ModelShape) -> int:
    return _held(shape, 3) + 12 * shape.hidden  # three fp32 copies, where torch has no kernel for it


def _attention(shape: ModelShape) -> int:
    """q, the partial result and the gate; k and v; the merged result and a term of it in fp32, or in the place of that
    term another partial result and the output; four LSEs."""
    queries, keys, e = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.element_bytes
    rows = (3 if shape.gated else 2) * e * queries + 2 * e * keys
    return _held(shape, 3) + rows + 8 * queries + 16 * shape.q_heads


def _delta_rule(shape: ModelShape) -> int:
    """transformers' own chunked form, all in fp32: three [chunk, chunk] matrices a head, and twelve copies of q, k, v
    and what is made of them. Fused kernels, where they are installed, need less."""
    assert shape.delta is not None
    delta, e = shape.delta, shape.element_bytes
    values = delta.value_heads * delta.value_dim
    fp32 = 4 * delta.value_heads * (3 * DELTA_CHUNK + 12 * max(delta.key_dim, delta.value_dim))
    return _held(shape, 3) + fp32 + e * (2 * delta.conv_dim + values)


def _experts(shape: ModelShape) -> int:
    """A token's row for each expert it goes through, before, between and after the two products."""
    assert shape.experts is not None
    experts, e = shape.experts, shape.element_bytes
    rows = experts.active * e
    routed = max(4 * rows * shape.hidden, rows * (shape.hidden + 4 * experts.width))
    return _held(shape, 4) + max(routed, 3 * e * experts.shared_width) + 12 * experts.count


def traffic_bytes(shape: ModelShape, *, compiled: bool = False) -> int:
    """Device memory read and written per token by everything but attention itself and the weights.

    Eager modules, counted operation by operation: a norm moves 4 bytes a number (20 if it scales by 1 + weight, in
    fp32), a rotation 10, gated products 10, a residual 6, plus what matrix products read and write. On a Qwen3-0.6B
    shape this is 4.3 MB a token, and with the products' own time 0.36 s for 131,072 tokens, where 0.40 s was measured
    on an H200. Compiled, norms and rotations move 4 bytes a number and gated products 6. The delta rule and its
    convolution count as many as the time of flash-linear-attention's kernels comes to. Merging partial attention is not
    part of it (`kv/predict.py`).
    """
    attending = shape.count(FULL) + shape.count(WINDOW)
    norm = _norm_traffic(shape, compiled)
    total = len(shape.kinds) * (2 * norm + 12 + 4) * shape.hidden + attending * _attention_traffic(shape, compiled)
    if shape.delta is not None:
        values = shape.delta.value_heads * shape.delta.value_dim
        total += shape.count(RECURRENT) * (2 * shape.hidden + 40 * (shape.delta.conv_dim + values))
    dense = len(shape.kinds)
    if shape.experts is not None:
        dense, experts = len(shape.experts.dense_layers), shape.experts
        rows = experts.active * (16 * experts.width + 8 * shape.hidden) + 16 * experts.shared_width
        total += (len(shape.kinds) - dense) * (rows + 12 * experts.count)
    return total + dense * ((12 if compiled else 16) * shape.mlp + 6 * shape.hidden)


def _attention_traffic(shape: ModelShape, compiled: bool) -> int:
    queries, keys = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rotation = 4 if compiled else 10
    normed = _norm_traffic(shape, compiled) * (queries + keys) if shape.query_norm else 0
    return normed + rotation * (queries + keys) + 4 * queries + 12 * keys + 8 * shape.hidden


def _norm_traffic(shape: ModelShape, compiled: bool) -> int:
    """Bytes a number; the models with a delta rule are those whose norms scale by 1 + weight."""
    return 20 if shape.delta is not None and not compiled else 4


def started_layers(shape: ModelShape) -> float:
    """Layers of attention and an MLP that a host takes as long to start as it takes for all of this model's."""
    sparse = 0 if shape.experts is None else len(shape.kinds) - len(shape.experts.dense_layers)
    return len(shape.kinds) + HEAVIER * (shape.count(RECURRENT) + sparse)


def layer_flop(shape: ModelShape, tokens: int) -> float:
    """FLOP of the matrix products of `tokens` tokens, without attention: two a weight and token."""
    flop = 2.0 * shape.active_parameters * tokens
    if shape.delta is not None:
        delta = shape.delta
        inner = 6 * delta.key_dim * delta.value_dim + 4 * DELTA_CHUNK * (delta.key_dim + delta.value_dim)
        flop += shape.count(RECURRENT) * delta.value_heads * inner * tokens
    return flop


def attention_flop(shape: ModelShape, tokens: int, past: float) -> float:
    """FLOP of attention of `tokens` new tokens over `past` earlier ones and, causally, themselves: four a query
    channel and key that it sees."""
    pairs = shape.count(FULL) * _seen_keys(tokens, past, None) + shape.count(WINDOW) * _seen_keys(
        tokens, past, shape.window
    )
    return 4.0 * shape.q_heads * shape.head_dim * pairs


def _seen_keys(tokens: int, past: float, window: int | None) -> float:
    """Keys that each of `tokens` queries after `past` others sees, summed: position p sees p + 1, at most `window`."""
    seen = tokens * past + tokens * (tokens + 1) / 2
    if window is None:
        return seen
    hiding = min(tokens, max(0.0, past + tokens - window))  # the last queries, which see fewer than all before them
    return seen - hiding * (past + tokens - window) + hiding * (hiding - 1) / 2


def head_flop(shape: ModelShape, rows: int) -> float:
    """FLOP of the logits of `rows` tokens."""
    return 2.0 * shape.vocab * shape.hidden * rows


def step_read_bytes(shape: ModelShape, past: int) -> float:
    """Device bytes that decoding one token after `past` others reads: the weights it goes through, K and V of the
    keys it sees, and recurrent states."""
    weights = (shape.active_parameters + shape.vocab * shape.hidden) * shape.element_bytes
    keys = shape.count(FULL) * past + shape.count(WINDOW) * min(past, shape.window or past)
    return float(weights + keys * shape.kv(1).token_bytes + shape.state_bytes(1))
