#!/usr/bin/env python3
"""Compares longgen with transformers on a checkpoint of your own, over real prose.

1. Greedy: a chat prompt of about 3,000 tokens, answered by both in float32; every token must be equal.
2. Needles: chat prompts of about 24,000 tokens with one sentence that states a 7-digit number hidden at several
   depths and asked for at the end. longgen must answer with the number. Where it does not, transformers is run on the
   same prompt: its tokens must be equal, as then it is the model that cannot answer.

For both, transformers' own tokenizer and chat template must give the same prompt ids. Only one of the two models is in
memory at a time. Progress and a table go to stderr; the last line on stdout is JSON; the exit code is 1 if anything
failed. Without --text, the prose is that of Python's own language reference, which comes with the interpreter.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

import torch
import transformers
from prose_prompts import Prompt, greedy_prompt, is_answered, needle_prompts, read_text, reference_prose
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import longgen
from longgen.engine import Engine, EngineOptions
from longgen.errors import LongGenError
from longgen.model.checkpoint import read_config, resolve_checkpoint
from longgen.model.tokenizer import TextTokenizer
from longgen.run.progress import PrefillProgress
from longgen.sampling import Sampler, SamplingSettings

ANSWER_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens, a stop token at the end included, and the logits each was chosen from, float32 [vocab]."""

    tokens: tuple[int, ...]
    logits: tuple[torch.Tensor, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two answers to one prompt differ.

    equal_tokens: how many tokens are equal before the first that is not.
    logit_difference: the largest over all positions that both computed from equal tokens, and the whole vocabulary.
    margin: the smallest lead of the most likely token over the next one at those positions, in transformers' logits.
    first_difference: what both chose where they first differ, and the two tokens' margin in each one's logits.
    """

    equal: bool
    equal_tokens: int
    logit_difference: float
    margin: float
    first_difference: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome for one prompt. answered: whether its number is in longgen's answer; False if it has none."""

    name: str
    prompt_tokens: int
    dtype: str
    new_tokens: int
    text: str
    number: str | None
    answered: bool
    prompt_ids_equal: bool
    comparison: Comparison | None
    longgen_seconds: float
    transformers_seconds: float | None

    @property
    def passed(self) -> bool:
        equal = self.comparison is not None and self.comparison.equal
        return self.prompt_ids_equal and (self.answered or equal)


class RecordingSampler(Sampler):
    """A greedy sampler that keeps what it chose and from which logits."""

    def __init__(self) -> None:
        super().__init__(SamplingSettings(), seed=0)
        self.tokens: list[int] = []
        self.logits: list[torch.Tensor] = []

    def sample(self, logits: torch.Tensor) -> int:
        token = super().sample(logits)
        self.tokens.append(token)
        self.logits.append(logits.detach().to("cpu", torch.float32, copy=True))
        return token


def note(text: str) -> None:
    """A line of progress on stderr."""
    print(text, file=sys.stderr, flush=True)


# --- the two sides


def longgen_answers(
    folder: Path, options: EngineOptions, prompts: Sequence[Prompt], new_tokens: int, stop_ids: frozenset[int]
) -> list[Answer]:
    """longgen's greedy answers, one engine for all prompts."""
    gc.collect()
    engine = Engine.load(folder, options)
    answers = []
    for prompt in prompts:
        sampler, started = RecordingSampler(), time.perf_counter()
        with PrefillProgress(len(prompt.ids), shown=sys.stderr.isatty(), stream=sys.stderr) as bar:
            for _ in engine.generate(
                prompt.ids, max_new_tokens=new_tokens, stop_ids=stop_ids, sampler=sampler, on_prefill=bar.update
            ):
                pass
        engine.reset()
        answers.append(Answer(tuple(sampler.tokens), tuple(sampler.logits), time.perf_counter() - started))
        note(f"longgen, {options.dtype}: {prompt.name}, {len(prompt.ids):,} tokens, {answers[-1].seconds:.1f} s")
    return answers


@torch.no_grad()
def transformers_answers(
    folder: Path, options: EngineOptions, prompts: Sequence[Prompt], new_tokens: int, stop_ids: frozenset[int]
) -> list[Answer]:
    """The greedy answers of transformers' `generate`, each prompt in one piece."""
    gc.collect()
    device = options.torch_device()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=options.torch_dtype()).to(device)
    # A config of its own: the checkpoint's may ask for sampling or a repetition penalty.
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=new_tokens,
        eos_token_id=sorted(stop_ids) or None,
        pad_token_id=min(stop_ids, default=0),
        output_logits=True,
        return_dict_in_generate=True,
    )
    model.generation_config = settings
    answers = []
    for prompt in prompts:
        started = time.perf_counter()
        ids = torch.tensor([prompt.ids], device=device)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        tokens = tuple(output.sequences[0, ids.shape[1] :].tolist())
        logits = tuple(row[0].float().cpu() for row in output.logits)
        answers.append(Answer(tokens, logits, time.perf_counter() - started))
        note(f"transformers, {options.dtype}: {prompt.name}, {len(prompt.ids):,} tokens, {answers[-1].seconds:.1f} s")
    return answers


def transformers_ids(folder: Path, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """The prompts' token ids by transformers' own tokenizer and chat template."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if not tokenizer.chat_template:
        return [tuple(tokenizer(prompt.text)["input_ids"]) for prompt in prompts]
    chats = ([{"role": "user", "content": prompt.text}] for prompt in prompts)
    return [
        tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
        for chat in chats
    ]


def compare(ours: Answer, theirs: Answer) -> Comparison:
    """Compares two answers token by token, and their logits as far as both were computed from the same tokens."""
    equal = 0
    while equal < min(len(ours.tokens), len(theirs.tokens)) and ours.tokens[equal] == theirs.tokens[equal]:
        equal += 1
    shared = min(equal + 1, len(ours.tokens), len(theirs.tokens))
    pairs = list(zip(ours.logits[:shared], theirs.logits[:shared], strict=True))
    difference = max(float((a - b).abs().max()) for a, b in pairs)
    margin = min(float(-b.topk(2).values.diff()) for _, b in pairs)
    if ours.tokens == theirs.tokens:
        return Comparison(True, equal, difference, margin, None)
    first: dict[str, Any] = {"step": equal}
    for name, answer in (("longgen", ours), ("transformers", theirs)):
        top = answer.logits[min(equal, len(answer.logits) - 1)].topk(2)
        first[name] = {"top_tokens": top.indices.tolist(), "margin": float(-top.values.diff())}
    return Comparison(False, equal, difference, margin, first)


# --- the whole


def run(folder: Path, options: EngineOptions, args: argparse.Namespace) -> list[Result]:
    """Runs everything on a checkpoint folder: the greedy prompt in float32, the needles with `options`."""
    tokenizer = TextTokenizer.load(folder)
    prose = reference_prose() if args.text is None else read_text(args.text)
    greedy = [greedy_prompt(tokenizer, prose, args.prompt_tokens)] if args.prompt_tokens > 0 else []
    needles = list(needle_prompts(tokenizer, prose, args.needle_tokens, args.depths))
    return [
        *run_prompts(folder, replace(options, dtype="float32"), tokenizer, greedy, args.new_tokens),
        *run_prompts(folder, options, tokenizer, needles, ANSWER_TOKENS),
    ]


def run_prompts(
    folder: Path, options: EngineOptions, tokenizer: TextTokenizer, prompts: Sequence[Prompt], new_tokens: int
) -> list[Result]:
    """longgen's answers to the prompts, then transformers' to those without a number or not answered with it."""
    if not prompts:
        return []
    stop_ids = tokenizer.eos_ids(folder)
    same_ids = [ids == prompt.ids for ids, prompt in zip(transformers_ids(folder, prompts), prompts, strict=True)]
    ours = longgen_answers(folder, options, prompts, new_tokens, stop_ids)
    texts = [tokenizer.decode(list(answer.tokens)).strip() for answer in ours]
    answered = [is_answered(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    missed = [prompt for prompt, found in zip(prompts, answered, strict=True) if not found]
    theirs = iter(transformers_answers(folder, options, missed, new_tokens, stop_ids) if missed else [])
    results = []
    for prompt, answer, text, found, same in zip(prompts, ours, texts, answered, same_ids, strict=True):
        other = None if found else next(theirs)
        results.append(
            Result(
                name=prompt.name,
                prompt_tokens=len(prompt.ids),
                dtype=options.dtype,
                new_tokens=len(answer.tokens),
                text=text,
                number=prompt.number,
                answered=found,
                prompt_ids_equal=same,
                comparison=compare(answer, other) if other else None,
                longgen_seconds=round(answer.seconds, 1),
                transformers_seconds=round(other.seconds, 1) if other else None,
            )
        )
    return results


def print_table(results: Sequence[Result]) -> None:
    """The results as a table on stderr."""
    note(f"\n{'prompt':<15} {'tokens':>7} {'dtype':<9} {'new':>3} {'longgen':>8} {'transf.':>8}  result")
    for result in results:
        theirs = "-" if result.transformers_seconds is None else f"{result.transformers_seconds:.1f} s"
        note(
            f"{result.name:<15} {result.prompt_tokens:>7,} {result.dtype:<9} {result.new_tokens:>3}"
            f" {result.longgen_seconds:>6.1f} s {theirs:>8}  {'ok' if result.passed else 'FAILED'}: {_describe(result)}"
        )


def _describe(result: Result) -> str:
    parts = [] if result.prompt_ids_equal else ["transformers' tokenizer gives other prompt ids"]
    if result.number is not None:
        parts.append(f"{result.number} answered" if result.answered else f"{result.number} not in {result.text!r}")
    compared = result.comparison
    if compared is not None and compared.equal:
        closeness = f"logits within {compared.logit_difference:.1g}, smallest margin {compared.margin:.1g}"
        parts.append(f"all tokens equal transformers' ({closeness})")
    elif compared is not None:
        parts.append(f"equal to transformers' for {compared.equal_tokens} tokens only: {compared.first_difference}")
    return "; ".join(parts)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="checkpoint folder or hub id")
    parser.add_argument("--text", type=Path, help="UTF-8 file of prose; default: Python's language reference")
    parser.add_argument("--prompt-tokens", type=int, default=3000, help="of the greedy prompt (default: 3000); 0: none")
    parser.add_argument("--new-tokens", type=int, default=48, help="of the greedy answer (default: 48)")
    parser.add_argument("--needle-tokens", type=int, default=24000, help="of a prompt with a number (default: 24000)")
    parser.add_argument(
        "--depths", type=parse_depths, default=(0.1, 0.5, 0.9), help="default: 0.1,0.5,0.9; '': no needles"
    )
    parser.add_argument("--dtype", default="auto", help="of the needles (default: auto, the checkpoint's)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument(
        "--block-size", type=int, default=EngineOptions().block_size, help="of longgen (default: %(default)s)"
    )
    parser.add_argument("--chunk-size", type=int, default=None, help="of longgen (default: about 4096)")
    parser.add_argument("--resident-blocks", type=int, default=0, help="of each layer, on the device (default: 0)")
    args = parser.parse_args(argv)
    if args.new_tokens < 1:
        parser.error(f"--new-tokens is {args.new_tokens}; it must be 1 or more")
    if args.prompt_tokens < 1 and not args.depths:
        parser.error("--prompt-tokens 0 and no --depths leave nothing to compare")
    return args


def parse_depths(text: str) -> tuple[float, ...]:
    """`0.1,0.5` as numbers. Raises ValueError for anything that is not between 0 and 1."""
    depths = tuple(float(part) for part in text.split(",") if part.strip())
    if not all(0 <= depth <= 1 for depth in depths):
        raise ValueError
    return depths


def engine_options(folder: Path, args: argparse.Namespace) -> EngineOptions:
    """The engine's options, `auto` replaced by the checkpoint's dtype."""
    options = EngineOptions(
        device=args.device,
        dtype=str(read_config(folder).dtype).removeprefix("torch.") if args.dtype == "auto" else args.dtype,
        block_size=args.block_size,
        chunk_size=args.chunk_size,
        resident_blocks=args.resident_blocks,
    )
    options.torch_dtype(), options.torch_device(), options.chunk_tokens()  # each raises before anything is loaded
    return options


def main(argv: Sequence[str] | None = None) -> int:
    args, started = parse_arguments(argv), time.perf_counter()
    transformers.utils.logging.disable_progress_bar()
    try:
        folder = resolve_checkpoint(args.checkpoint)
        options = engine_options(folder, args)
        results = run(folder, options, args)
    except LongGenError as error:
        note(f"compare_with_transformers: {error}")
        return error.exit_code
    print_table(results)
    passed = all(result.passed for result in results)
    report = {
        "passed": passed,
        "model_type": read_config(folder).model_type,
        "text": "pydoc_data.topics" if args.text is None else args.text.name,
        "settings": asdict(options) | {"chunk_size": options.chunk_tokens(), "device": str(options.torch_device())},
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()}
        | {module.__name__: module.__version__ for module in (torch, transformers, longgen)},
        "seconds": round(time.perf_counter() - started, 1),
        "results": [asdict(result) | {"passed": result.passed} for result in results],
    }
    print(json.dumps(report), flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
