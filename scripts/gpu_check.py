"""Everything that only a GPU can show, in one run: tests, backends, memory, speed, and the memory checker.

Tables go to stderr; the last line on stdout is one JSON object. The exit status is 0 if nothing that has a bar missed
it. On one H200 all of it takes some half an hour, half of it the speeds; `--only` chooses sections.

    python scripts/gpu_check.py
    python scripts/gpu_check.py --only backends,speed --json speed.json
    python scripts/gpu_check.py --small --device cpu     # shows that the script works
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

import torch
import transformers
from gpucheck import backends, memory, merge, plan, sanitizer, slots, speed, suite
from gpucheck.report import Result, Settings, say, table

from longgen.errors import UsageError
from longgen.options import EngineOptions

SECTIONS: MappingProxyType[str, Callable[[Settings], Result]] = MappingProxyType(
    {
        "tests": suite.run_tests,
        "stress": suite.run_stress,
        "backends": backends.run,
        "merge": merge.run,
        "memory": memory.run,
        "plan": plan.run,
        "speed": speed.run,
        "slots": slots.run,
        "sanitizer": sanitizer.run,
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        device = EngineOptions(device=options.device).torch_device()
    except UsageError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    settings = Settings(device, options.small, tuple(shlex.split(options.pytest)))
    summary: dict[str, Any] = {"ok": True, **_versions(device), "small": options.small, "sections": {}}
    for name in options.only:
        section = _run(name, settings)
        summary["sections"][name] = section
        summary["ok"] &= section["ok"] is not False
        if options.json:  # after each section: what follows may be cut short
            options.json.write_text(json.dumps(summary) + "\n", encoding="utf-8")
    say("")
    table(("section", "ok", "seconds"), [(k, v["ok"], float(v["seconds"])) for k, v in summary["sections"].items()])
    print(json.dumps(summary))
    return 0 if summary["ok"] else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_section_names, default=tuple(SECTIONS), help=f"of {','.join(SECTIONS)}")
    parser.add_argument("--sanitizer", action="store_const", dest="only", const=("sanitizer",), help="that section")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default: cuda)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, whose figures mean nothing")
    parser.add_argument("--pytest", default="", metavar="ARGUMENTS", help="more for pytest: --pytest='-k parity -x'")
    parser.add_argument("--json", type=Path, help="also write the JSON object to this file")
    return parser.parse_args(arguments)


def _section_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(SECTIONS)}")
    return names


def _versions(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}


def _run(name: str, settings: Settings) -> dict[str, Any]:
    """One section; an exception in it fails it, and the others still run."""
    say(f"\n== {name}")
    start = time.perf_counter()
    try:
        result = SECTIONS[name](settings)
    except Exception as error:  # whatever it was, the sections after it are still worth their time
        traceback.print_exc()
        result = Result(False, {"error": f"{type(error).__name__}: {error}"})
    took = time.perf_counter() - start
    gc.collect()
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()
    say(f"   {took:.1f} s")
    return {"ok": result.ok, "seconds": round(took, 1), **result.data}


if __name__ == "__main__":
    sys.exit(main())
