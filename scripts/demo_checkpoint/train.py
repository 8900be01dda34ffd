"""The training loop: stages of growing length, Muon for matrices and AdamW for the rest."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
from torch.nn import functional

from demo_checkpoint.data import ANSWER, FILLER, Batch, Stage, make_batch
from demo_checkpoint.muon import Muon

# Filler this close to a query counts once: only what is far stands for more text than there is.
NEAR = 32
_ADAMW_SHARE = 0.15
_WARMUP_STEPS = 30
_AHEAD = 48


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How the model is trained.

    Attributes:
        tokens: bytes in a step.
        lr: Muon's; AdamW's is 0.15 of it. Constant, then falling linearly to 0 over the last `anneal` of all steps.
        workers: processes that make batches; 0: the training process does.
        compiled: whether the model runs through torch.compile.
        log_every: steps between lines of the log.
    """

    tokens: int
    lr: float
    anneal: float
    seed: int
    workers: int
    compiled: bool
    log_every: int = 50


def scaled(stages: Sequence[Stage], scale: float) -> tuple[Stage, ...]:
    """The stages with their steps multiplied."""
    return tuple(replace(stage, steps=max(1, round(stage.steps * scale))) for stage in stages)


def train(
    model: Any,
    stages: Sequence[Stage],
    options: TrainOptions,
    device: torch.device,
    on_stage_end: Callable[[Stage], None],
) -> None:
    """Trains the model in place; its log goes to stderr."""
    optimisers = _optimisers(model, options.lr)
    total, start = sum(stage.steps for stage in stages), time.monotonic()
    model.train()
    run = torch.compile(model, dynamic=False) if options.compiled else model
    for done, (stage, step, batch) in enumerate(_batches(stages, options), start=1):
        _set_rates(optimisers, _rate(done, total, options.anneal))
        tensors = _to_device(batch, device)
        loss, right = _loss(run, *tensors)
        loss.backward()
        for optimiser, _ in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        if step % options.log_every == 0 or done == total:
            bytes_right, answers_right = _accuracy(right, tensors[1])
            _log(
                f"{stage.name:8} step {step:5}/{stage.steps}  loss {loss.item():7.4f}  "
                f"bytes {bytes_right:6.1%}  answers {answers_right:6.1%}  "
                f"lr {optimisers[0][0].param_groups[0]['lr']:.5f}  {done / (time.monotonic() - start):5.1f} steps/s"
            )
        if step + 1 == stage.steps:
            on_stage_end(stage)


def _optimisers(model: Any, lr: float) -> list[tuple[torch.optim.Optimizer, float]]:
    """Each with its own full rate."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    known = {id(weight) for weight in matrices}
    rest = [weight for weight in model.parameters() if id(weight) not in known]
    fused = rest[0].is_cuda
    adamw = torch.optim.AdamW(rest, lr=lr * _ADAMW_SHARE, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
    return [(Muon(matrices, lr=lr), lr), (adamw, lr * _ADAMW_SHARE)]


def _rate(done: int, total: int, anneal: float) -> float:
    """The share of the full rate: a short warm-up, then constant, then down to 0."""
    return min(1.0, done / _WARMUP_STEPS, (total - done) / max(1.0, anneal * total))


def _set_rates(optimisers: list[tuple[torch.optim.Optimizer, float]], share: float) -> None:
    for optimiser, lr in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = lr * share


def _batches(stages: Sequence[Stage], options: TrainOptions) -> Iterator[tuple[Stage, int, Batch]]:
    """Every step's batch in order, made ahead by other processes where there are some."""
    plan = [(index, step) for index, stage in enumerate(stages) for step in range(stage.steps)]
    calls = [(stages[index], index, step, options.seed, options.tokens) for index, step in plan]
    if options.workers == 0:
        for (index, step), call in zip(plan, calls, strict=True):
            yield stages[index], step, make_batch(*call)
        return
    # Other processes are spawned: a fork of a process that uses a GPU or threads is not safe.
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        waiting: deque[Future[Batch]] = deque(pool.submit(make_batch, *call) for call in calls[:_AHEAD])
        for number, (index, step) in enumerate(plan):
            batch = waiting.popleft().result()
            if number + _AHEAD < len(calls):
                waiting.append(pool.submit(make_batch, *calls[number + _AHEAD]))
            yield stages[index], step, batch


def _to_device(batch: Batch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    arrays = (batch.tokens, batch.kinds, batch.positions, batch.log_repeats)
    tokens, kinds, positions, log_repeats = (torch.from_numpy(array).to(device) for array in arrays)
    return tokens, kinds, positions, log_repeats


def attention_bias(kinds: torch.Tensor, log_repeats: torch.Tensor) -> torch.Tensor:
    """What is added to the attention scores: minus infinity for later keys, and for filler keys that are far from
    the query the logarithm of how often they count.

    The softmax of a key that counts r times is that of r equal keys, so a short sample has the denominator of a long
    text.

    Args:
        kinds: uint8 [B, n].
        log_repeats: float32 [B].

    Returns:
        float32 [B, 1, n, n].
    """
    count = kinds.shape[1]
    order = torch.arange(count, device=kinds.device)
    distance = order[:, None] - order[None, :]
    filler = (kinds == FILLER)[:, None, :] & (distance > NEAR)[None]
    bias = filler * log_repeats[:, None, None]
    return bias.masked_fill(distance < 0, float("-inf"))[:, None]


def _loss(
    model: Any,
    tokens: torch.Tensor,
    kinds: torch.Tensor,
    positions: torch.Tensor,
    log_repeats: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss of the answers' bytes, and which bytes are right, bool [B, n - 1]."""
    tokens, device = tokens.long(), tokens.device
    with torch.autocast(device.type, torch.bfloat16, enabled=_has_bf16(device)):
        bias = attention_bias(kinds, log_repeats)
        if _has_bf16(device):
            bias = bias.bfloat16()
        logits = model(input_ids=tokens, position_ids=positions, attention_mask=bias, use_cache=False).logits
    logits, targets = logits[:, :-1].float(), tokens[:, 1:]
    asked = kinds[:, 1:] == ANSWER
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    return (losses * asked).sum() / asked.sum(), logits.argmax(-1) == targets


def _accuracy(right: torch.Tensor, kinds: torch.Tensor) -> tuple[float, float]:
    """The share of answer bytes that are right, and of whole answers."""
    asked = kinds[:, 1:] == ANSWER
    starts = asked & (kinds[:, :-1] != ANSWER)
    answer = torch.cumsum(starts.flatten(), 0) * asked.flatten()
    wrong = torch.unique(answer[(asked & ~right).flatten()])
    count = int(starts.sum())
    return float((right & asked).sum() / asked.sum()), (count - len(wrong)) / max(1, count)


def _has_bf16(device: torch.device) -> bool:
    return device.type == "cuda" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
