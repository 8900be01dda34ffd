"""Sampling: the same tokens stay, equally likely, as with transformers' own logits processors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from longgen.errors import LongGenError, UsageError
from longgen.sampling import Sampler, SamplingSettings, distribution, record_seed


def _reference(logits: torch.Tensor, chosen: SamplingSettings, seen: list[int]) -> torch.Tensor:
    """Probabilities [vocab] from transformers' processors, in the order that its generate() applies them."""
    processors = LogitsProcessorList()
    if chosen.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(chosen.repetition_penalty))
    processors.append(TemperatureLogitsWarper(chosen.temperature))
    if chosen.top_k:
        processors.append(TopKLogitsWarper(chosen.top_k))
    if chosen.top_p < 1:
        processors.append(TopPLogitsWarper(chosen.top_p))
    if chosen.min_p:
        processors.append(MinPLogitsWarper(chosen.min_p))
    return processors(torch.tensor([seen], dtype=torch.int64), logits[None].clone())[0].softmax(dim=-1)


def _ours(logits: torch.Tensor, chosen: SamplingSettings, seen: list[int]) -> torch.Tensor:
    sampler = Sampler(chosen, seed=0)
    sampler.observe(seen)
    ids, probabilities = distribution(sampler._penalise(logits), chosen)
    return torch.zeros_like(logits).scatter(0, ids, probabilities)


@settings(max_examples=150, deadline=None)
@given(
    chosen=st.builds(
        SamplingSettings,
        temperature=st.sampled_from([0.1, 0.6, 1.0, 2.5]),
        top_k=st.sampled_from([0, 1, 5, 20, 200]),
        top_p=st.sampled_from([0.05, 0.5, 0.8, 0.95, 1.0]),
        min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.1, 2.0, 0.5]),
    ),
    seed=st.integers(0, 1000),
    ties=st.booleans(),
)
def test_distribution_equals_transformers(chosen: SamplingSettings, seed: int, ties: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(97, generator=generator)
    if ties and chosen.top_p == 1:  # which of two equal logits top-p drops is the sort's choice
        logits = logits.round()
    seen = torch.randint(0, 97, (30,), generator=generator).tolist()
    torch.testing.assert_close(_ours(logits, chosen, seen), _reference(logits, chosen, seen), atol=1e-6, rtol=1e-5)


def test_each_setting_changes_the_distribution() -> None:
    logits = 3 * torch.randn(97, generator=torch.Generator().manual_seed(1))
    seen = list(range(50))
    plain = _ours(logits, SamplingSettings(temperature=1.0), seen)
    changes: tuple[dict[str, Any], ...] = (
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.3},
        {"repetition_penalty": 1.5},
    )
    for change in changes:
        assert not torch.allclose(plain, _ours(logits, SamplingSettings(**{"temperature": 1.0, **change}), seen))


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -9.0])
    sampler = Sampler(SamplingSettings(temperature=1.0, top_k=4), seed=5)
    draws = torch.tensor([sampler.sample(logits) for _ in range(4000)])
    frequencies = torch.bincount(draws, minlength=5) / len(draws)
    expected = _reference(logits, sampler.settings, [0])
    assert frequencies[4] == 0
    assert (frequencies - expected).abs().max() < 0.03


def test_greedy_takes_the_most_likely_token() -> None:
    assert Sampler(SamplingSettings(), seed=0).sample(torch.tensor([0.0, 3.0, 2.9])) == 1


def test_greedy_obeys_the_repetition_penalty_and_observes_what_it_chose() -> None:
    sampler = Sampler(SamplingSettings(repetition_penalty=1.5), seed=0)
    logits = torch.tensor([0.0, 3.0, 2.9, -1.0])
    assert [sampler.sample(logits) for _ in range(3)] == [1, 2, 1]


def test_the_prompt_counts_for_the_repetition_penalty() -> None:
    sampler = Sampler(SamplingSettings(repetition_penalty=1.5), seed=0)
    sampler.observe(torch.tensor([[1, 1]]))
    assert sampler.sample(torch.tensor([0.0, 3.0, 2.9])) == 2


def test_the_logits_are_left_unchanged() -> None:
    logits = torch.randn(50)
    before = logits.clone()
    sampler = Sampler(SamplingSettings(temperature=0.5, top_k=3, repetition_penalty=2.0), seed=0)
    sampler.observe([1, 2, 3])
    sampler.sample(logits)
    assert torch.equal(logits, before)


def test_the_seed_decides_the_draws_and_the_global_generator_does_not() -> None:
    logits = torch.zeros(1000)

    def draws(seed: int) -> list[int]:
        torch.rand(3)
        sampler = Sampler(SamplingSettings(temperature=1.0), seed)
        return [sampler.sample(logits) for _ in range(8)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_never_become_a_token(bad: float) -> None:
    logits = torch.zeros(10)
    logits[7] = bad
    with pytest.raises(LongGenError, match="not finite"):
        Sampler(SamplingSettings(), seed=0).sample(logits)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"temperature": 1e-40}, "temperature 1e-40"),
        ({"temperature": 1e300}, "temperature 1e\\+300"),
        ({"temperature": 1.0, "repetition_penalty": 1e-45}, "repetition_penalty 1e-45"),
        ({"repetition_penalty": 1e-45}, "repetition_penalty 1e-45"),
    ],
)
def test_settings_that_leave_no_distribution_are_an_error_that_names_them(values: dict[str, Any], named: str) -> None:
    sampler = Sampler(SamplingSettings(**values), seed=0)
    sampler.observe([0, 1])
    with pytest.raises(LongGenError, match=f"not finite after {named}"):
        sampler.sample(torch.tensor([3.0, 2.0, -math.inf]))


def test_tokens_that_the_model_rules_out_are_never_drawn() -> None:
    logits = torch.full((10,), -math.inf)
    logits[3] = 0.0
    assert Sampler(SamplingSettings(temperature=1.0, top_p=0.9), seed=0).sample(logits) == 3


def test_a_seen_id_outside_the_vocabulary_is_an_error() -> None:
    sampler = Sampler(SamplingSettings(repetition_penalty=1.2), seed=0)
    sampler.observe([10])
    with pytest.raises(LongGenError, match="vocabulary of 10"):
        sampler.sample(torch.zeros(10))


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
    ],
)
def test_values_out_of_range_are_usage_errors_that_name_the_setting(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(values))):
        SamplingSettings(**values)


def test_record_seed_is_stable_and_depends_on_both() -> None:
    assert record_seed(0, "a") == record_seed(0, "a")
    assert len({record_seed(0, "a"), record_seed(1, "a"), record_seed(0, "b")}) == 3
    assert 0 <= record_seed(123, "x") < 2**63
    assert record_seed(0, "prompt") == 2107179914419308189
