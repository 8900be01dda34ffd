"""The command line: parse, wire, print. What is slow to import is imported by the command that needs it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

import longgen
from longgen.config import Settings, load_settings, parse_length, show_settings
from longgen.errors import LongGenError, OutputError, UsageError
from longgen.evaluation.haystack import Kind
from longgen.run.interrupts import EXIT_INTERRUPTED, INTERRUPTED, raise_interrupts, was_interrupted
from longgen.run.records import open_prompts
from longgen.run.startup import import_libraries

EXIT_BROKEN_PIPE = 141  # what a shell reports for a program that SIGPIPE ended

GpuMemory = Annotated[
    str | None,
    typer.Option(metavar="AMOUNT|FRACTION", help="GPU memory of the whole process: 24GiB, or 0.5 of the card."),
]
CpuMemory = Annotated[
    str | None, typer.Option(metavar="AMOUNT", help="Host memory for the run, e.g. 96GiB. Default: what is available.")
]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Generate after very long prompts on one GPU, with the KV cache in host memory.",
)

evaluation = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Judge what a model finds in long text.")
app.add_typer(evaluation, name="eval")


def _show_version(asked: bool) -> None:
    if asked:
        print(f"longgen {longgen.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Generate after very long prompts on one GPU, with the KV cache in host memory."""


@app.command()
def run(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|HUB_ID|NAME", help="Checkpoint folder, its id on the hub, or a short name. Required."
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            "-f",
            metavar="FILE|-",
            help="Text file, .jsonl file of records, or - for standard input. May be repeated. Required.",
        ),
    ] = None,
    max_len: Annotated[
        str | None,
        typer.Option(metavar="LENGTH", help="Cap on prompt + generated tokens, e.g. 4M. Default: the trained window."),
    ] = None,
    max_new_tokens: Annotated[
        str | None, typer.Option(metavar="LENGTH", help="Most tokens to generate. Default: 256.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Use the chat template, or not. Default: where the checkpoint has one."),
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="auto|cpu|cuda|cuda:N", help="Default: auto.")] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="auto|bfloat16|float16|float32", help="Default: auto, the checkpoint's.")
    ] = None,
    block_size: Annotated[
        str | None, typer.Option(metavar="LENGTH", help="Tokens in a block of the KV cache. Default: 1024.")
    ] = None,
    chunk_size: Annotated[
        str | None, typer.Option(metavar="LENGTH", help="Tokens prefilled in one pass, a multiple of the block.")
    ] = None,
    resident_blocks: Annotated[
        str | None, typer.Option(metavar="N", help="Blocks of each layer kept on the device. Default: what fits.")
    ] = None,
    gpu_memory: GpuMemory = None,
    cpu_memory: CpuMemory = None,
    config: Annotated[
        Path | None, typer.Option(metavar="YAML", help="Settings file; flags come before it. See configs/default.yaml.")
    ] = None,
    seed: Annotated[str | None, typer.Option(metavar="N", help="Start of the random numbers. Default: 0.")] = None,
    sampling: Annotated[
        str | None,
        typer.Option(metavar="greedy|checkpoint", help="Most likely token, or the checkpoint's generation settings."),
    ] = None,
    temperature: Annotated[str | None, typer.Option(metavar="X", help="Above 0 samples; 0 is greedy.")] = None,
    top_k: Annotated[str | None, typer.Option(metavar="N", help="Sample among the N most likely; 0 is all.")] = None,
    top_p: Annotated[str | None, typer.Option(metavar="X", help="Sample among those that reach X together.")] = None,
    min_p: Annotated[
        str | None, typer.Option(metavar="X", help="Sample among those at least X as likely as the first.")
    ] = None,
    repetition_penalty: Annotated[
        str | None, typer.Option(metavar="X", help="Make tokens seen before less likely; 1 is off.")
    ] = None,
    progress: Annotated[
        bool | None, typer.Option(help="Draw bars of tokenizing and prefill. Default: on a terminal.")
    ] = None,
    rope: Annotated[
        str | None,
        typer.Option(metavar="auto|none|yarn[:FACTOR]", help="Angles beyond the trained window. Default: auto."),
    ] = None,
    truncate: Annotated[
        str | None,
        typer.Option(metavar="head|middle|tail", help="Cut prompts that are too long there. Default: refuse them."),
    ] = None,
    encoding_errors: Annotated[
        str | None, typer.Option(metavar="strict|replace", help="Bytes that are no text. Default: strict, refused.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End the text before this string. May be repeated.")
    ] = None,
    stats: Annotated[bool | None, typer.Option(help="Print the figures of every request and of the run.")] = None,
    scrub: Annotated[bool | None, typer.Option(help="Overwrite a request's KV in memory when it ends.")] = None,
    compile: Annotated[
        bool | None, typer.Option(help="Compile norms, rotary angles and MLPs; the first time takes a minute.")
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write a Chrome trace of a prompt's last chunks and first tokens."),
    ] = None,
    trace_chunks: Annotated[str | None, typer.Option(metavar="N", help="Chunks in the trace. Default: 2.")] = None,
    prompt_format: Annotated[
        str | None,
        typer.Option(metavar="auto|text|jsonl", help="Of the prompts. Default: auto, JSONL where the name ends so."),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A line of JSON for every prompt goes there. One that is there is resumed."),
    ] = None,
    output_format: Annotated[
        str | None, typer.Option(metavar="jsonl|openai", help="Of results. Default: jsonl for a batch, else text.")
    ] = None,
    resume: Annotated[
        bool | None, typer.Option("--resume/--no-resume", help="Go on with an output that is there, or refuse it.")
    ] = None,
    overwrite: Annotated[bool | None, typer.Option("--overwrite", help="Replace an output that is there.")] = None,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Only every N-th record, from the I-th on. For job arrays.")
    ] = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the settings as they would hold, as YAML, and exit.")
    ] = False,
) -> None:
    """Answer prompts: text, or a line for each record, to standard output; everything else to standard error."""
    given = locals()
    with _stopping():
        settings = load_settings(config, {setting.name: given[setting.name] for setting in fields(Settings)})
        if show_config:
            sys.stdout.buffer.write(show_settings(settings).encode("utf-8"))
            return
        if model is None or not prompt:
            raise UsageError(f"give {'--model' if model is None else '--prompt'}; longgen run --help explains both")
        requests, settings = open_prompts(prompt, sys.stdin.buffer if sys.stdin else None, settings)
        import_libraries()

        from longgen.run import batch

        raise_interrupts()
        raise typer.Exit(batch.run(model, requests, settings, sys.stdout.buffer, sys.stderr))


@app.command()
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
        float | None, typer.Option(metavar="X", help="Rate of copies to the GPU in GB/s. Default: an H200's.")
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

    lengths = [parse_length(text) for text in max_len.split(",")] if max_len else []
    limits = reports.limits_of(settings, h2d_gbps, tflops)
    with _stopping():
        raise typer.Exit(reports.plan(model, lengths, settings, slots, limits, as_json, sys.stdout, sys.stderr))


@app.command()
def bench(
    model: Annotated[
        str | None, typer.Option(metavar="DIR|HUB_ID|NAME", help="A checkpoint, whose weights are loaded.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="YAML|NAME|DIR", help="A model's shape, with random weights made on the spot.")
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
    wanted = tuple(parse_length(text) for text in lengths.split(","))

    from longgen.benchmarking import command as benchmarking

    chosen = benchmarking.BenchOptions(
        wanted, benchmarking.parse_resident(resident_blocks), repeats, steps, random_kv, plot
    )
    with _stopping():
        raise_interrupts()
        line = shlex.join(["longgen", *sys.argv[1:]])
        raise typer.Exit(benchmarking.bench(model, shape, chosen, settings, line, sys.stdout, sys.stderr))


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say what this machine has, what is missing, and what each means."""
    from longgen.planning import doctor as examination

    with _stopping():
        examination.report(as_json, sys.stdout)


@evaluation.command()
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
    with _stopping():
        from longgen.evaluation import needle_run

        names = {setting.name for setting in fields(Settings)} & given.keys()
        flags = {name: given[name] for name in names}
        settings = load_settings(config, flags, {"max_new_tokens": needle_run.MAX_NEW_TOKENS})
        if model is None or lengths is None:
            raise UsageError(f"give {'--model' if model is None else '--lengths'}; longgen eval needle --help explains")
        tokens = tuple(parse_length(text) for text in lengths.split(","))
        options = needle_run.NeedleOptions(tokens, depths, kind, plot, inputs)
        raise typer.Exit(needle_run.run(model, options, settings, sys.stdout.buffer, sys.stderr))


@contextmanager
def _stopping() -> Iterator[None]:
    """Exit codes for a command that is told to stop: by Ctrl-C, or by the reader of its output going away."""
    try:
        yield
    except BaseException as error:
        # An interrupt may have become another exception on its way, or none.
        if isinstance(error, KeyboardInterrupt) or was_interrupted():
            raise_interrupts(False)
            print(INTERRUPTED, end="", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(EXIT_BROKEN_PIPE) from None
        raise
    finally:
        raise_interrupts(False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (None: the program's own arguments). Returns the exit code; README.md lists them."""
    # A stream that is closed when Python starts is None.
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  as long as the program
    if sys.stdout is None:
        return _fail("standard output is closed", UsageError.exit_code)
    return _flush(_call(arguments))


def _call(arguments: Sequence[str] | None) -> int:
    try:
        app(args=arguments, prog_name="longgen")
    except LongGenError as error:
        return _fail(str(error), error.exit_code)
    except OSError as error:  # of the text that --help writes
        return _fail(str(error), LongGenError.exit_code)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    return 0


def _flush(code: int) -> int:
    """What a run with this exit code ends with once standard output has taken what is left."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # Let Python's own flush at exit go nowhere instead of complaining.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return EXIT_BROKEN_PIPE
        return code or _fail(str(OutputError(error)), OutputError.exit_code)
    return code


def _fail(message: str, code: int) -> int:
    print(f"longgen: error: {message}", file=sys.stderr)
    return code
