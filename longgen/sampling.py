"""From one row of logits to one token id.

The order and the meaning of the settings are those of transformers' logits processors: repetition penalty, temperature,
top-k, top-p, min-p. Everything runs on the CPU with a generator of its own, so that a draw depends on the seed and the
logits alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longgen.errors import LongGenError, UsageError


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How the next token is chosen.

    temperature: 0 takes the most likely token (greedy); above 0 divides the logits and samples.
    top_k: keep the k most likely tokens (and ties with the last of them); 0 keeps all.
    top_p: keep the smallest set of most likely tokens whose probabilities reach this sum, in (0, 1]; 1 keeps all.
    min_p: keep tokens at least this fraction as likely as the most likely one, in [0, 1]; 0 keeps all.
    repetition_penalty: divide positive and multiply negative logits of tokens seen before, prompt included; 1 is off.

    Raises UsageError for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        _require("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 or more")
        _require("top_k", self.top_k, isinstance(self.top_k, int) and self.top_k >= 0, "a whole number, 0 or more")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "between 0 and 1")
        _require("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty < math.inf, "above 0")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


class Sampler:
    """Chooses the tokens of one request."""

    def __init__(self, settings: SamplingSettings, seed: int) -> None:
        self.settings = settings
        self._generator = torch.Generator(device="cpu").manual_seed(seed)
        self._seen = torch.zeros(0, dtype=torch.bool)

    def observe(self, ids: Sequence[int] | Tensor) -> None:
        """Count token ids (any integer sequence, or an integer tensor of any shape) as seen before."""
        if self.settings.repetition_penalty == 1:
            return
        ids = torch.as_tensor(ids, dtype=torch.int64).reshape(-1).cpu()
        if ids.numel() == 0:
            return
        self._grow_seen(int(ids.max()) + 1)
        self._seen[ids] = True

    def sample(self, logits: Tensor) -> int:
        """Choose a token id from logits[vocab] (float32, any device) and observe it. The logits are left unchanged.

        Raises LongGenError if the logits hold NaN or infinity, or do so after the settings have changed them, so that
        broken numbers never become text.
        """
        logits = logits.detach().to(device="cpu", dtype=torch.float32)
        _require_finite(logits, "the model's logits are not finite")
        penalty = self.settings.repetition_penalty
        logits = self._penalise(logits)
        _require_finite(logits, f"logits are not finite after repetition_penalty {penalty}; give one nearer to 1")
        if self.settings.greedy:
            token = int(logits.argmax())
        else:
            ids, probabilities = distribution(logits, self.settings)
            token = int(ids[torch.multinomial(probabilities, 1, generator=self._generator)])
        self.observe([token])
        return token

    def _penalise(self, logits: Tensor) -> Tensor:
        penalty = self.settings.repetition_penalty
        if penalty == 1:
            return logits
        vocab = logits.numel()
        self._grow_seen(vocab)
        if bool(self._seen[vocab:].any()):
            raise LongGenError(f"a token id seen before is outside the model's vocabulary of {vocab}")
        penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
        return torch.where(self._seen[:vocab], penalised, logits)

    def _grow_seen(self, size: int) -> None:
        missing = size - self._seen.numel()
        if missing > 0:
            self._seen = torch.cat([self._seen, torch.zeros(missing, dtype=torch.bool)])


def distribution(logits: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    """The tokens that may be drawn, and how likely each is, after temperature, top-k, top-p and min-p.

    logits: [vocab] float32 on the CPU, repetition penalty already applied; settings.temperature above 0.
    Returns (ids[m] int64, probabilities[m] float32 that add up to 1). Never empty.
    Raises LongGenError if the temperature makes them infinite.
    """
    scores = logits / settings.temperature
    _require_finite(scores, f"logits are not finite after temperature {settings.temperature}; give one nearer to 1")
    ids = torch.arange(scores.numel())
    if 0 < settings.top_k < scores.numel():
        # The tokens left are few: what follows sorts them, not the vocabulary.
        ids = (scores >= scores.topk(settings.top_k).values[-1]).nonzero().squeeze(1)
    if settings.top_p < 1:
        ids = ids[_within_top_p(scores[ids], settings.top_p)]
    if settings.min_p > 0:
        probabilities = scores[ids].softmax(dim=-1)
        ids = ids[probabilities >= settings.min_p * probabilities.max()]
    return ids, scores[ids].softmax(dim=-1)


def record_seed(seed: int, record_id: str) -> int:
    """The seed of one request: the same on every machine and whatever else is in the batch. 0 <= result < 2**63."""
    # Names of files may hold half characters, in place of bytes that are no text.
    digest = hashlib.sha256(f"{seed}:{record_id}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _require_finite(logits: Tensor, fault: str) -> None:
    """Raise LongGenError if no softmax of logits[vocab] exists. Tokens that are ruled out may be at minus infinity."""
    peak = float(logits.max())
    if not math.isfinite(peak):
        raise LongGenError(f"{fault} (the largest of {logits.numel():,} is {peak})")


def _within_top_p(scores: Tensor, top_p: float) -> Tensor:
    """Mask [m] of the most likely scores [m] whose probabilities reach top_p; the most likely one is always in it."""
    ascending, order = scores.sort()
    kept = ascending.softmax(dim=-1).cumsum(dim=-1) > 1 - top_p
    kept[-1] = True
    return torch.zeros_like(kept).scatter(0, order, kept)


def _require(name: str, value: float, ok: bool, allowed: str) -> None:
    if not ok:
        raise UsageError(f"{name} is {value}; it must be {allowed}")
