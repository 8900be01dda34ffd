"""What CUDA and its libraries take of a card beside tensors, in a process that does nothing else.

Run by the section `plan`: one JSON line for each step, then it waits for the end of its standard input.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def _attention(device: torch.device, backend: SDPBackend) -> None:
    q, k = (torch.randn(1, 8, n, 128, device=device, dtype=torch.bfloat16) for n in (4096, 16_384))
    with sdpa_kernel(backend):
        torch.nn.functional.scaled_dot_product_attention(q, k, k)


def _matmul(device: torch.device) -> None:
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    _ = a @ a


def report(device: torch.device) -> None:
    """After each step: bytes of the card in use by all processes, and what torch holds and has in tensors."""
    steps: tuple[tuple[str, Callable[[], object]], ...] = (
        ("context", lambda: None),
        ("one tensor", lambda: torch.zeros(1, device=device)),
        ("matrix product", lambda: _matmul(device)),
        ("flash attention", lambda: _attention(device, SDPBackend.FLASH_ATTENTION)),
        ("cuDNN attention", lambda: _attention(device, SDPBackend.CUDNN_ATTENTION)),
    )
    for name, step in steps:
        try:
            step()
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            name = f"{name}: {str(error).splitlines()[0][:80]}"
        free, total = torch.cuda.mem_get_info(device)
        row = {"step": name, "used": total - free, "reserved": torch.cuda.memory_reserved(device)}
        print(json.dumps(row | {"allocated": torch.cuda.max_memory_allocated(device)}), flush=True)


def probe(device: torch.device) -> tuple[int, list[dict[str, Any]]]:
    """Bytes of the card that are in use without the two processes this starts, and the steps of one of them.

    Each of them takes one context more: what the second adds tells what the first took.
    """
    command = [sys.executable, str(Path(__file__)), str(device)]
    processes = []
    try:
        rows = []
        for _ in range(2):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes.append(process)
            assert process.stdout is not None
            rows.append([json.loads(process.stdout.readline()) for _ in range(5)])
    finally:
        for process in processes:
            process.communicate()
    others = 2 * rows[0][-1]["used"] - rows[1][-1]["used"]
    return others, [row | {"used": row["used"] - others} for row in rows[0]]


if __name__ == "__main__":
    report(torch.device(sys.argv[1]))
    sys.stdin.read()
