"""`longgen eval needle`: prompts made, answered as a batch and scored; a table, and a heat map."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from longgen.config import Settings
from longgen.evaluation.haystack import Kind, NeedlePrompt, even_depths, make_prompts
from longgen.evaluation.same_model import check_same_model
from longgen.evaluation.score_grid import check_plot, draw, table
from longgen.evaluation.scoring import string_match_all
from longgen.names import checkpoint_name
from longgen.run.interrupts import raise_interrupts
from longgen.run.requests import Request
from longgen.run.startup import import_libraries

MAX_NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class NeedleOptions:
    """What `eval needle` is asked for.

    lengths: tokens of the prompts.   depths: how many depths at each length.
    plot: file of the heat map; None draws none.   inputs: whether the results hold the prompts.
    """

    lengths: tuple[int, ...]
    depths: int = 10
    kind: Kind = Kind.passkey
    plot: Path | None = None
    inputs: bool = True


def run(model: str, options: NeedleOptions, settings: Settings, out: BinaryIO, err: TextIO) -> int:
    """Runs it as a batch of records: results to `settings.output` or `out`, table and notices to `err`.

    Returns the exit code of the batch. Raises LongGenError for what is wrong with the run as a whole; with the files
    and the lengths, before weights are loaded.
    """
    if options.plot is not None:
        check_plot(options.plot)
    if settings.output is not None and not settings.overwrite:
        check_same_model(Path(settings.output), model)
    import_libraries()
    raise_interrupts()
    prompts = _prompts(model, options, settings)
    scores: dict[str, float | None] = {}

    def judge(request: Request, pred: str) -> Mapping[str, Any]:
        scores[request.id] = string_match_all(pred, request.fields["outputs"])
        return {"score": scores[request.id]}

    from longgen.run import batch

    # Nothing may be left out: no prompt of the grid, and nothing of a prompt.
    settings = replace(settings, output_format="jsonl", shard=None, truncate=None)
    code = batch.run(model, [_request(prompt, options.inputs) for prompt in prompts], settings, out, err, judge)
    if settings.output is not None and Path(settings.output).is_file():
        scores = _written_scores(Path(settings.output))  # those of an earlier run too
    grid = {(prompt.wanted, prompt.depth): scores.get(str(prompt.index)) for prompt in prompts}
    print(table(grid), file=err)
    if options.plot is not None:
        draw(options.plot, f"{Path(model).name or model}: {options.kind.words}", grid)
    return code


def _prompts(model: str, options: NeedleOptions, settings: Settings) -> Sequence[NeedlePrompt]:
    from longgen.model.checkpoint import resolve_checkpoint
    from longgen.model.quiet import quiet_transformers
    from longgen.model.tokenizer import TextTokenizer

    with quiet_transformers():
        tokenizer = TextTokenizer.load(resolve_checkpoint(checkpoint_name(model)))
        chat = tokenizer.has_chat_template if settings.chat is None else settings.chat
        lengths, depths = sorted(set(options.lengths)), even_depths(options.depths)
        return list(make_prompts(tokenizer, chat, options.kind, lengths, depths, settings.seed))


def _request(prompt: NeedlePrompt, inputs: bool) -> Request:
    """The request of a prompt; the fields of its result have RULER's names where RULER has them too."""
    fields = {
        "index": prompt.index,
        **({"input": prompt.input} if inputs else {}),
        "outputs": list(prompt.outputs),
        "length": prompt.length,
        "depth": round(prompt.depth, 6),
        "kind": prompt.kind.value,
        "score": None,  # until it is judged
    }
    source = f"needle of {prompt.length:,} tokens at {prompt.depth:.0%}"
    return Request(str(prompt.index), source, prompt.input, fields=fields)


def _written_scores(path: Path) -> dict[str, float | None]:
    """The scores of a file of results, by id."""
    with open(path, encoding="utf-8", newline="\n") as file:
        records = map(json.loads, file)
        return {record["id"]: record.get("score") for record in records}
