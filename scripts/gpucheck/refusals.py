"""What does not fit is refused by the real command, in one line with numbers, before weights are loaded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from gpucheck.report import Settings
from gpucheck.shape import larger_shape
from longgen.model.checkpoint import resolve_checkpoint
from longgen.model.from_shape import text_config

LARGE = "a folder with the weights of a Qwen2.5-7B"


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked for, and words of the plan's refusal, which memory that runs out while loading does not say."""

    name: str
    model: str
    flags: tuple[str, ...]
    says: str


CUDA_CASES = (
    Case("too little GPU", "demo", ("--gpu-memory", "775MiB"), "states and buffers"),
    Case("cap below CUDA", "demo", ("--gpu-memory", "300MiB"), "for CUDA"),
    Case("cap below the weights", LARGE, ("--gpu-memory", "8GiB"), "14.2 GiB of GPU memory for its weights"),
    Case("cap above the card", "demo", ("--gpu-memory", "4TiB"), "that the card has"),
    Case("too little RAM", "demo", ("--cpu-memory", "1030MiB", "--resident-blocks", "0"), "for the KV cache"),
    Case("too little RAM for weights", LARGE, ("--cpu-memory", "8GiB"), "of host memory ("),
)
CPU_CASES = CUDA_CASES[-2:]
COLUMNS = ("case", "ok", "code", "says")


def check(settings: Settings) -> list[dict[str, Any]]:
    """A row for each case, all run at once."""
    cases = CUDA_CASES if settings.device.type == "cuda" else CPU_CASES
    with tempfile.TemporaryDirectory() as folder:
        prompt, large = Path(folder) / "prompt.txt", Path(folder) / "large"
        prompt.write_text("A number is hidden here. " * 400, encoding="utf-8")
        _write_large(large)
        models = {"demo": "demo", LARGE: str(large)}
        flags = ["--prompt", str(prompt), "--device", str(settings.device), "--max-new-tokens", "4"]
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "longgen", "run", *flags, "--model", models[case.model], *case.flags],
                cwd=Path(__file__).parents[2],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for case in cases
        ]
        return [_judged(case, process) for case, process in zip(cases, running, strict=True)]


def _write_large(folder: Path) -> None:
    """A checkpoint whose one shard is whole, and all zeros that take no disk: it must be refused before it is read."""
    config = text_config(larger_shape(small=False))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors, end = {}, 0
    for name, tensor in model.state_dict().items():
        start, end = end, end + 2 * tensor.numel()
        tensors[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(tensors).encode()
    config.save_pretrained(folder)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    for file_of_demo in resolve_checkpoint("demo").glob("tokenizer*"):
        shutil.copy(file_of_demo, folder)


def _judged(case: Case, process: subprocess.Popen[str]) -> dict[str, Any]:
    """The plan's lines and `chat template` come before loading; an error there is the last line, and the only one."""
    out, err = process.communicate()
    errors = [line for line in err.splitlines() if line.startswith("longgen: error: ")]
    last = (err.splitlines() or [""])[-1]
    numbers = any(letter.isdigit() for letter in last)
    ok = process.returncode == 1 and not out and errors == [last] and numbers and "Traceback" not in err
    ok &= case.says in last and not any("tok/s" in line and "prompt tokens" in line for line in err.splitlines())
    return {"case": case.name, "ok": ok, "code": process.returncode, "says": last}
