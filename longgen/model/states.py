"""Recurrent and convolution states of gated-delta layers, kept per slot beside the KV cache.

A slot's state of zeros means "nothing seen yet": a causal convolution pads with zeros and the delta rule starts from
zero, so no flag says whether a state exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from longgen.errors import SlotError
from longgen.kv.passes import Participant


class Pass(Protocol):
    """What the model needs of one forward pass; the KV store implements it."""

    @property
    def slots(self) -> tuple[int, ...]: ...

    @property
    def lengths(self) -> tuple[int, ...]: ...

    @property
    def tokens(self) -> tuple[int, ...]: ...

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor: ...

    def enlist(self, participant: Participant) -> None: ...


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """A slot's states at one moment, copied: `tensors` is empty for a model without recurrent layers."""

    tensors: tuple[torch.Tensor, ...] = ()


class RecurrentStates:
    """The states of every slot, allocated once.

    conv:      [layers, slots, conv_dim, kernel] in the model's dtype: the last `kernel` inputs of the convolution.
    recurrent: [layers, slots, value_heads, key_dim, value_dim] in float32, as the delta rule computes it.

    Args:
        config: transformers text config of a hybrid model.
        layers: model indices of its recurrent layers, in order.
        slots: number of slots.
        dtype, device: of the model.
    """

    def __init__(
        self, config: Any, layers: Sequence[int], *, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        conv_dim = 2 * key_heads * key_dim + value_heads * value_dim
        kernel = config.linear_conv_kernel_dim
        self.layers = tuple(layers)
        self.slots = slots
        self.conv = torch.zeros(len(self.layers), slots, conv_dim, kernel, dtype=dtype, device=device)
        self.recurrent = torch.zeros(
            len(self.layers), slots, value_heads, key_dim, value_dim, dtype=torch.float32, device=device
        )

    def begin(self, pass_: Pass) -> PassStates:
        """Copies of the states of the pass's slots, which become theirs when the pass is committed."""
        for slot in pass_.slots:
            self._check(slot)
        states = PassStates(self, pass_.slots, pass_.tokens)
        pass_.enlist(states)
        return states

    def snapshot(self, slot_id: int) -> StateSnapshot:
        """A copy of the slot's states, independent of what happens to the slot later."""
        self._check(slot_id)
        return StateSnapshot((self.conv[:, slot_id].clone(), self.recurrent[:, slot_id].clone()))

    def restore(self, slot_id: int, snapshot: StateSnapshot) -> None:
        """Puts a snapshot (of any slot of this model) into the slot."""
        self._check(slot_id)
        conv, recurrent = snapshot.tensors
        self.conv[:, slot_id].copy_(conv)
        self.recurrent[:, slot_id].copy_(recurrent)

    def reset(self, slot_id: int) -> None:
        """Makes the slot's states zero, whatever they held."""
        self._check(slot_id)
        self.conv[:, slot_id].zero_()
        self.recurrent[:, slot_id].zero_()

    def fill_random(self, slot_id: int, generator: torch.Generator) -> None:
        """Makes the slot's states standard normal. generator: on the states' device."""
        self._check(slot_id)
        self.conv[:, slot_id].normal_(generator=generator)
        self.recurrent[:, slot_id].normal_(generator=generator)

    def poison(self, slot_ids: Sequence[int]) -> None:
        """Fills the states of some slots with NaN, so that a read without a reset shows in the result."""
        for slot_id in slot_ids:
            self.conv[:, slot_id].fill_(float("nan"))
            self.recurrent[:, slot_id].fill_(float("nan"))

    def _check(self, slot_id: int) -> None:
        if not 0 <= slot_id < self.slots:
            raise SlotError(f"slot {slot_id} has no recurrent states: the model was loaded with {self.slots} slots")


class PassStates:
    """The working copies of one pass. The forward writes into them in place; the slots change only at commit.

    conv [layers, B, conv_dim, kernel] and recurrent [layers, B, value_heads, key_dim, value_dim], B in slot order.
    """

    def __init__(self, states: RecurrentStates, slots: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        self._states = states
        self._tokens = tokens
        self._slots = slots
        # Slices, not an index tensor: the host would wait for that one's copy to the device.
        self.conv = torch.stack([states.conv[:, slot] for slot in slots], dim=1)
        self.recurrent = torch.stack([states.recurrent[:, slot] for slot in slots], dim=1)

    def prepare(self, accepted: tuple[int, ...]) -> None:
        """Raises SlotError unless every token is accepted: a recurrent state cannot be wound back."""
        if tuple(accepted) != tuple(self._tokens):
            raise SlotError(
                f"accepted {list(accepted)} of {list(self._tokens)} tokens, but this model's recurrent layers cannot "
                "give tokens back: abort the pass, and run the accepted tokens again"
            )

    def commit(self, accepted: tuple[int, ...]) -> None:
        for row, slot in enumerate(self._slots):
            self._states.conv[:, slot] = self.conv[:, row]
            self._states.recurrent[:, slot] = self.recurrent[:, row]

    def abort(self) -> None:
        """Nothing to undo: the slots' own states were never written."""
