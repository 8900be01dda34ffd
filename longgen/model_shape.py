"""What a text model looks like, in numbers: enough to plan its memory and time, without torch or transformers."""

from __future__ import annotations

from dataclasses import dataclass

from longgen.kv.shape import AttentionLayer, KVShape

FULL, WINDOW, RECURRENT = "full", "window", "recurrent"
FAMILIES = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
DTYPE_BYTES = (("bfloat16", 2), ("float16", 2), ("float32", 4))


def dtype_bytes(dtype: str) -> int:
    """Bytes of one number of the type named."""
    return dict(DTYPE_BYTES)[dtype]


@dataclass(frozen=True, slots=True)
class Experts:
    """The feed-forward part of a mixture of experts.

    Attributes:
        count, active: experts in a layer, and those that one token goes through.
        width: intermediate size of one expert.
        shared_width: intermediate size of the expert that every token goes through; 0 is none.
        dense_layers: layers that have an ordinary MLP instead.
    """

    count: int
    active: int
    width: int
    shared_width: int = 0
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """The recurrent layers (GatedDeltaNet). kernel: width of their causal convolution, in tokens."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def conv_dim(self) -> int:
        """Channels that the convolution runs over: q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def state_bytes(self, element_bytes: int) -> int:
        """Bytes of one layer's states of one slot: the convolution's in the model's type, the delta rule's in fp32."""
        recurrent = 4 * self.value_heads * self.key_dim * self.value_dim
        return self.conv_dim * self.kernel * element_bytes + recurrent


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A text model.

    Attributes:
        name: what to call it.
        kinds: of every layer, "full" or "window" attention or "recurrent".
        hidden, vocab: sizes.   mlp: intermediate size of the ordinary MLP.
        q_heads, kv_heads, head_dim: of the attention layers.
        window: keys a query of a window layer sees.
        tied: the head shares the embedding's weights.
        gated: the attention's output is gated, by as many more query channels.
        query_norm: queries and keys are normalised by head.
        qkv_bias, output_bias: biases of the attention's projections.
        trained_window: tokens the model was made for, YaRN included.
        dtype: of its weights.
        family: the model type, without `_text`.
    """

    name: str
    kinds: tuple[str, ...]
    hidden: int
    vocab: int
    mlp: int
    q_heads: int
    kv_heads: int
    head_dim: int
    trained_window: int
    window: int | None = None
    experts: Experts | None = None
    delta: DeltaRule | None = None
    tied: bool = False
    gated: bool = False
    query_norm: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    dtype: str = "bfloat16"
    family: str = "qwen3"

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        """The attention layers, in model order."""
        return tuple(
            AttentionLayer(index, self.window if kind == WINDOW else None)
            for index, kind in enumerate(self.kinds)
            if kind != RECURRENT
        )

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight, and of one number of K or V."""
        return dtype_bytes(self.dtype)

    @property
    def groups(self) -> float:
        """Query heads per KV head."""
        return self.q_heads / self.kv_heads

    def kv(self, block_size: int) -> KVShape:
        """The shape of its KV cache."""
        return KVShape(self.layers, self.kv_heads, self.head_dim, self.element_bytes, block_size)

    def count(self, kind: str) -> int:
        """Layers of a kind."""
        return self.kinds.count(kind)

    @property
    def parameters(self) -> int:
        """Weights of the text model, embedding and head included."""
        ends = self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden
        return ends + sum(
            2 * self.hidden + self._mixer(kind) + self._feed_forward(index) for index, kind in enumerate(self.kinds)
        )

    @property
    def active_parameters(self) -> int:
        """Weights of the layers that one token is multiplied with: only its experts, no embedding and no head."""
        return sum(self._mixer(kind) + self._feed_forward(index, active=True) for index, kind in enumerate(self.kinds))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in the model's type."""
        return self.parameters * self.element_bytes

    def state_bytes(self, slots: int) -> int:
        """Bytes of the recurrent states of all slots."""
        return 0 if self.delta is None else slots * self.count(RECURRENT) * self.delta.state_bytes(self.element_bytes)

    def _mixer(self, kind: str) -> int:
        return self._delta_rule() if kind == RECURRENT else self._attention()

    def _attention(self) -> int:
        queries, keys = self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        projected = queries * (2 if self.gated else 1) + 2 * keys
        weights = self.hidden * (projected + queries)
        weights += (projected if self.qkv_bias else 0) + (self.hidden if self.output_bias else 0)
        return weights + (2 * self.head_dim if self.query_norm else 0)

    def _delta_rule(self) -> int:
        assert self.delta is not None, "a model with recurrent layers has a delta rule"
        delta, values = self.delta, self.delta.value_heads * self.delta.value_dim
        projections = self.hidden * (delta.conv_dim + values + 2 * delta.value_heads) + values * self.hidden
        return projections + delta.conv_dim * delta.kernel + 2 * delta.value_heads + delta.value_dim

    def _feed_forward(self, layer: int, active: bool = False) -> int:
        experts = self.experts
        if experts is None or layer in experts.dense_layers:
            return 3 * self.hidden * self.mlp
        routed = (experts.active if active else experts.count) * 3 * self.hidden * experts.width
        shared = 3 * self.hidden * experts.shared_width + (self.hidden if experts.shared_width else 0)
        return experts.count * self.hidden + routed + shared
