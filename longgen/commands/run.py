"""`longgen run`."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from longgen.commands.common import CpuMemory, GpuMemory, missing_options, stopping
from longgen.config import Settings, load_settings, show_settings
from longgen.run.interrupts import raise_interrupts
from longgen.run.records import open_prompts
from longgen.run.startup import import_libraries


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
    with stopping():
        settings = load_settings(config, {setting.name: given[setting.name] for setting in fields(Settings)})
        if show_config:
            sys.stdout.buffer.write(show_settings(settings).encode("utf-8"))
            return
        if model is None or not prompt:
            raise missing_options("run", {"--model": model, "--prompt": prompt})
        requests, settings = open_prompts(prompt, sys.stdin.buffer if sys.stdin else None, settings)
        import_libraries()

        from longgen.run import batch

        raise_interrupts()
        raise typer.Exit(batch.run(model, requests, settings, sys.stdout.buffer, sys.stderr))
