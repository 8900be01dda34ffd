"""bf16 through the engine is as near to the exact logits as transformers' own bf16 is.

Exact: transformers' eager, un-chunked, in fp32 without TF32, with the same bf16-rounded weights. The errors are random,
so both are taken over several prompts.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

from longgen.engine import Engine, EngineOptions
from tests.checkpoints import Build, random_ids
from tests.engine.running import chunks_of, feed

ALLOWED = 1.2
STEPS = 8  # decoded after the prompt
ROWS = 64 + STEPS  # whose logits are compared
PROMPTS = 5
EAGER_BYTES = 4 * 16  # of transformers' eager attention for each pair of query and key, at its peak: 4 heads, fp32
KINDS = [
    pytest.param("qwen3", {"head_dim": 64}, id="dense-64"),
    pytest.param("qwen3", {"head_dim": 128}, id="dense-128"),
    pytest.param("qwen3", {"head_dim": 256}, id="dense-256"),
    pytest.param("qwen3", {"head_dim": 64, "sliding": True, "window": 512}, id="sliding"),
    pytest.param("qwen3_moe", {"head_dim": 128}, id="moe"),
    pytest.param("qwen3_next", {"head_dim": 256}, id="qwen3_next"),
    pytest.param("qwen3_5", {"head_dim": 256}, id="qwen3_5"),
]
RUNS = [  # device, prompt, block, chunk
    pytest.param("cpu", 300, 16, 64, id="cpu"),
    pytest.param("cuda", 3_000, 256, 1024, id="3K-blocks-256", marks=pytest.mark.cuda),
    pytest.param("cuda", 3_000, 1024, 4096, id="3K", marks=pytest.mark.cuda),
    pytest.param("cuda", 40_000, 1024, 4096, id="40K", marks=pytest.mark.cuda),
]


@dataclass(frozen=True)
class Truth:
    """The exact logits of the last ROWS positions of a prompt, and how far transformers' bf16 eager is from them."""

    logits: torch.Tensor
    eager_error: float


Truths = Callable[[Path, str, torch.Tensor], Truth]


@contextmanager
def exact_arithmetic(model: Any) -> Iterator[None]:
    """fp32 means fp32: no TF32 in matrix products, and recurrent layers in plain torch rather than fused kernels."""
    module = sys.modules[type(model).__module__]
    allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    with ExitStack() as stack:
        for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
            if hasattr(module, name):
                stack.enter_context(patch.object(module, name, inspect.unwrap(getattr(module, name))))
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = allowed


@torch.no_grad()
def eager_logits(folder: Path, device: str, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 [ROWS, vocab] on the CPU, of weights rounded to bf16."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.bfloat16)
    model = model.to(dtype).to(device).eval()
    with ExitStack() as stack:
        if dtype is torch.float32:
            stack.enter_context(exact_arithmetic(model))
        logits = model(ids.to(device), logits_to_keep=ROWS, use_cache=False).logits[0].cpu().double()
    del model
    free_device_memory()
    return logits


def free_device_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def truths() -> Truths:
    """`Truth` of a checkpoint, device and prompt, computed once."""
    known: dict[tuple[Path, str, tuple[int, ...]], Truth] = {}

    def truth(folder: Path, device: str, ids: torch.Tensor) -> Truth:
        key = (folder, device, (ids.shape[1], *ids[0, :16].tolist()))
        if key not in known:
            exact = eager_logits(folder, device, ids, torch.float32)
            half = eager_logits(folder, device, ids, torch.bfloat16)
            known[key] = Truth(exact, float((half - exact).norm()))
        return known[key]

    return truth


@pytest.mark.parametrize("resident", [0, 2, 64], ids=["resident-none", "resident-some", "resident-all"])
@pytest.mark.parametrize(("device", "prompt", "block", "chunk"), RUNS)
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_error_is_no_larger_than_that_of_bf16_eager(
    build: Build,
    truths: Truths,
    kind: str,
    options: dict[str, Any],
    device: str,
    prompt: int,
    block: int,
    chunk: int,
    resident: int,
) -> None:
    if device == "cpu" and (resident != 2 or options.get("head_dim") != 64 or "sliding" in options):
        pytest.skip("one is enough on the CPU, to see that the test works")
    free_device_memory()
    if device == "cuda" and torch.cuda.mem_get_info()[0] < EAGER_BYTES * prompt**2:
        pytest.skip(f"transformers' eager attention over {prompt} tokens needs {EAGER_BYTES * prompt**2 >> 30} GiB")
    folder = build(kind, **options, max_position=65536)
    engine = Engine.load(
        folder,
        EngineOptions(
            device=device,
            dtype="bfloat16",
            block_size=block,
            chunk_size=chunk,
            resident_blocks=resident,
            ring_entries=2,
            ring_blocks=4,
        ),
    )
    ours = eager = exact = 0.0
    for seed in range(PROMPTS):
        ids = random_ids(prompt + STEPS, seed=seed)
        engine.reset()
        got = feed(engine, ids, chunks_of(prompt + STEPS, chunk, STEPS))[0, -ROWS:].cpu().double()
        truth = truths(folder, device, ids)
        ours += float((got - truth.logits).norm()) ** 2
        eager += truth.eager_error**2
        exact += float(truth.logits.norm()) ** 2
    ratio = (ours / eager) ** 0.5
    print(f"relative error {(ours / exact) ** 0.5:.2e}, of bf16 eager {(eager / exact) ** 0.5:.2e}: {ratio:.2f} times")
    assert ratio <= ALLOWED, f"{ratio:.2f} times the error of bf16 eager, {(eager / exact) ** 0.5:.2e}"
    assert eager < 0.1 * exact  # else both could be noise: an unrelated prompt gives twice `exact`
