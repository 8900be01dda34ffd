"""The command line of the training script: options, training, evaluation, one line of JSON."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from demo_checkpoint.data import STAGES
from demo_checkpoint.evaluate import evaluate, report
from demo_checkpoint.model import make_model, save_checkpoint
from demo_checkpoint.train import TrainOptions, scaled, train
from longgen.config import parse_length
from longgen.engine import EngineOptions
from longgen.errors import LongGenError, UsageError
from longgen.model.checkpoint import DEMO_FOLDER

SHORTEST = 1024  # bytes of a text to evaluate


def parse(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEMO_FOLDER, help="folder to write (default: the shipped one)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and evaluation (default: 0)")
    parser.add_argument("--steps-scale", type=float, default=1.0, help="times the steps of every stage (default: 1)")
    parser.add_argument("--stages", type=int, default=len(STAGES), help="train only the first so many (default: all)")
    parser.add_argument("--tokens", type=int, default=None, help="bytes in a step (CPU 8192, GPU 32768)")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of the matrices (default: 0.02)")
    parser.add_argument(
        "--anneal", type=float, default=0.4, help="share of steps in which it falls to 0 (default: 0.4)"
    )
    parser.add_argument("--workers", type=int, default=None, help="processes that make data (CPU 0, GPU the cores)")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=None, help="torch.compile (default: on the CPU)"
    )
    parser.add_argument("--evaluate-only", action="store_true", help="only evaluate the folder that is there")
    parser.add_argument("--eval-lengths", default=None, help="such as 1K,8K,64K (CPU to 32K, GPU to 512K); '' for none")
    parser.add_argument("--eval-depths", type=int, default=10, help="documents of a sort and length (default: 10)")
    parser.add_argument("--eval-chunk", default="4K", help="tokens in a chunk of the prefill (default: 4K)")
    parser.add_argument(
        "--eval-distractors",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also ask for magic numbers among others (default)",
    )
    return parser.parse_args()


def main(description: str | None) -> int:
    """Returns the exit code. What is wrong with the options is said in one line, before anything is trained."""
    args = parse(description)
    try:
        summary = _run(args)
    except LongGenError as error:
        print(f"train_demo_checkpoint: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(summary))
    return 0


def _run(args: argparse.Namespace) -> dict[str, Any]:
    options = EngineOptions(device=args.device, chunk_size=parse_length(args.eval_chunk))
    options.chunk_tokens()  # raises for a chunk that is not a multiple of the block
    device = options.torch_device()
    sizes = _sizes(args, device)
    start = time.monotonic()
    if not args.evaluate_only:
        _train(args, device)
    trained = time.monotonic() - start
    asked = evaluate(args.out, options, sizes, args.eval_depths, distractors=args.eval_distractors, seed=args.seed)
    rows = report(asked) if sizes else []
    return {
        "folder": str(args.out),
        "bytes": sum(path.stat().st_size for path in args.out.iterdir()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "seed": args.seed,
        "train_seconds": round(trained, 1),
        "rows": [asdict(row) for row in rows],
    }


def _sizes(args: argparse.Namespace, device: torch.device) -> list[int]:
    """The lengths to evaluate. Raises UsageError for what is wrong with these options and for a folder that cannot be
    made."""
    lengths = args.eval_lengths
    if lengths is None:
        lengths = "1K,8K,64K,512K" if device.type == "cuda" else "1K,8K,32K"
    sizes = [parse_length(length) for length in lengths.split(",")] if lengths else []
    if min(sizes, default=SHORTEST) < SHORTEST:
        raise UsageError(f"--eval-lengths {lengths}: a text with its needles takes {SHORTEST:,} bytes or more")
    if args.eval_depths < 1 or not 1 <= args.stages <= len(STAGES):
        raise UsageError(f"--eval-depths must be 1 or more, and --stages 1 to {len(STAGES)}")
    if not args.evaluate_only:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {args.out} cannot be made: {error.strerror}") from None
    return sizes


def _train(args: argparse.Namespace, device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    cores = len(os.sched_getaffinity(0))
    compiled = args.compile
    if compiled is None:
        compiled = not on_gpu and bool(shutil.which("g++")) and importlib.util.find_spec("torch._inductor") is not None
    options = TrainOptions(
        tokens=args.tokens or (32768 if on_gpu else 8192),
        lr=args.lr,
        anneal=args.anneal,
        seed=args.seed,
        workers=args.workers if args.workers is not None else (max(1, min(12, cores - 2)) if on_gpu else 0),
        compiled=compiled,
    )
    stages = scaled(STAGES[: args.stages], args.steps_scale)
    model = make_model(device, args.seed)
    count = sum(weight.numel() for weight in model.parameters())
    print(f"{count:,} parameters on {device}; {options}", file=sys.stderr)
    train(model, stages, options, device, lambda stage: save_checkpoint(model, args.out))
