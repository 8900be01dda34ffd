"""Requests made ready for the engine: their tokens, their settings, and the checks that need no weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from longgen.config import Settings, sampling_settings
from longgen.errors import CheckpointError, PromptLengthError, UsageError
from longgen.run.own_settings import thinking, with_own
from longgen.run.requests import Request
from longgen.run.truncation import Cut, truncate
from longgen.sampling import SamplingSettings

if TYPE_CHECKING:
    import torch

    from longgen.model.tokenizer import EncodedPrompt, TextTokenizer


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """What holds for one answer.

    max_new_tokens: most tokens of it.   sampling, seed: how they are chosen; see longgen.sampling.record_seed.
    stops: strings that end it.   thinking: what the chat template gets as enable_thinking; None: nothing.
    """

    max_new_tokens: int
    sampling: SamplingSettings
    seed: int
    stops: tuple[str, ...] = ()
    thinking: bool | None = None

    def described(self) -> dict[str, Any]:
        """As results have it."""
        own: dict[str, Any] = {} if self.thinking is None else {"enable_thinking": self.thinking}
        lengths = {"max_new_tokens": self.max_new_tokens}
        return own | lengths | asdict(self.sampling) | {"seed": self.seed, "stop": list(self.stops)}


@dataclass(frozen=True, slots=True)
class Job:
    """A request made ready for the engine; its texts are no longer kept.

    prompt: token ids, int32 [n].   stop_ids: token ids that end the answer.   cut: what was left out of the text.
    """

    request: Request
    prompt: torch.Tensor
    settings: AnswerSettings
    stop_ids: frozenset[int] = frozenset()
    cut: Cut | None = None

    def size(self, cap: int) -> tuple[int, int]:
        """Tokens of the prompt, and the most that it may generate under `cap`."""
        return len(self.prompt), min(self.settings.max_new_tokens, cap - len(self.prompt))


class JobMaker:
    """Makes jobs of the requests of one run.

    Args:
        sampling: what the checkpoint's generation_config.json sets.
        chat: whether prompts are wrapped in the chat template.
        cap: most tokens of a prompt and its answer together.
        eos_ids: token ids that end every answer.
        vocab_size: token ids that the model has.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        settings: Settings,
        sampling: Mapping[str, Any],
        *,
        chat: bool,
        cap: int,
        eos_ids: frozenset[int],
        vocab_size: int,
    ) -> None:
        self._tokenizer, self._settings, self._sampling = tokenizer, settings, sampling
        self._chat, self._cap, self._eos_ids, self._vocab_size = chat, cap, eos_ids, vocab_size

    def settings(self, request: Request) -> AnswerSettings:
        """What holds for the request's answer. Raises UsageError for settings of its own that are not allowed."""
        merged = with_own(self._settings, request.own)
        return AnswerSettings(
            max_new_tokens=merged.max_new_tokens,
            sampling=sampling_settings(merged, self._sampling),
            seed=merged.seed,
            stops=merged.stop or (),
            thinking=thinking(request.own) if self._chat else None,
        )

    def make(self, request: Request, on_chars: Callable[[int], None] = lambda count: None) -> Job:
        """The request's job. on_chars: told of characters that are encoded.

        Raises UsageError or CheckpointError if it cannot be run.
        """
        if request.fault:
            raise UsageError(request.fault)
        settings = self.settings(request)
        prompt = self._encode(request, settings, on_chars)
        ids, cut = prompt.ids, None
        if self._settings.truncate is not None:
            ids, cut = self._cut(prompt, request, settings.max_new_tokens)
        check_length(self._name(request), len(ids), self._cap, trained=self._settings.max_len is None)
        check_vocabulary(self._name(request), ids, self._vocab_size)
        control = {id_ for stop in settings.stops if (id_ := self._tokenizer.control_id(stop)) is not None}
        bare = replace(request, text="", messages=None)
        return Job(bare, ids, settings, self._eos_ids | control, cut)

    def _encode(self, request: Request, settings: AnswerSettings, on_chars: Callable[[int], None]) -> EncodedPrompt:
        if not self._chat:
            if request.messages is not None:
                raise UsageError("messages need the chat template of the checkpoint, and this run goes without it")
            return self._tokenizer.encode_prompt(request.text, False, on_chars, request.opening)
        messages = request.messages if request.messages is not None else [("user", request.text)]
        return self._tokenizer.encode_chat(messages, on_chars, request.opening, settings.thinking)

    def _name(self, request: Request) -> str:
        """What errors call the prompt; where they are in the results, it is that of the same line."""
        return "the prompt" if self._settings.output_format else f"the prompt {request.source}"

    def _cut(self, prompt: EncodedPrompt, request: Request, new: int) -> tuple[torch.Tensor, Cut | None]:
        assert self._settings.truncate is not None
        limit = f"--max-len, {self._cap:,}" if self._settings.max_len else f"the trained window, {self._cap:,}"
        room = f"{limit}, less --max-new-tokens, {new:,}"
        if new >= self._cap:
            raise UsageError(
                f"{self._name(request)} cannot be cut to {room}, which leaves no room for it; give fewer new tokens"
            )
        try:
            return truncate(prompt, self._cap - new, self._settings.truncate, self._tokenizer.begins_inside)
        except UsageError as error:
            raise UsageError(f"{self._name(request)} cannot be cut to {room}: {error}") from None


def check_length(name: str, count: int, cap: int, *, trained: bool) -> None:
    """Raise PromptLengthError if there are no tokens, or so many that no more fits under `cap`, the trained window or
    the user's."""
    if count == 0:
        raise PromptLengthError(f"{name} comes to no tokens; there is nothing to continue", count)
    if count + 1 > cap:
        limit, remedy = (
            (f"the {cap:,} that the checkpoint was trained for", "give --max-len to go beyond that")
            if trained
            else (f"--max-len, {cap:,}", f"raise it to {count + 1:,} or more")
        )
        raise PromptLengthError(
            f"{name} has {count:,} tokens, with one generated {count + 1:,}, "
            f"which is more than {limit}; {remedy}, or shorten the prompt, or give --truncate",
            count,
        )


def check_vocabulary(name: str, prompt: torch.Tensor, vocab_size: int) -> None:
    """Raise CheckpointError if the tokenizer gave a prompt a token that the model has no embedding for."""
    if (largest := int(prompt.max())) >= vocab_size:
        raise CheckpointError(
            f"the tokenizer is not this model's: {name} has a token with the id {largest:,}, and the model has "
            f"{vocab_size:,} of them"
        )
