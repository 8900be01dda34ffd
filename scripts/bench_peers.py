"""The same prompt through longgen and through transformers' `generate`, with the same random weights, in one run.

    longgen       no resident blocks, and all of them
    transformers  its cache on the GPU (`dynamic`), and in host memory (`offloaded`)

`ratios` are transformers' times over longgen's: offloaded over no resident blocks, dynamic over all. longgen makes host
memory before the clock of its prefill starts, `pin_s` says how long that takes, and `prefill_and_pin` is the ratio with
it; a run does it while the weights load. Before it counts, transformers runs the whole prompt once, longgen the first
chunks and the last. Both models share their weights, so each peak holds them once. A table goes to stderr, one
JSON object to stdout, as the last line. What does not fit or cannot run has a reason instead of times.

    python scripts/bench_peers.py --tokens 128K
    python scripts/bench_peers.py --shape shape.yaml --tokens 1K --device cpu
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from longgen.benchmarking.command import Bench, BenchOptions
from longgen.benchmarking.measuring import WARM_UP_STEPS, random_prompt
from longgen.benchmarking.subject import Subject
from longgen.benchmarking.tables import table_lines
from longgen.config import Settings, load_settings, parse_length
from longgen.errors import LongGenError, UsageError
from longgen.kv.transfer import make_current
from longgen.model.from_shape import random_provider, text_config
from longgen.model.provider import Provider
from longgen.model_shape import ModelShape
from longgen.options import EngineOptions
from longgen.planning.facts import machine_facts, versions
from longgen.planning.plans import find_shape

PEERS = (("dynamic", "all"), ("offloaded", "none"))  # a cache of transformers, and longgen's residency it stands beside
MEASURED = ("pin_s", "prefill_s", "decode_ms", "device_peak_bytes")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        settings = load_settings(None, {"device": options.device, "block_size": options.block_size})
        if min(options.repeats, options.steps) < 1:
            raise UsageError("--repeats and --steps must be 1 or more")
        device = EngineOptions(device=settings.device).torch_device()
        shape, tokens = find_shape(options.shape), parse_length(options.tokens)
        text_config(shape)
    except LongGenError as error:
        print(f"bench_peers: {error}", file=sys.stderr)
        return error.exit_code
    make_current(device)
    transformers.logging.set_verbosity_error()
    provider = random_provider(shape, device)
    rows = [
        *_longgen_rows(provider, shape, tokens, options, settings, device),
        *_peer_rows(provider, shape, tokens, options, device),
    ]
    columns = ("engine", "cache", *MEASURED, "refused")
    for line in table_lines(columns, [[row[column] for column in columns] for row in rows]):
        print(line, file=sys.stderr)
    result = {"command": shlex.join(sys.argv), "machine": machine_facts(device), "versions": versions()}
    print(json.dumps(result | {"model": shape.name, "tokens": tokens, "rows": rows, "ratios": _ratios(rows)}))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", help="YAML file or short name (default: qwen3-0.6b)")
    parser.add_argument("--tokens", default="128K", help="of the prompt (default: 128K)")
    parser.add_argument("--repeats", type=int, default=3, help="prefills, of which the median counts (default: 3)")
    parser.add_argument("--steps", type=int, default=8, help="decoded tokens, of which the median counts (default: 8)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--block-size", help="of longgen (default: 1024)")
    return parser.parse_args(arguments)


def _longgen_rows(
    provider: Provider,
    shape: ModelShape,
    tokens: int,
    options: argparse.Namespace,
    settings: Settings,
    device: torch.device,
) -> list[dict[str, Any]]:
    """What `longgen bench` measures, with nothing and with everything on the device."""
    subject = Subject(shape, lambda _: provider, "random weights")
    rows = []
    for name, resident in (("none", 0), ("all", "all")):
        chosen = BenchOptions((tokens,), resident, options.repeats, options.steps)
        bench = Bench(subject, chosen, settings, device, sys.stderr)
        bench.measure()
        _release(device)
        row = {"engine": "longgen", "cache": name, "refused": "; ".join(bench.refused) or None}
        measured = bench.rows[0] if bench.rows else None
        rows.append(
            row
            | {
                "pin_s": measured and measured["pin_s"],
                "prefill_s": measured and measured["prefill"]["seconds"],
                "decode_ms": measured and measured["decode"]["ms_per_token"],
                "device_peak_bytes": measured and measured["device_peak_bytes"],
            }
        )
    return rows


def _peer_rows(
    provider: Provider, shape: ModelShape, tokens: int, options: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    model = _peer_model(provider, shape, device)
    rows = []
    for cache, _ in PEERS:
        row: dict[str, Any] = {"engine": "transformers", "cache": cache, "refused": None} | dict.fromkeys(MEASURED)
        if cache == "offloaded" and device.type == "cpu":
            row["refused"] = "it copies on the streams of a GPU, and this run is on the CPU"
        else:
            try:
                row |= _peer_times(model, cache, shape, tokens, options, device)
            # Out of memory, mostly: whatever it is, it is the result of this row.
            except Exception as error:
                row["refused"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        rows.append(row)
        _release(device)
    return rows


def _peer_model(provider: Provider, shape: ModelShape, device: torch.device) -> Any:
    """transformers' own model over the provider's weights, with the attention that it takes unless told otherwise."""
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            text_config(shape), dtype=provider.dtype, attn_implementation="sdpa"
        )
    missing = model.load_state_dict(provider.model.state_dict(), strict=False, assign=True).missing_keys
    assert not missing, f"weights that the models do not share: {missing}"
    return model.eval().requires_grad_(False)


class _Stamps(StoppingCriteria):
    """Takes the time after every generated token, once the device is done; stops nothing."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.wait()
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _peer_times(
    model: Any, cache: str, shape: ModelShape, tokens: int, options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    prefills, steps = [], []
    prompt = random_prompt(tokens, shape.vocab)
    _generate(model, cache, prompt, 2, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for turn in range(options.repeats):
        last = turn + 1 == options.repeats
        times = _generate(model, cache, prompt, 1 + (WARM_UP_STEPS + options.steps if last else 0), device)
        prefills.append(times[0])
        steps = times[1 + WARM_UP_STEPS :]
    return {
        "prefill_s": statistics.median(prefills),
        "decode_ms": statistics.median(steps) * 1e3,
        "device_peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def _generate(model: Any, cache: str, prompt: torch.Tensor, count: int, device: torch.device) -> list[float]:
    """Seconds of the prompt and its first token, and of each token after it."""
    wait = torch.cuda.synchronize if device.type == "cuda" else int
    stamps, ids = _Stamps(wait), prompt[None].to(device)
    settings = GenerationConfig(
        max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0, cache_implementation=cache
    )
    wait()
    started = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=settings,
        stopping_criteria=StoppingCriteriaList([stamps]),
    )
    assert len(stamps.times) == count, f"{len(stamps.times)} tokens instead of {count}"
    return [after - before for before, after in zip([started, *stamps.times], stamps.times, strict=False)]


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _ratios(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """transformers' times over longgen's."""
    found = {(row["engine"], row["cache"]): row for row in rows}

    def over(peer: float | None, ours: float | None, beside: float | None = 0.0) -> float | None:
        return peer / (ours + (beside or 0.0)) if peer and ours else None

    ratios = {}
    for cache, residency in PEERS:
        peer, ours = found["transformers", cache], found["longgen", residency]
        ratios[cache] = {
            "prefill_s": over(peer["prefill_s"], ours["prefill_s"]),
            "prefill_and_pin": over(peer["prefill_s"], ours["prefill_s"], ours["pin_s"]),
            "decode_ms": over(peer["decode_ms"], ours["decode_ms"]),
        }
    return ratios


if __name__ == "__main__":
    sys.exit(main())
