"""`longgen bench`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from longgen.commands.common import CpuMemory, GpuMemory, stopping
from longgen.config import load_settings, parse_lengths
from longgen.errors import UsageError
from longgen.run.interrupts import raise_interrupts


def bench(
    model: Annotated[
        str | None, typer.Option(metavar="DIR|HUB_ID|NAME", help="A checkpoint, whose weights are loaded.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(metavar="YAML|NAME|DIR|HUB_ID", help="A model's shape, with random weights made on the spot."),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="LENGTH[,...]", help="Tokens of the prompts, as 16K,128K. Required.")
    ] = None,
    resident_blocks: Annotated[
        str | None,
        typer.Option(metavar="all|N", help="Blocks of each layer kept on the device, 0 is none. Default: what fits."),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Prefills of each length. Default: 3, from 512K on 1.")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Decoded tokens of each length.")] = 8,
    random_kv: Annotated[
        bool, typer.Option("--random-kv", help="Fill the cache with random values instead of running a prompt.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw time against length, as PNG, SVG or PDF.")
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="auto|cpu|cuda|cuda:N", help="Default: auto.")] = None,
    dtype: Annotated[str | None, typer.Option(metavar="auto|bfloat16|float16|float32", help="Default: auto.")] = None,
    gpu_memory: GpuMemory = None,
    cpu_memory: CpuMemory = None,
    block_size: Annotated[
        str | None, typer.Option(metavar="LENGTH", help="Tokens in a block of the KV cache. Default: 1024.")
    ] = None,
    chunk_size: Annotated[str | None, typer.Option(metavar="LENGTH", help="Default: chosen.")] = None,
    compile: Annotated[bool | None, typer.Option(help="As for run.")] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a Chrome trace of the end of the longest, run once more.")
    ] = None,
    trace_chunks: Annotated[str | None, typer.Option(metavar="N", help="Chunks in the trace. Default: 2.")] = None,
) -> None:
    """Measure prefill and decoding beside what the machine allows: a table, and one line of JSON."""
    machine = ("device", "dtype", "gpu_memory", "cpu_memory")
    names = (*machine, "block_size", "chunk_size", "compile", "trace", "trace_chunks")
    given = locals()
    settings = load_settings(None, {name: given[name] for name in names})
    if not lengths:
        raise UsageError("give --lengths, such as 16K,128K; longgen bench --help explains it")
    if trace_chunks is not None and trace is None:
        raise UsageError("--trace-chunks is of a trace; give --trace FILE with it")
    wanted = parse_lengths("lengths", lengths)

    from longgen.benchmarking import command as benchmarking

    chosen = benchmarking.BenchOptions(
        wanted, benchmarking.parse_resident(resident_blocks), repeats, steps, random_kv, plot
    )
    with stopping():
        raise_interrupts()
        line = shlex.join(["longgen", *sys.argv[1:]])
        raise typer.Exit(benchmarking.bench(model, shape, chosen, settings, line, sys.stdout, sys.stderr))
