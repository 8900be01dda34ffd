"""`longgen plan`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from longgen.commands.common import CpuMemory, GpuMemory, stopping
from longgen.config import load_settings, parse_lengths


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|HUB_ID|NAME|YAML", help="Of which only the config is read. Default: all models with a name."
        ),
    ] = None,
    max_len: Annotated[
        str | None,
        typer.Option(metavar="LENGTH[,...]", help="Prompt + generated tokens, as 4M,1M. Default: the trained window."),
    ] = None,
    max_new_tokens: Annotated[
        str | None, typer.Option(metavar="LENGTH", help="Of these, generated ones. Default: 256.")
    ] = None,
    gpu_memory: GpuMemory = None,
    cpu_memory: CpuMemory = None,
    h2d_gbps: Annotated[
        str | None, typer.Option(metavar="X", help="Rate of copies to the GPU in GB/s. Default: an H200's.")
    ] = None,
    tflops: Annotated[
        str | None,
        typer.Option(metavar="X[,Y]", help="TFLOP/s of attention and of matrix products. Default: an H200's."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(metavar="auto|bfloat16|float16|float32", help="Default: auto.")] = None,
    block_size: Annotated[
        str | None, typer.Option(metavar="LENGTH", help="Tokens in a block of the KV cache. Default: 1024.")
    ] = None,
    chunk_size: Annotated[str | None, typer.Option(metavar="LENGTH", help="Default: chosen.")] = None,
    resident_blocks: Annotated[str | None, typer.Option(metavar="N", help="Default: what fits.")] = None,
    compile: Annotated[
        bool | None, typer.Option(help="Predict times of compiled norms, rotary angles and MLPs.")
    ] = None,
    slots: Annotated[
        int, typer.Option(metavar="N", min=1, help="Requests of that length alive at once, each in a slot.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a request needs and how long it will take, without weights and without a GPU."""
    sizes = ("block_size", "chunk_size", "resident_blocks")
    names = ("max_new_tokens", "gpu_memory", "cpu_memory", "dtype", "compile", *sizes)
    given = locals()
    settings = load_settings(None, {name: given[name] for name in names})

    from longgen.planning import reports

    lengths = parse_lengths("max_len", max_len) if max_len is not None else ()
    limits = reports.limits_of(settings, h2d_gbps, tflops)
    with stopping():
        raise typer.Exit(reports.plan(model, lengths, settings, slots, limits, as_json, sys.stdout, sys.stderr))
