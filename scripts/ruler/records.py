"""Samples of the right length, as the lines that RULER writes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from longgen.errors import UsageError
from longgen.evaluation.fitting import Fit, fit
from longgen.model.tokenizer import TextTokenizer
from ruler.sample import Sample, Task


def make_records(
    tokenizer: TextTokenizer, chat: bool, name: str, task: Task, length: int, samples: int, seed: int
) -> Iterator[dict[str, Any]]:
    """The samples of one task at one length, each as long as sentences or words allow; the same for the same arguments.

    A sample's prompt, the chat template's own tokens if `chat`, the answer prefix and the budget of the answer come to
    `length` tokens at most.

    Raises:
        UsageError: the length is too short for the task.
    """
    guess = 0
    for index in range(samples):
        found = _fitted(tokenizer, chat, name, task, length, f"{seed} {name} {length} {index}", guess)
        guess, sample = found.size, found.written
        yield {
            "index": index,
            "input": sample.input,
            "outputs": list(sample.outputs),
            "length": prompt_tokens(tokenizer, sample, chat=False) + task.budget,
            "length_w_model_temp": found.tokens + task.budget,
            "answer_prefix": sample.answer_prefix,
            "max_new_tokens": task.budget,
            "task": name,
            "haystack": task.haystack,
        }


def _fitted(
    tokenizer: TextTokenizer, chat: bool, name: str, task: Task, length: int, seed: str, guess: int
) -> Fit[Sample]:
    """The longest sample that fits, and its prompt's tokens. guess: its size."""
    try:
        return fit(
            lambda size: task.write(random.Random(seed), size),
            lambda sample: prompt_tokens(tokenizer, sample, chat),
            length - task.budget,
            smallest=task.smallest,
            guess=guess,
        )
    except ValueError as error:
        raise UsageError(
            f"{length:,} tokens are too few for {name}, {task.budget} of them for the answer: {error}"
        ) from None


def prompt_tokens(tokenizer: TextTokenizer, sample: Sample, chat: bool) -> int:
    """Tokens of a prompt and of what its answer begins with."""
    return len(tokenizer.encode_prompt(sample.input, chat, opening=sample.answer_prefix).ids)
