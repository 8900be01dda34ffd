"""What comes along for batches: settings for the common jobs, and a script that runs one to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longgen.config import load_settings
from tests.batches.running import batch, read_lines, run, untimed, write_records

ROOT = Path(__file__).parents[2]
JOBS = ("evaluation", "long-document", "openai-batch", "sampling")
WORDS = "The quick brown fox jumps over the lazy dog "


def test_every_file_of_settings_is_looked_at() -> None:
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == {*JOBS, "default", "models"}


@pytest.mark.parametrize("job", JOBS)
def test_the_settings_of_a_common_job_run_it(tiny: Path, tmp_path: Path, job: str) -> None:
    config = ROOT / "configs" / f"{job}.yaml"
    settings = load_settings(config, {})
    prompts = write_records(tmp_path / "a.jsonl", [{"custom_id": "x", "prompt": WORDS}])
    done = run(tmp_path / "run", *batch(tiny, prompts, "--config", str(config), "--max-new-tokens", "3"))
    assert done.code == 0, done.err
    line = done.lines[0]
    assert (line["custom_id"], line["error"]) == ("x", None)
    held = line["longgen"]["settings"] if settings.output_format == "openai" else line["settings"]
    assert held["temperature"] == (0.7 if settings.sampling == "checkpoint" else 0.0)
    assert held["truncate"] == settings.truncate and held["max_len"] == (settings.max_len or 32768)


# Runs the program; the first time in a folder, kills it once there are two results.
PROGRAM = """#!/bin/bash
if [[ -e {folder}/killed ]]; then exec {python} -m longgen "$@"; fi
touch {folder}/killed
{python} -m longgen "$@" &
while [[ $(cat {folder}/results.jsonl.* 2>/dev/null | wc -l) -lt 2 ]]; do sleep 0.02; done
kill -KILL $!
wait $!
"""


def _script(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = folder / "program"
    path.write_text(program.format(folder=folder, python=sys.executable))
    path.chmod(0o755)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "LONGGEN": str(path)}
    command = ["bash", str(ROOT / "scripts" / "run_batch.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_the_script_outlives_kills_and_brings_shards_together(tiny: Path, tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [{"id": n, "prompt": WORDS * (n + 1), "max_tokens": 200} for n in range(9)]
    records[5]["seed"] = "x"
    prompts, results = write_records(tmp_path / "a.jsonl", records), tmp_path / "results.jsonl"
    flags = ("--block-size", "16", "--chunk-size", "64", "--dtype", "float32", "--device", "cpu")
    done = _script(tmp_path, PROGRAM, str(tiny), str(prompts), str(results), "2", *flags)
    assert done.returncode == 1, done.stderr  # a record failed
    assert done.stdout == ""
    assert "run_batch: shard 1 ended with 137; going on" in done.stderr
    assert "of 5 records are done; going on with the others" in done.stderr
    whole = tmp_path / "whole"
    assert run(tmp_path / "run", *batch(tiny, prompts, "--output", str(whole))).code == 1
    assert untimed(results) == untimed(whole)
    assert [line["id"] for line in read_lines(results)] == list(range(9))


@pytest.mark.parametrize(
    ("program", "code", "message"),
    [
        ("#!/bin/bash\nexit 2\n", 2, ""),
        ("#!/bin/bash\nexit 130\n", 130, ""),
        ("#!/bin/bash\nexit 1\n", 1, "run_batch: 0 of 3 records have a result; nothing is brought together"),
        ("#!/bin/bash\nkill -KILL $$\n", 137, "shard 1 ended with 137 three times without a new result"),
    ],
)
def test_the_script_ends_where_going_on_is_no_use(tmp_path: Path, program: str, code: int, message: str) -> None:
    prompts = write_records(tmp_path / "a.jsonl", [{"prompt": "x"}] * 3)
    for file in ("results.jsonl.1-of-2", "results.jsonl.2-of-2"):
        (tmp_path / file).touch()
    done = _script(tmp_path, program, "model", str(prompts), str(tmp_path / "results.jsonl"), "2")
    assert done.returncode == code
    assert message in done.stderr
    assert not (tmp_path / "results.jsonl").exists()


def test_the_script_explains_itself(tmp_path: Path) -> None:
    asked, without = _script(tmp_path, "", "--help"), _script(tmp_path, "", "model")
    assert (asked.returncode, asked.stderr, without.returncode, without.stdout) == (0, "", 2, "")
    assert asked.stdout == without.stderr
    assert asked.stdout.startswith("Runs a batch to its end") and asked.stdout.endswith("1 if some record failed.\n")
    assert "  scripts/run_batch.sh MODEL PROMPTS.jsonl RESULTS.jsonl SHARDS" in asked.stdout


@pytest.mark.parametrize("shards", ["0", "-1", "abc", "2.5", "08", ""])
def test_the_script_refuses_a_number_of_shards_that_is_none(tmp_path: Path, shards: str) -> None:
    prompts = write_records(tmp_path / "a.jsonl", [{"prompt": "x"}])
    done = _script(tmp_path, "#!/bin/bash\nexit 0\n", "model", str(prompts), str(tmp_path / "results.jsonl"), shards)
    assert done.returncode == 2
    assert done.stderr.startswith(f"run_batch: SHARDS is '{shards}'; ") and done.stderr.count("\n") == 1


# Writes a line for each of the records 1, 3, ... or 2, 4, ... of three, as a run of a shard would.
PRETENDS = "#!/bin/bash\nfor ((i = ${{7%/*}}; i <= 3; i += 2)); do echo $i; done >${{9}}\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be"])
def test_the_script_counts_records_in_every_encoding_that_is_read(tmp_path: Path, encoding: str) -> None:
    prompts, results = tmp_path / "a.jsonl", tmp_path / "results.jsonl"
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    lines = ['{"prompt": "\u0a0a"}', "", '{"prompt": "x"}', " \t", '{"prompt": "y"}', ""]  # U+0A0A: two line feeds
    prompts.write_bytes((mark + "\n".join(lines)).encode(encoding))
    done = _script(tmp_path, PRETENDS, "model", str(prompts), str(results), "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert results.read_text().split() == ["1", "2", "3"]


def test_the_script_leaves_alone_what_it_did_not_make(tiny: Path, tmp_path: Path) -> None:
    prompts, results = write_records(tmp_path / "a.jsonl", [{"prompt": "x"}, {"prompt": "y"}]), tmp_path / "results"
    before = prompts.read_bytes()
    program = '#!/bin/bash\nexec {python} -m longgen "$@"\n'
    flags = ("--block-size", "16", "--chunk-size", "64", "--dtype", "float32", "--device", "cpu")
    tail = ("2", *flags, "--max-new-tokens", "3")
    (tmp_path / "link").symlink_to(prompts)
    for target in (prompts, tmp_path / "link"):
        refused = _script(tmp_path, program, str(tiny), str(prompts), str(target), *tail)
        assert refused.returncode == 2 and "are the prompts" in refused.stderr
    results.write_text("mine\n")
    refused = _script(tmp_path, program, str(tiny), str(prompts), str(results), *tail)
    assert refused.returncode == 2 and "was not made here" in refused.stderr
    assert (prompts.read_bytes(), results.read_text()) == (before, "mine\n")
    results.unlink()
    for _ in range(2):  # the second time nothing is left to do
        assert _script(tmp_path, program, str(tiny), str(prompts), str(results), *tail).returncode == 0
        assert [line["id"] for line in read_lines(results)] == ["1", "2"]
    for flag in ("--overwrite", "--no-resume"):
        refused = _script(tmp_path, program, str(tiny), str(prompts), str(results), *tail, flag)
        assert refused.returncode == 2 and f"run_batch: {flag} would" in refused.stderr
