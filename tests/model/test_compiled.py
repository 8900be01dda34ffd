"""Compiled norms, rotary angles and MLPs: the same logits, few versions, and only for the sizes asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longgen.errors import LongGenError
from longgen.model.compiled import compile_layers
from longgen.model.provider import Provider
from tests.checkpoints import DENSE_TYPES, HYBRID_TYPES, Build, random_ids
from tests.engine.running import open_engine
from tests.model.running import feed, load

CHUNK, SIZES = 64, (64, 64, 64, 23, 1, 1, 7)
IDS = random_ids(sum(SIZES))
PROMPTS = 8  # whose errors count together: of one alone, rounding makes the ratio anything from 0.7 to 1.2


class Counted:
    """A backend of torch.compile that runs the graph as it is and counts graphs and their calls, by input shapes."""

    def __init__(self) -> None:
        self.graphs = 0
        self.calls: Counter[tuple[int, ...]] = Counter()

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1

        def run(*arguments: Any) -> Any:
            shapes = [tuple(x.shape) for x in arguments if isinstance(x, torch.Tensor) and x.ndim > 2]
            self.calls[shapes[0]] += 1
            return graph.forward(*arguments)

        return run


@pytest.fixture(autouse=True)
def fresh() -> Any:
    """What torch compiled is the process's: tests must not count each other's."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("model_type", [*DENSE_TYPES, *HYBRID_TYPES])
def test_logits_are_those_of_the_modules_and_few_versions_are_compiled(build: Build, model_type: str) -> None:
    folder = build(model_type)
    provider, store = load(folder)
    expected = feed(provider, store, IDS, SIZES)
    counted = Counted()
    provider, store = load(folder)
    layers = provider.config.num_hidden_layers
    assert compile_layers(provider.model, (CHUNK,), counted) > 2 * layers
    torch.testing.assert_close(feed(provider, store, IDS, SIZES), expected, atol=1e-6, rtol=1e-5)
    graphs = counted.graphs
    # Roles: two norms of a layer and the last one, norms of q and k, the MLP, the rotation.
    assert 0 < graphs <= 7
    sizes = {shape[1] for shape in counted.calls} | {shape[2] for shape in counted.calls if len(shape) == 4}
    assert CHUNK in sizes and not {23, 7, 1} & sizes
    store.reset(0)
    provider.reset(0)
    feed(provider, store, IDS, SIZES)
    assert counted.graphs == graphs


def test_compiling_again_takes_the_place_of_what_was_compiled(build: Build) -> None:
    first, second = Counted(), Counted()
    provider, store = load(build("qwen3"))
    assert compile_layers(provider.model, (CHUNK, 1), first) == compile_layers(provider.model, (CHUNK,), second)
    feed(provider, store, IDS, SIZES)
    assert not first.calls and second.calls


def test_only_the_model_that_is_named_is_changed(build: Build) -> None:
    folder, counted = build("qwen3"), Counted()
    compile_layers(load(folder)[0].model, (CHUNK,), counted)
    provider, store = load(folder)
    feed(provider, store, IDS, SIZES)
    assert not counted.calls


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(
    ("model_type", "dtype"), [("qwen3", "float32"), ("qwen3", "bfloat16"), ("qwen3_5", "bfloat16")]
)
def test_inductor_is_as_exact_as_the_modules(build: Build, model_type: str, dtype: str, device: str) -> None:
    if device == "cpu" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler on the CPU")
    if device == "cpu" and (model_type, dtype) == ("qwen3", "bfloat16"):
        pytest.skip("the rest is enough on the CPU")
    folder = build(model_type, head_dim=64)

    def logits(dtype: str, *, compiled: bool) -> torch.Tensor:
        engine, rows = open_engine(folder, device=device, dtype=dtype, compile=compiled), []
        for seed in range(PROMPTS):
            rows.append(engine.prefill(random_ids(150, seed=seed)[0]))  # two full chunks and a short one
            rows += [engine.decode_step(token) for token in (5, 6)]
        return torch.stack(rows)

    exact = logits("float32", compiled=False)
    eager, got = ((logits(dtype, compiled=compiled) - exact).norm() / exact.norm() for compiled in (False, True))
    assert float(got) <= max(1.1 * float(eager), 1e-5), (float(eager), float(got))


PROCESS = """
import sys, torch
from pathlib import Path
from torch._dynamo.utils import counters
from longgen.engine import Engine, EngineOptions
options = EngineOptions(device="cpu", block_size=16, chunk_size=64, compile=True)
Engine.load(Path(sys.argv[1]), options).prefill(torch.arange(64), new_tokens=1)
print(*(counters["inductor"][f"fxgraph_cache_{found}"] for found in ("hit", "miss")))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU")
def test_a_later_process_finds_what_was_compiled_on_disk(build: Build, tmp_path: Path) -> None:
    folder, environment = build("qwen3"), os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    found = []
    for _ in range(2):
        line = [sys.executable, "-c", PROCESS, str(folder)]
        done = subprocess.run(line, capture_output=True, text=True, check=True, env=environment)
        found.append([int(count) for count in done.stdout.split()])
    (_, missed), (hit, again) = found
    assert missed > 0 and hit >= missed and again == 0


def test_an_engine_compiles_for_its_chunk(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, ...]] = []
    monkeypatch.setattr(Provider, "compile", lambda self, given: sizes.append(given))
    open_engine(build("qwen3"), chunk=48, compile=True)
    open_engine(build("qwen3"))
    assert sizes == [(48,)]


def test_what_cannot_be_compiled_is_one_error(build: Build) -> None:
    def fail(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        raise OSError("no compiler\nhere")

    provider, store = load(build("qwen3"))
    compile_layers(provider.model, (CHUNK,), fail)
    feed(provider, store, IDS[:, :8], (7, 1))
    with pytest.raises(
        LongGenError, match=r"input_layernorm cannot be compiled, leave --compile out: .*no compiler here"
    ):
        feed(provider, store, IDS[:, :CHUNK], (CHUNK,))
