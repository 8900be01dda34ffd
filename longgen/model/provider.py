"""A Qwen text model over a Pass: transformers' own modules, our rotary angles, our recurrent states."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longgen.errors import UsageError
from longgen.kv.layout import AttentionLayer
from longgen.model.adapter import PassCache, cache_keyword
from longgen.model.checkpoint import CheckedFolder, load_model
from longgen.model.compiled import compile_layers
from longgen.model.fused import fuse_layers
from longgen.model.recurrence import choose_recurrence
from longgen.model.rope import ExactRotary
from longgen.model.states import Pass, RecurrentStates, StateSnapshot
from longgen.model.text_config import attention_layers, head_dim
from longgen.model.window import stretch_config


class Provider:
    """The model as the engine sees it: token ids and a Pass in, logits out.

    Args:
        model: a causal language model of transformers, loaded with `load_model`.
        config: its text config.
        slots: requests that may hold recurrent states at the same time.
    """

    def __init__(self, model: nn.Module, config: Any, *, slots: int = 1) -> None:
        self.model: Any = model
        self.config = config
        parameter = next(model.parameters())
        self.dtype: torch.dtype = parameter.dtype
        self.device: torch.device = parameter.device
        # The text model's rotary module is the only one; every layer receives its cos and sin.
        self.model.get_submodule("model").rotary_emb = ExactRotary(config, self.device)
        fuse_layers(model)
        self._cache_keyword = cache_keyword(model)
        self._layers = attention_layers(config)
        attending = {layer.index for layer in self._layers}
        self._recurrent_layers = tuple(i for i in range(config.num_hidden_layers) if i not in attending)
        self._states = (
            RecurrentStates(config, self._recurrent_layers, slots=slots, dtype=self.dtype, device=self.device)
            if self._recurrent_layers
            else None
        )
        self._token_major = bool(self._recurrent_layers) and choose_recurrence(model, self.dtype, self.device)
        chosen = getattr(config, "_experts_implementation", None)  # either, if the weights have served before
        self._batches_experts = self.device.type != "cpu" and chosen in ("grouped_mm", "batched_mm")

    @classmethod
    def load(
        cls,
        folder: Path | CheckedFolder,
        *,
        dtype: torch.dtype | None,
        device: torch.device,
        slots: int = 1,
        yarn_factor: float | None = None,
    ) -> Provider:
        """Loads a checkpoint folder; `dtype` None is the checkpoint's own.

        yarn_factor: how far YaRN stretches the window; None leaves that to the checkpoint.

        Raises CheckpointError if it is broken or of an unsupported kind.
        """
        model: Any = load_model(folder, dtype, device)
        if yarn_factor is not None:
            stretch_config(model.config, yarn_factor)
        return cls(model, model.config, slots=slots)

    def compile(self, sizes: Collection[int]) -> None:
        """Compiles norms, rotary angles and MLPs for passes of one slot and so many tokens; see `compiled.py`.

        Holds for every provider over the same weights.
        """
        compile_layers(self.model, sizes)

    def with_slots(self, slots: int) -> Provider:
        """The same weights with recurrent states of its own, for `slots` requests."""
        return Provider(self.model, self.config, slots=slots)

    @property
    def kv_heads(self) -> int:
        return self.config.num_key_value_heads

    @property
    def head_dim(self) -> int:
        return head_dim(self.config)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers keep a state that cannot be cropped, only restored."""
        return self._states is not None

    def layer_specs(self) -> tuple[AttentionLayer, ...]:
        """The layers whose K and V the store keeps, in model order."""
        return self._layers

    @torch.no_grad()
    def forward(self, pass_: Pass, ids: torch.Tensor, positions: torch.Tensor, keep: int = 1) -> torch.Tensor:
        """Runs the new tokens of a pass. K and V go to the pass, recurrent states become the slots' at its commit.

        Args:
            pass_: the pass that `ids` belong to: B slots of one token, or one slot of n.
            ids: int64 [B, n] token ids.
            positions: int64 [B, n], position of each token in its slot.
            keep: rows of logits to return, counted from the end.

        Returns:
            float32 [B, keep, vocab].

        Raises:
            UsageError: `ids` does not fit the pass, or `keep` is not between 1 and n.
        """
        batch, count = ids.shape
        if batch != len(pass_.slots) or any(tokens != count for tokens in pass_.tokens):
            raise UsageError(f"ids are {batch} x {count}, but the pass serves slots {pass_.slots} with {pass_.tokens}")
        if not 1 <= keep <= count:
            raise UsageError(f"keep={keep} rows of logits asked for from a pass of {count} tokens")
        self._choose_experts(batch * count)
        states = self._states.begin(pass_) if self._states is not None else None
        cache = PassCache(self.config.num_hidden_layers, self._recurrent_layers, states, token_major=self._token_major)
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=keep,
            longgen_pass=pass_,
            **{self._cache_keyword: cache},
        )
        return output.logits.float()

    def snapshot(self, slot_id: int) -> StateSnapshot:
        """A copy of the slot's recurrent states; an empty value for a model without them."""
        return self._states.snapshot(slot_id) if self._states is not None else StateSnapshot()

    def restore(self, slot_id: int, state: StateSnapshot) -> None:
        """Puts a snapshot back into a slot."""
        if self._states is not None:
            self._states.restore(slot_id, state)

    def reset(self, slot_id: int) -> None:
        """Forgets the slot's recurrent states."""
        if self._states is not None:
            self._states.reset(slot_id)

    def fill_random(self, slot_id: int, generator: torch.Generator) -> None:
        """Gives the slot random recurrent states; see KVStore.fill_random."""
        if self._states is not None:
            self._states.fill_random(slot_id, generator)

    def poison(self, slot_ids: Sequence[int] | None = None) -> None:
        """Fills the recurrent states of some slots (None: all) with NaN; `reset` makes a slot usable again.

        For tests of the reset."""
        if self._states is not None:
            self._states.poison(range(self._states.slots) if slot_ids is None else slot_ids)

    def _choose_experts(self, count: int) -> None:
        """Batched expert kernels for a single token, as transformers' `generate` takes for decoding; grouped ones for
        more, because the batched ones read an expert's weights again for each token that goes through it."""
        if self._batches_experts:
            wanted = "batched_mm" if count == 1 else "grouped_mm"
            if self.config._experts_implementation != wanted:
                self.model.set_experts_implementation(wanted)
