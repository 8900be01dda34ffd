"""`longgen eval needle`: prompts made, answered and scored; a line of JSON for each, a table, and a heat map."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TextIO

from longgen.config import Settings
from longgen.errors import LongGenError, UsageError
from longgen.evaluation.haystack import Kind, NeedlePrompt, even_depths, make_prompts
from longgen.evaluation.score_grid import check_plot, draw, table
from longgen.evaluation.scoring import string_match_all
from longgen.names import checkpoint_name
from longgen.requests import Request

MAX_NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class NeedleOptions:
    """What `eval needle` is asked for.

    lengths: tokens of the prompts.   depths: how many depths at each length.
    output: file of the results; None is standard output.   plot: file of the heat map; None draws none.
    inputs: whether the results hold the prompts.   overwrite: whether an output that exists is replaced.
    """

    lengths: tuple[int, ...]
    depths: int = 10
    kind: Kind = Kind.passkey
    output: Path | None = None
    plot: Path | None = None
    inputs: bool = True
    overwrite: bool = False


def run(model: str, options: NeedleOptions, settings: Settings, out: BinaryIO, err: TextIO) -> int:
    """Runs it: results to the output or `out`, table and notices to `err`. Returns 1 if a request failed, else 0.

    What is wrong with the files and the lengths is found before weights are loaded.

    Raises LongGenError for what is wrong with the run as a whole.
    """
    options = replace(options, lengths=tuple(sorted(set(options.lengths))))
    if options.plot is not None:
        check_plot(options.plot)
    check_output(options)
    prompts = _prompts(model, options, settings)

    from longgen.evaluation.request_loop import answers

    scores: dict[tuple[int, float], float | None] = {}
    requests = [Request(str(prompt.index), _described(prompt), prompt.input) for prompt in prompts]
    with ExitStack() as stack:
        found = stack.enter_context(closing(answers(model, requests, settings, err)))
        for prompt, answer in zip(prompts, found, strict=True):
            if options.output is not None and not scores:  # not before the model is loaded
                out = stack.enter_context(_opened(options.output))
            failed = answer.finish_reason == "error"
            score = None if failed else string_match_all(answer.text, prompt.outputs)
            _write(out, _record(prompt, answer.text, answer.finish_reason, score, options.inputs))
            scores[prompt.wanted, prompt.depth] = score
    print(table(scores), file=err)
    if options.plot is not None:
        draw(options.plot, f"{Path(model).name or model}: {options.kind.words}", scores)
    return LongGenError.exit_code if None in scores.values() else 0


def check_output(options: NeedleOptions) -> None:
    """Raises UsageError if the results cannot go where they should."""
    if (path := options.output) is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        problem = "it is a folder" if path.is_dir() else "its folder is not there"
        raise UsageError(f"--output {path} cannot be written: {problem}")
    if path.exists() and not options.overwrite:
        raise UsageError(f"--output {path} exists; give another file, or --overwrite to replace it")


def _prompts(model: str, options: NeedleOptions, settings: Settings) -> list[NeedlePrompt]:
    from longgen.model.checkpoint import resolve_checkpoint
    from longgen.model.quiet import quiet_transformers
    from longgen.model.tokenizer import TextTokenizer

    with quiet_transformers():
        tokenizer = TextTokenizer.load(resolve_checkpoint(checkpoint_name(model)))
        chat = tokenizer.has_chat_template if settings.chat is None else settings.chat
        depths = even_depths(options.depths)
        return list(make_prompts(tokenizer, chat, options.kind, options.lengths, depths, settings.seed))


def _described(prompt: NeedlePrompt) -> str:
    return f"needle {prompt.index}, {prompt.length:,} tokens, at {prompt.depth:.0%}"


def _record(
    prompt: NeedlePrompt, pred: str, finish_reason: str | None, score: float | None, inputs: bool
) -> dict[str, object]:
    """A line of the results, with RULER's names for what RULER has too."""
    return {
        "index": prompt.index,
        **({"input": prompt.input} if inputs else {}),
        "outputs": list(prompt.outputs),
        "length": prompt.length,
        "depth": round(prompt.depth, 6),
        "kind": prompt.kind.value,
        "pred": pred,
        "finish_reason": finish_reason,
        "score": score,
    }


def _opened(path: Path) -> BinaryIO:
    try:
        return open(path, "wb")
    except OSError as error:
        raise LongGenError(f"--output {path} cannot be written: {error.strerror or error}") from error


def _write(out: BinaryIO, record: dict[str, object]) -> None:
    try:
        out.write(json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n")
        out.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LongGenError(f"the results cannot be written: {error.strerror or error}") from error
