"""How transformers' modules are made to use a Pass: an attention function, a mask function and a Cache.

The Pass travels as the keyword `longgen_pass` of the model's forward and reaches every attention call. Nothing here
remembers it between calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from longgen.model.states import Pass, PassStates

ATTENTION_NAME = "longgen"


def register_attention() -> None:
    """Makes `attn_implementation="longgen"` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, _attend)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    *,
    longgen_pass: Pass,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """One attention call: q [B, Hq, n, D], k and v [B, Hkv, n, D] of the new tokens -> [B, n, Hq, D].

    A window that transformers passes is ignored, because not every model passes its own: the store knows the windows.
    """
    layer: Any = module.layer_idx
    return longgen_pass.attend(layer, query, key, value, scaling), None


def _no_mask(*_: Any, **__: Any) -> None:
    """No mask is ever built: a quadratic one would not fit, and the Pass masks by position."""


class _PassedOn(CacheLayerMixin):
    """A cache layer that keeps nothing: the attention call receives the new K and V and the Pass stores them."""

    is_sliding = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class _Recurrent(LinearAttentionLayer):
    """A cache layer over the pass's working copies: conv [B, conv_dim, kernel], recurrent [B, Hv, Dk, Dv].

    token_major: whether the convolution's input is laid out as the projection writes it, channels side by side.
    """

    def __init__(self, conv: torch.Tensor, recurrent: torch.Tensor, *, token_major: bool) -> None:
        super().__init__()
        self._token_major = token_major
        self.dtype, self.device = conv.dtype, conv.device
        self.conv_states[0], self.recurrent_states[0] = conv, recurrent
        self.conv_kernel_size[0] = conv.shape[-1]
        self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = True
        self.has_previous_state[0] = True

    def update_conv_state(self, conv_states: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        """[B, conv_dim, kernel + n]: the inputs before, and those of the pass [B, conv_dim, n]; keeps the last."""
        if not self._token_major:
            return super().update_conv_state(conv_states, *arguments, **options)
        before = self.conv_states[0]
        first = before.transpose(1, 2).contiguous()  # torch's fast kernel for cat takes contiguous tensors only
        both = torch.cat([first, conv_states.transpose(1, 2)], dim=1).transpose(1, 2)
        before.copy_(both[..., -before.shape[-1] :])
        return both


class PassCache(Cache):
    """The cache of one forward: new for every pass, so that nothing in it can outlive one.

    Args:
        layers: layers of the model.
        recurrent_layers: model indices of the recurrent ones, in the order of `states`.
        states: the pass's working copies, None for a model without recurrent layers.
        token_major: whether a convolution reads tokens one after another rather than channels.
    """

    def __init__(
        self,
        layers: int,
        recurrent_layers: Sequence[int] = (),
        states: PassStates | None = None,
        *,
        token_major: bool = False,
    ) -> None:
        place = {layer: row for row, layer in enumerate(recurrent_layers)}
        super().__init__(
            layers=[
                _Recurrent(states.conv[place[i]], states.recurrent[place[i]], token_major=token_major)
                if states is not None and i in place
                else _PassedOn()
                for i in range(layers)
            ]
        )


def cache_keyword(model: nn.Module) -> str:
    """What this version of transformers calls the cache argument: `past_key_values`, later `cache`."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
