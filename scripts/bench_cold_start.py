"""Times `longgen run` on a short prompt, from the start of the process to its end, beside what it cannot do without:
the same Python importing torch, transformers and the model's class, and loading the weights.

All are run in turn, in processes of their own. Figures go to stderr; the last line on stdout is one JSON object with
the medians. `ratio` is the run's time over that of imports, class and weights; `cpu_ratio` is of the processors' time,
which says more on a machine that does other things too. `bare_ratio` is over less than any run can do with: `import
torch, transformers`, which leaves most of transformers unimported, and the weights where the class is there already.

    python scripts/bench_cold_start.py
    python scripts/bench_cold_start.py --device cuda --repeats 7
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

from longgen.errors import LongGenError, UsageError
from longgen.model.checkpoint import resolve_checkpoint
from longgen.options import EngineOptions
from longgen.planning.facts import machine_facts, versions

PROMPT = "Hello, who are you?\n"
IMPORTS = "import torch, transformers"
# As the run loads them: the class is imported, the weights are put on the device, and the device is waited for.
WEIGHTS = """
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True).to(device).eval()
next(model.parameters()).flatten()[0].item()
"""
LOADING = f"""
import sys, time
from transformers import AutoModelForCausalLM
folder, device = sys.argv[1:]
{WEIGHTS}
"""
# And once more, timed, where everything that loading needs is imported.
AGAIN = f"""
started = time.perf_counter()
{WEIGHTS}
print(time.perf_counter() - started)
"""
KINDS = ("imports", "imports and weights", "run")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        if options.repeats < 1:
            raise UsageError("--repeats must be 1 or more")
        device = EngineOptions(device=options.device).torch_device()
        folder = resolve_checkpoint(options.model)
    except LongGenError as error:
        print(f"bench_cold_start: {error}", file=sys.stderr)
        return error.exit_code
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    phases: list[dict[str, float]] = []
    weights: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        prompt = Path(place) / "prompt.txt"
        prompt.write_text(PROMPT, encoding="utf-8")
        run = [sys.executable, "-m", "longgen", "run", "--model", str(folder), "--prompt", str(prompt), "--stats"]
        loading = [sys.executable, "-c", IMPORTS + LOADING, str(folder), str(device)]
        commands = {
            "imports": [sys.executable, "-c", IMPORTS],
            "imports and weights": loading,
            "run": [*run, "--device", str(device), "--max-new-tokens", str(options.max_new_tokens)],
        }
        for turn in range(options.repeats + 1):  # the first reads the disk
            for kind, command in commands.items():
                seconds, cpu, done = _time(command)
                if turn:
                    times[kind].append((seconds, cpu))
                    print(f"{kind}: {seconds:.2f} s, of processors {cpu:.2f} s", file=sys.stderr, flush=True)
                if turn and kind == "run":
                    phases.append(_phases(done.stderr))
            if turn:
                weights.append(float(_time([*loading[:2], loading[2] + AGAIN, *loading[3:]])[2].stdout))
    summary = _summary(times, weights, phases, options)
    print(json.dumps(summary | {"machine": machine_facts(device), "versions": versions()}))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="checkpoint folder, hub id, or demo (default)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--repeats", type=int, default=5, help="of which the median counts (default: 5)")
    parser.add_argument("--max-new-tokens", type=int, default=8, help="(default: 8)")
    return parser.parse_args(arguments)


def _time(command: Sequence[str]) -> tuple[float, float, subprocess.CompletedProcess[str]]:
    """Seconds from the start of a process to its end, those of processors, and what it said."""
    started, before = time.perf_counter(), _children_cpu()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(f"bench_cold_start: {command[1:3]} failed: {done.stderr}")
    return seconds, _children_cpu() - before, done


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _phases(said: str) -> dict[str, float]:
    """The phases that `--stats` prints."""
    lines = [line.removeprefix("longgen: stats ") for line in said.splitlines() if line.startswith("longgen: stats ")]
    return next(figures["phases"] for line in lines if "phases" in (figures := json.loads(line)))


def _summary(
    times: dict[str, list[tuple[float, float]]],
    weights: Sequence[float],
    phases: Sequence[dict[str, float]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    medians, cpu = ({kind: statistics.median(each[i] for each in times[kind]) for kind in KINDS} for i in (0, 1))
    weights_s = statistics.median(weights)
    return {
        "model": options.model,
        "repeats": options.repeats,
        "imports_s": medians["imports"],
        "imports_and_weights_s": medians["imports and weights"],
        "weights_s": weights_s,
        "run_s": medians["run"],
        "ratio": medians["run"] / medians["imports and weights"],
        "bare_ratio": medians["run"] / (medians["imports"] + weights_s),
        "cpu_s": cpu,
        "cpu_ratio": cpu["run"] / cpu["imports and weights"],
        "runs": times,
        "phases": {name: statistics.median(each[name] for each in phases) for name in phases[0]},
    }


if __name__ == "__main__":
    sys.exit(main())
