"""`longgen bench` as a user runs it, on the CPU with tiny shapes. What it measures there means nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longgen.benchmarking import command
from longgen.benchmarking.measuring import Measured
from longgen.cli import main
from longgen.engine import Engine
from longgen.errors import CapacityError
from longgen.kv.budget import HostBudget
from longgen.kv.memory_plan import Machine
from tests.traces import ranges

DENSE = """
family: qwen3
hidden: 64
layers: 2
q_heads: 4
kv_heads: 2
head_dim: 16
mlp: 96
vocab: 320
tied: true
trained_window: 32768
dtype: float32
"""
SLIDING = """
family: qwen2
hidden: 64
layers: 3
q_heads: 4
kv_heads: 2
head_dim: 16
mlp: 96
vocab: 320
tied: true
trained_window: 32768
window: 100
window_layers: [1]
dtype: float32
"""
HYBRID = """
family: qwen3_5_moe
hidden: 64
layers: 4
full_attention_every: 2
q_heads: 4
kv_heads: 2
head_dim: 16
vocab: 320
delta: {key_heads: 2, value_heads: 4, key_dim: 16, value_dim: 16, kernel: 4}
experts: {count: 4, active: 2, width: 32, shared_width: 32}
trained_window: 32768
dtype: float32
"""
CEILINGS = ("h2d_gbps", "d2h_gbps", "both_gbps", "attention_tflops", "matmul_tflops", "device_gbps")


@pytest.fixture
def shape(tmp_path: Path) -> Callable[[str], str]:
    """Writes a shape to a file."""

    def write(text: str) -> str:
        file = tmp_path / "shape.yaml"
        file.write_text(text, encoding="utf-8")
        return str(file)

    return write


def bench(*arguments: str) -> tuple[dict[str, Any], str]:
    """The JSON on standard output, which must be one line, and standard error."""
    line = [sys.executable, "-m", "longgen", "bench", "--device", "cpu", "--block-size", "16", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout), done.stderr


def test_a_shape_is_measured_and_every_share_is_of_its_ceiling(shape: Callable[[str], str], tmp_path: Path) -> None:
    picture = tmp_path / "times.png"
    arguments = ("--shape", shape(DENSE), "--lengths", "200,1K", "--chunk-size", "64", "--resident-blocks", "4")
    result, err = bench(*arguments, "--repeats", "2", "--steps", "3", "--plot", str(picture))
    assert result["command"].startswith("longgen bench --device cpu") and result["refused"] == []
    assert result["complete"] is True
    assert result["machine"]["device"] == "cpu" and result["versions"]["torch"] == torch.__version__
    assert result["model"]["family"] == "qwen3" and not result["random_kv"]
    ceilings = result["ceilings"]
    assert min(ceilings[name] for name in CEILINGS) > 0
    assert ceilings["attention_tflops"] == max(ceilings["backends"].values())
    assert ceilings["backends"][ceilings["attention_backend"]] == ceilings["attention_tflops"]
    assert [row["tokens"] for row in result["rows"]] == [200, 1024]
    for row in result["rows"]:
        assert (row["resident_blocks"], row["chunk_tokens"], row["block_size"]) == (4, 64, 16)
        check_prefill(row, ceilings)
        check_decode(row, ceilings)
        assert row["host_peak_bytes"] > row["host_kv_bytes"] > 0
        assert row["device_peak_bytes"] is row["device_used_bytes"] is None
    table = [line for line in err.splitlines() if line.startswith("  ")]
    assert len(table) == 3 and table[0].split()[:3] == ["tokens", "resident", "chunk"]
    assert table[2].split()[0] == "1,024"
    assert picture.read_bytes().startswith(b"\x89PNG")


def check_prefill(row: dict[str, Any], ceilings: dict[str, Any]) -> None:
    prefill, tokens = row["prefill"], row["tokens"]
    seconds = prefill["seconds"]
    assert len(prefill["runs"]) == 2 and seconds == pytest.approx(sum(prefill["runs"]) / 2)
    assert prefill["tokens_per_s"] == pytest.approx(tokens / seconds)
    assert prefill["attention_flop"] == 2 * 4 * 4 * 16 * tokens * (tokens + 1) / 2
    assert prefill["tflops"] == pytest.approx((prefill["attention_flop"] + prefill["linear_flop"]) / seconds / 1e12)
    assert prefill["of_attention"] == pytest.approx(
        prefill["attention_flop"] / seconds / 1e12 / ceilings["attention_tflops"]
    )
    assert prefill["attention_tflops"] == pytest.approx(prefill["of_attention"] * ceilings["attention_tflops"])
    loaded, offloaded = prefill["h2d_bytes"], prefill["d2h_bytes"]
    assert prefill["copied_gbps"] == pytest.approx((loaded + offloaded) / seconds / 1e9)
    both = min(loaded, offloaded)
    wire = both / ceilings["both_gbps"] + (loaded - both) / ceilings["h2d_gbps"]
    wire += (offloaded - both) / ceilings["d2h_gbps"]
    assert prefill["of_wire"] == pytest.approx(wire / 1e9 / seconds)
    roofline = (
        prefill["attention_flop"] / ceilings["attention_tflops"] + prefill["linear_flop"] / (ceilings["matmul_tflops"])
    )
    assert prefill["roofline_s"] == pytest.approx(roofline / 1e12)
    assert prefill["times_roofline"] == pytest.approx(seconds / prefill["roofline_s"])


def check_decode(row: dict[str, Any], ceilings: dict[str, Any]) -> None:
    decode = row["decode"]
    seconds = decode["ms_per_token"] / 1e3
    assert len(decode["runs_ms"]) == 3 and decode["ms_per_token"] == sorted(decode["runs_ms"])[1]
    assert decode["h2d_bytes"] == (row["tokens"] // 16 - 4) * 16 * 2 * 2 * 2 * 16 * 4
    assert decode["h2d_gbps"] == pytest.approx(decode["h2d_bytes"] / seconds / 1e9)
    assert decode["of_wire"] == pytest.approx(decode["h2d_gbps"] / decode["copy_gbps"])
    assert decode["of_device"] == pytest.approx(decode["read_bytes"] / seconds / 1e9 / ceilings["device_gbps"])
    roofline = max(decode["h2d_bytes"] / decode["copy_gbps"], decode["read_bytes"] / ceilings["device_gbps"]) / 1e6
    assert decode["roofline_ms"] == pytest.approx(roofline)


def test_random_values_stand_in_for_a_prefill_of_a_hybrid(shape: Callable[[str], str]) -> None:
    arguments = ("--shape", shape(HYBRID), "--lengths", "1000", "--random-kv", "--resident-blocks", "all")
    result, _ = bench(*arguments, "--steps", "2")
    (row,) = result["rows"]
    assert result["random_kv"] and row["prefill"] is None
    assert row["resident_blocks"] == 63 and row["decode"]["h2d_bytes"] == 0 and row["decode"]["copy_gbps"] is None
    assert len(row["decode"]["runs_ms"]) == 2


def test_the_end_of_the_longest_is_traced_after_it_was_timed(
    shape: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[bool] = []
    measure = command.measure_length

    def measured(engine: Engine, tokens: int, **options: Any) -> Measured:
        found = measure(engine, tokens, **options)
        traced.append(tokens == 1000 and trace.exists())
        return found

    monkeypatch.setattr(command, "measure_length", measured)
    for name, text in (("dense", DENSE), ("sliding", SLIDING), ("hybrid", HYBRID)):
        trace = tmp_path / f"{name}.json"
        arguments = ["--shape", shape(text), "--lengths", "1000,200", "--chunk-size", "64", "--block-size", "16"]
        sizes = ["--resident-blocks", "0", "--repeats", "1", "--steps", "1", "--trace-chunks", "3"]
        code, out, err = run_here([*arguments, *sizes, "--trace", str(trace)], capsys)
        assert code == 0 and len(json.loads(out)["rows"]) == 2
        assert err.count("longgen: trace of ") == 1 and f"trace of 3 chunks and 3 decode steps in {trace}" in err
        expected = [f"prefill: running {min(64, 1000 - start)} tokens after {start}" for start in (832, 896, 960)]
        expected += [f"decode: running 1 token after {length:,}" for length in (1000, 1001, 1002)]
        assert [range_ for range_ in ranges(trace) if ": running" in range_] == expected
    assert traced == [False] * 6


def test_a_trace_that_cannot_be_written_after_all_does_not_take_the_figures_along(
    shape: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "gone"
    place.mkdir()

    def record(*_: object) -> None:
        place.rmdir()
        raise CapacityError("no room for it")

    monkeypatch.setattr(command, "record_end", record)
    arguments = ["--shape", shape(DENSE), "--lengths", "400,300", "--repeats", "1", "--steps", "1", "--random-kv"]
    code, out, err = run_here([*arguments, "--trace", str(place / "t.json")], capsys)
    result = json.loads(out)
    assert code == 1 and [row["tokens"] for row in result["rows"]] == [400, 300]
    assert result["complete"] and result["refused"] == []
    assert "longgen: error: no trace: no room for it\n" in err
    assert f"longgen: error: the trace {place / 't.json'} cannot be written: " in err


def test_what_was_measured_before_an_interrupt_is_printed(
    shape: Callable[[str], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = command.measure_length

    def measured(engine: Engine, tokens: int, **options: Any) -> Measured:
        if tokens in interrupted:
            raise KeyboardInterrupt
        return measure(engine, tokens, **options)

    monkeypatch.setattr(command, "measure_length", measured)
    arguments = ["--shape", shape(DENSE), "--lengths", "300,400", "--repeats", "1", "--steps", "1", "--random-kv"]
    interrupted = {400}
    code, out, err = run_here(arguments, capsys)
    assert code == 130 and [row["tokens"] for row in json.loads(out)["rows"]] == [300]
    assert json.loads(out)["complete"] is False and "decode ms" in err
    interrupted = {300}
    code, out, _ = run_here(arguments, capsys)
    assert (code, out) == (130, "")


def test_a_trace_of_its_own_is_asked_for_beside_a_plot(
    shape: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(tmp_path / "both.svg")
    code, out, err = run_here(["--shape", shape(DENSE), "--lengths", "1K", "--trace", place, "--plot", place], capsys)
    assert (code, out) == (2, "")
    assert err == f"longgen: error: the trace {place} would replace the plot; give it a file of its own\n"


def test_compiled_code_is_measured_where_asked(
    shape: Callable[[str], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[set[int]] = []
    monkeypatch.setattr("longgen.model.provider.compile_layers", lambda _, wanted: sizes.append(set(wanted)))
    arguments = ["--shape", shape(DENSE), "--lengths", "300", "--chunk-size", "64", "--block-size", "16", "--random-kv"]
    for flags, compiled in (([], False), (["--compile"], True)):
        code, out, _ = run_here([*arguments, "--repeats", "1", "--steps", "1", *flags], capsys)
        assert code == 0 and json.loads(out)["compiled"] is compiled
    assert sizes == [{64}]


def run_here(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["bench", "--device", "cpu", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_checkpoint_is_measured_with_its_weights(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_here(
        ["--model", "demo", "--lengths", "300", "--repeats", "1", "--steps", "1", "--random-kv"], capsys
    )
    assert code == 0 and "demo, the checkpoint's weights, bfloat16" in err
    assert json.loads(out)["rows"][0]["tokens"] == 300


def test_a_length_that_does_not_fit_is_named_and_the_others_are_measured(
    shape: Callable[[str], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Machine(HostBudget(1200 << 20, 0, "a test", ()), None, None, shared=True)
    monkeypatch.setattr(command, "run_machine", lambda *_: small)
    code, out, err = run_here(["--shape", shape(DENSE), "--lengths", "300,64M", "--repeats", "1"], capsys)
    assert code == 1
    assert [row["tokens"] for row in json.loads(out)["rows"]] == [300] and len(json.loads(out)["refused"]) == 1
    assert sum(line.startswith("longgen: error: shape with 67,108,874 tokens needs") for line in err.splitlines()) == 1


def test_a_length_that_runs_out_of_memory_leaves_the_others_alone(
    shape: Callable[[str], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = command.measure_length

    def measured(engine: Engine, tokens: int, **options: Any) -> Measured:
        if tokens == 300:
            raise CapacityError("no room")
        return measure(engine, tokens, **options)

    monkeypatch.setattr(command, "measure_length", measured)
    arguments = ["--shape", shape(DENSE), "--lengths", "300,400", "--repeats", "1", "--steps", "1"]
    code, out, err = run_here(arguments, capsys)
    assert code == 1 and "longgen: error: no room\n" in err
    assert [row["tokens"] for row in json.loads(out)["rows"]] == [400] and json.loads(out)["refused"] == ["no room"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "SHAPE", "--lengths", "16Q"], "'16Q' is not a length"),
        (["--shape", "SHAPE"], "give --lengths"),
        (["--lengths", "1K"], "give either --model"),
        (["--shape", "SHAPE", "--lengths", "1K", "--trace-chunks", "3"], "give --trace FILE with it"),
        (["--model", "demo", "--shape", "SHAPE", "--lengths", "1K"], "give either --model"),
        (["--shape", "SHAPE", "--lengths", "1K", "--resident-blocks", "some"], "'some' must be all, or a whole number"),
        (["--shape", "SHAPE", "--lengths", "1K", "--gpu-memory", "1GiB"], "this run is on the CPU"),
        (["--shape", "SHAPE", "--lengths", "1K", "--block-size", "16", "--chunk-size", "24"], "not a multiple"),
        (["--shape", "absent.yaml", "--lengths", "1K"], "absent.yaml cannot be read"),
        (["--model", "./absent", "--lengths", "1K"], "there is no folder absent\n"),
        (["--shape", "SHAPE", "--lengths", "1K", "--plot", "absent/a.png"], "there is no folder absent"),
        (["--shape", "SHAPE", "--lengths", "1K", "--plot", "a.docx"], "ending must be one of"),
        (["--shape", "SHAPE", "--lengths", "1K", "--plot", "FOLDER.png"], "cannot be written: Is a directory"),
        (["--shape", "SHAPE", "--lengths", "1K", "--plot", "/proc/a.png"], "cannot be written: "),
        (["--shape", "SHAPE", "--lengths", "1K", "--trace", "absent/t.json"], "the trace absent/t.json cannot be"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str],
    message: str,
    shape: Callable[[str], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "folder.png"
    folder.mkdir()
    names = {"SHAPE": shape(DENSE), "FOLDER.png": str(folder)}
    code, out, err = run_here([names.get(word, word) for word in arguments], capsys)
    assert (code, out) == (2, "")
    assert err.startswith("longgen: error: ") and err.count("\n") == 1 and message in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not YAML"),
        ("family: qwen3\n", "lacks head_dim, hidden"),
        (DENSE.replace("qwen3", "llama"), "family is 'llama'; it must be one of qwen2, "),
        (DENSE + "experts: {count: 4, active: 2, width: 8}\n", "no qwen3 model can be made of the shape shape"),
        (DENSE.replace("head_dim: 16", "head_dim: 15"), "no qwen3 model can be made of the shape shape"),
    ],
)
def test_a_broken_shape_is_one_line(
    text: str, message: str, shape: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_here(["--shape", shape(text), "--lengths", "1K"], capsys)
    assert (code, out) == (2, "")
    assert err.startswith("longgen: error: ") and err.count("\n") == 1 and message in err


def test_a_plot_leaves_nothing_where_nothing_was_measured(
    shape: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "times.PNG"
    arguments = ["--shape", shape(DENSE), "--lengths", "64M", "--cpu-memory", "1GiB", "--plot", str(picture)]
    code, out, _ = run_here(arguments, capsys)
    assert code == 1 and json.loads(out)["rows"] == [] and not picture.exists()


def test_a_plot_that_cannot_be_written_after_all_does_not_take_the_figures_along(
    shape: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").mkdir()
    monkeypatch.setattr(command, "check_plot", lambda path: None)
    arguments = ["--shape", shape(DENSE), "--lengths", "20", "--repeats", "1", "--plot", str(tmp_path / "a.png")]
    code, out, err = run_here(arguments, capsys)
    assert code == 1 and json.loads(out)["rows"]
    assert err.splitlines()[-1] == f"longgen: error: --plot {tmp_path / 'a.png'} cannot be written: Is a directory"


@pytest.mark.parametrize(
    ("where", "doing"),
    [
        ("measure_ceilings", "measuring the ceilings"),
        ("find_subject", "loading the model"),
        ("measure_length", "measuring 20 tokens"),
    ],
)
def test_device_memory_that_runs_out_is_one_line(
    where: str,
    doing: str,
    shape: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = command.find_subject

    def run_out(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    found = (lambda *given: replace(find(*given), load=run_out)) if where == "find_subject" else run_out
    monkeypatch.setattr(command, where, found)
    code, _, err = run_here(["--shape", shape(DENSE), "--lengths", "20"], capsys)
    assert code == 1 and f"longgen: error: device memory ran out while {doing}: lower" in err
    assert "Traceback" not in err


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    shape: Callable[[str], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = run_here(["--shape", shape(DENSE), "--lengths", "1K", "--plot", "a.png"], capsys)
    assert (code, out) == (2, "")
    assert err == "longgen: error: --plot needs matplotlib, which is not installed: pip install 'longgen[plot]'\n"


def test_the_smallest_vocabulary_is_enough(shape: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shape", shape(DENSE.replace("vocab: 320", "vocab: 1")), "--lengths", "20", "--repeats", "1"]
    code, out, _ = run_here(arguments, capsys)
    assert code == 0 and json.loads(out)["rows"][0]["tokens"] == 20


def test_long_prompts_run_once_unless_told_otherwise() -> None:
    options = command.BenchOptions((1,))
    assert options.repeats_of(512 << 10) == 1 and options.repeats_of((512 << 10) - 1) == 3
    assert command.BenchOptions((1,), repeats=4).repeats_of(1 << 20) == 4
