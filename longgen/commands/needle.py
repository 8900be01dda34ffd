"""`longgen eval needle`."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from longgen.commands.common import CpuMemory, GpuMemory, missing_options, stopping
from longgen.config import Settings, load_settings, parse_lengths
from longgen.evaluation.haystack import Kind


def needle(
    model: Annotated[str | None, typer.Option(metavar="DIR|HUB_ID|NAME", help="As for run. Required.")] = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="LENGTH[,...]", help="Tokens of the prompts, as 4K,64K,1M. Required.")
    ] = None,
    depths: Annotated[int, typer.Option(metavar="N", min=1, help="Depths at each length, start to end.")] = 10,
    kind: Annotated[
        Kind, typer.Option(help="A pass key, a magic number, or four magic numbers of which one is asked for.")
    ] = Kind.passkey,
    output: Annotated[str | None, typer.Option(metavar="FILE", help="As for run. Default: standard output.")] = None,
    resume: Annotated[bool | None, typer.Option("--resume/--no-resume", help="As for run.")] = None,
    overwrite: Annotated[bool | None, typer.Option("--overwrite", help="As for run.")] = None,
    inputs: Annotated[bool, typer.Option("--inputs/--no-inputs", help="Keep the prompts in the results.")] = True,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw a heat map; needs matplotlib.")] = None,
    max_new_tokens: Annotated[
        str | None, typer.Option(metavar="LENGTH", help="Most tokens of an answer. Default: 64.")
    ] = None,
    max_len: Annotated[str | None, typer.Option(metavar="LENGTH", help="As for run.")] = None,
    rope: Annotated[str | None, typer.Option(metavar="auto|none|yarn[:FACTOR]", help="As for run.")] = None,
    chat: Annotated[bool | None, typer.Option("--chat/--raw", help="As for run.")] = None,
    device: Annotated[str | None, typer.Option(metavar="auto|cpu|cuda|cuda:N", help="Default: auto.")] = None,
    dtype: Annotated[str | None, typer.Option(metavar="auto|bfloat16|float16|float32", help="Default: auto.")] = None,
    block_size: Annotated[str | None, typer.Option(metavar="LENGTH", help="As for run.")] = None,
    chunk_size: Annotated[str | None, typer.Option(metavar="LENGTH", help="As for run.")] = None,
    resident_blocks: Annotated[str | None, typer.Option(metavar="N", help="As for run.")] = None,
    gpu_memory: GpuMemory = None,
    cpu_memory: CpuMemory = None,
    seed: Annotated[str | None, typer.Option(metavar="N", help="Of the numbers and the filler. Default: 0.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="YAML", help="As for run.")] = None,
    progress: Annotated[bool | None, typer.Option(help="As for run.")] = None,
) -> None:
    """Hide numbers in long texts, at several lengths and depths, and score the answers."""
    given = locals()
    with stopping():
        from longgen.evaluation import needle_run

        names = {setting.name for setting in fields(Settings)} & given.keys()
        flags = {name: given[name] for name in names}
        settings = load_settings(config, flags, {"max_new_tokens": needle_run.MAX_NEW_TOKENS})
        if model is None or lengths is None:
            raise missing_options("eval needle", {"--model": model, "--lengths": lengths})
        tokens = parse_lengths("lengths", lengths)
        options = needle_run.NeedleOptions(tokens, depths, kind, plot, inputs)
        raise typer.Exit(needle_run.run(model, options, settings, sys.stdout.buffer, sys.stderr))
