"""The program as a user runs it, on tiny checkpoints: what goes to which stream, and the exit codes."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from longgen import __version__
from longgen.cli import main
from longgen.kv.host_cache import HostCache
from longgen.model.tiny import make_checkpoint
from tests.checkpoints import never_ending

TEXT = "The quick brown fox jumps over the lazy dog, and then the other dogs think.\n" * 4
PATIENCE = 600  # seconds, for what must come
SMALL = ("--block-size", "16", "--chunk-size", "64", "--dtype", "float32", "--device", "cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def _command(checkpoint: Path, prompt: Path | str, *more: str) -> list[str]:
    return ["run", "--model", str(checkpoint), "--prompt", str(prompt), *SMALL, *more]


def _reference(checkpoint: Path, text: str, tokens: int, chat: bool) -> str:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    if chat:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def _start(arguments: list[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONUNBUFFERED", None)  # so that what is left in a buffer at the end counts too
    return subprocess.Popen(
        [sys.executable, "-m", "longgen", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )


@pytest.mark.parametrize("flags", [("--raw",), ("--chat",), ()])
def test_the_text_is_that_of_transformers(checkpoint: Path, prompt: Path, flags: tuple[str, ...]) -> None:
    process = _start(_command(checkpoint, prompt, *flags, "--max-new-tokens", "24"))
    out, err = process.communicate(timeout=PATIENCE)
    chat = flags != ("--raw",)
    assert out.decode("utf-8") == _reference(checkpoint, TEXT, 24, chat) + "\n"
    assert process.returncode == 0
    lines = err.decode().splitlines()
    assert lines[0] == f"longgen: {'chat template of the checkpoint' if chat else 'raw prompt, no chat template'}"
    assert f"{prompt}: " in lines[-1]


def test_standard_input_gives_the_same_text_as_a_file(
    checkpoint: Path, prompt: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(_command(checkpoint, prompt, "--max-new-tokens", "8")) == 0
    from_file = capsysbinary.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert main(_command(checkpoint, "-", "--max-new-tokens", "8")) == 0
    assert capsysbinary.readouterr().out == from_file != b""


def test_a_second_prompt_does_not_see_the_first(
    checkpoint: Path, prompt: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Something else, and shorter.")
    texts = []
    for path in (prompt, other):
        assert main(_command(checkpoint, path, "--max-new-tokens", "12")) == 0
        texts.append(capsysbinary.readouterr().out)
    more = ("--prompt", str(other), "--prompt", str(prompt), "--max-new-tokens", "12")
    assert main(_command(checkpoint, prompt, *more)) == 0
    assert capsysbinary.readouterr().out == texts[0] + texts[1] + texts[0]


def test_sampling_follows_the_seed(checkpoint: Path, prompt: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    def sample(*flags: str) -> bytes:
        assert main(_command(checkpoint, prompt, "--max-new-tokens", "16", *flags)) == 0
        return capsysbinary.readouterr().out

    warm = ("--temperature", "1.5")
    assert sample(*warm, "--seed", "1") == sample(*warm, "--seed", "1")
    assert sample(*warm, "--seed", "1") != sample(*warm, "--seed", "2")
    assert sample("--seed", "1") == sample("--seed", "2")
    # The tiny checkpoint's own settings sample too; top-k 1 leaves the greedy token.
    assert sample("--sampling", "checkpoint", "--top-k", "1") == sample()


def test_a_settings_file_is_used_and_flags_come_before_it(
    checkpoint: Path, prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text("max_new_tokens: 3\nchat: false\n")
    assert main(_command(checkpoint, prompt, "--config", str(config))) == 0
    err = capsys.readouterr().err
    assert "raw prompt" in err
    assert "3 generated (length)" in err
    assert main(_command(checkpoint, prompt, "--config", str(config), "--max-new-tokens", "2")) == 0
    assert "2 generated (length)" in capsys.readouterr().err


def test_max_len_ends_the_text_and_refuses_a_prompt_without_room(
    checkpoint: Path, prompt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = len(AutoTokenizer.from_pretrained(checkpoint)(TEXT)["input_ids"])
    assert main(_command(checkpoint, prompt, "--raw", "--max-len", str(count + 2))) == 0
    assert f"{count} prompt tokens, 2 generated (length)" in capsys.readouterr().err
    assert main(_command(checkpoint, prompt, "--raw", "--max-len", str(count))) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"has {count} tokens, with one generated {count + 1}, which is more than --max-len, {count};" in captured.err


def test_a_prompt_beyond_the_trained_window_needs_max_len(
    tmp_path: Path, prompt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = make_checkpoint(tmp_path / "small", "qwen3", max_position=64)
    assert main(_command(small, prompt)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "which is more than the 64 that the checkpoint was trained for; give --max-len" in captured.err
    assert main(_command(small, prompt, "--max-len", "4K", "--max-new-tokens", "2")) == 0


def test_progress_is_drawn_when_asked_for(checkpoint: Path, prompt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_command(checkpoint, prompt, "--max-new-tokens", "1", "--progress")) == 0
    assert "prefill: 100%" in capsys.readouterr().err
    assert main(_command(checkpoint, prompt, "--max-new-tokens", "1")) == 0
    assert "prefill:" not in capsys.readouterr().err


def _folder_with_config(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_what_is_wrong_with_a_checkpoint_is_one_line_and_exit_code_2(
    tmp_path: Path, prompt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longgen.model.checkpoint._from_pretrained", _no_weights)
    folders = {
        tmp_path / "nowhere": "nowhere",
        _folder_with_config(tmp_path / "other", model_type="llama"): "'llama'",
        _folder_with_config(tmp_path / "none"): "None",
    }
    for folder, named in folders.items():
        assert main(_command(folder, prompt)) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert captured.err.startswith("longgen: error: ")
        assert named in captured.err


def _no_weights(*_: object, **__: object) -> None:
    raise AssertionError("weights were loaded")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--max-len", "1.5K"), "longgen: error: max_len: '1.5K' is not a length"),
        (("--max-len", "0"), "longgen: error: max_len: '0' is not a length"),
        (("--max-len=-1",), "longgen: error: max_len: '-1' is not a length"),
        (("--max-len", ""), "longgen: error: max_len: '' is not a length"),
        (("--max-new-tokens", "4MB"), "longgen: error: max_new_tokens: '4MB' is not a length"),
        (("--chunk-size", "24"), "is not a multiple of the block size 16"),
        (("--device", "gpu"), "longgen: error: device: 'gpu' is not allowed"),
        (("--dtype", "int8"), "longgen: error: dtype: 'int8' is not allowed"),
        (("--temperature", "nan"), "longgen: error: temperature: 'nan' is not a number"),
        (("--temperature=-1",), "longgen: error: temperature is -1.0; it must be 0 or more"),
        (("--top-p", "0.9"), "longgen: error: top_p has no effect on greedy decoding"),
        (("--temperature", "1_0"), "longgen: error: temperature: '1_0' is not a number"),
        (("--seed=-1",), "longgen: error: seed: '-1' is not allowed"),
        (("--top-k", "1_6"), "longgen: error: top_k: '1_6' is not allowed"),
        (("--model", ""), "longgen: error: the model's name is empty"),
        (("--model", "~nosuchuser/x"), "longgen: error: there is no folder ~nosuchuser/x"),
        (("--model", "x" * 300), "is neither a folder here nor a valid hub id"),
        (("--config", "nowhere.yaml"), "longgen: error: the configuration nowhere.yaml cannot be read"),
        (("--prompt", "nowhere.txt"), "longgen: error: the prompt nowhere.txt cannot be read"),
        (("--no-such-flag",), "longgen: error: No such option: --no-such-flag; see longgen run --help\n"),
        (("more",), "longgen: error: Got unexpected extra argument"),
    ],
)
def test_usage_errors_exit_2_and_leave_standard_output_empty(
    checkpoint: Path, prompt: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    assert main(_command(checkpoint, prompt, *flags)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["eval"], ["longgen: error: Missing command; see longgen eval --help"]),
        (["sing"], ["longgen: error: No such command 'sing'; see longgen --help"]),
        (["plan", "--model"], ["longgen: error: Option '--model' requires an argument; see longgen --help"]),
        ([], ["Usage: longgen [OPTIONS] COMMAND [ARGS]..."]),
    ],
)
def test_a_command_that_is_none_exits_with_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], lines: list[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    said = captured.err.splitlines()
    assert captured.out == ""
    assert said[0].startswith(lines[0])
    assert len(said) == 1 or not arguments  # without any, the help


@pytest.mark.parametrize("command", [["doctor"], ["run", "--model", "demo", "--prompt", "prompt.txt"]])
def test_a_library_that_cannot_be_imported_is_one_line(prompt: Path, tmp_path: Path, command: list[str]) -> None:
    broken = tmp_path / "torch"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    done = subprocess.run(
        [sys.executable, "-m", "longgen", *command],
        cwd=prompt.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "longgen: error: a library cannot be imported: libcudart.so.13: cannot open shared object file; "
        "install longgen again\n"
    )


def _without(descriptors: str, *arguments: str) -> tuple[int, bytes, str]:
    """Exit code, standard output and error of the program, its `descriptors` (such as "<&-") as the shell sets them."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONUNBUFFERED", None)
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {descriptors}', "sh", sys.executable, "-m", "longgen", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr.decode()


def test_closed_standard_input_and_error_leave_the_text_of_a_file_prompt_alone(
    checkpoint: Path, prompt: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    command = _command(checkpoint, prompt, "--max-new-tokens", "4")
    assert main(command) == 0
    assert _without("<&- 2>&-", *command) == (0, capsysbinary.readouterr().out, "")
    refused = _without("<&-", *_command(checkpoint, "-"))
    assert refused == (2, b"", "longgen: error: the prompt - cannot be read: standard input is closed\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("lost", ["2>/dev/full", "2</dev/null"])
def test_what_standard_error_cannot_take_is_lost_and_the_run_goes_on(
    checkpoint: Path, prompt: Path, capsysbinary: pytest.CaptureFixture[bytes], lost: str
) -> None:
    command = _command(checkpoint, prompt, "--max-new-tokens", "4", "--prompt", str(prompt), "--stats")
    assert main(command) == 0
    assert _without(lost, *command) == (0, capsysbinary.readouterr().out, "")
    assert _without(lost, *_command(checkpoint, "/nowhere")) == (2, b"", "")


def test_a_closed_standard_output_is_refused(checkpoint: Path, prompt: Path) -> None:
    for arguments in (["--version"], _command(checkpoint, prompt)):
        assert _without(">&-", *arguments) == (2, b"", "longgen: error: standard output is closed\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_standard_output_is_one_line_and_exit_code_1(checkpoint: Path, prompt: Path) -> None:
    full = "longgen: error: standard output cannot be written: No space left on device"
    for arguments in (["--version"], ["run", "--help"], _command(checkpoint, prompt, "--prompt", str(prompt))):
        code, _, err = _without(">/dev/full", *arguments)
        assert code == 1
        assert err.splitlines()[-1] in (full, "longgen: error: [Errno 28] No space left on device")
        assert err.count("error") == 1
        assert "Traceback" not in err


def test_settings_that_leave_no_distribution_are_one_line_while_running(
    checkpoint: Path, prompt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in (("--temperature", "1e-40"), ("--temperature", "1", "--repetition-penalty", "1e-45")):
        assert main(_command(checkpoint, prompt, *flags)) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.splitlines()[-1].startswith(f"longgen: error: {prompt}: logits are not finite after ")


def _damaged(checkpoint: Path, folder: Path, file: str, text: str) -> Path:
    copied = shutil.copytree(checkpoint, folder)
    (copied / file).write_text(text)
    return copied


@pytest.mark.parametrize(
    ("file", "text", "flags", "message"),
    [
        ("config.json", "[" * 100_000, (), "nested too deep"),
        ("generation_config.json", '{"eos_token_id": [[1]]}', (), "eos_token_id is [[1]]"),
        ("generation_config.json", '{"eos_token_id": "<|im_end|>"}', (), "eos_token_id is '<|im_end|>'"),
        ("generation_config.json", '{"temperature": "hot"}', ("--sampling", "checkpoint"), "temperature is 'hot'"),
        ("generation_config.json", "[" * 100_000, (), "nested too deep"),
        ("chat_template.jinja", "{% if %}", (), "the chat template of the checkpoint fails"),
        ("chat_template.jinja", "{{ raise_exception('no') }}", (), "the chat template of the checkpoint fails: no;"),
        ("chat_template.jinja", "", ("--chat",), "the checkpoint has no chat template; run with --raw"),
    ],
)
def test_what_is_wrong_with_a_checkpoints_files_is_one_line_before_the_weights_are_loaded(
    checkpoint: Path,
    prompt: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    text: str,
    flags: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr("longgen.model.checkpoint._from_pretrained", _no_weights)
    assert main(_command(_damaged(checkpoint, tmp_path / "copy", file, text), prompt, *flags)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("longgen: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_a_tokenizer_that_knows_more_tokens_than_the_model_is_refused_before_the_weights_are_loaded(
    checkpoint: Path, prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longgen.model.checkpoint._from_pretrained", _no_weights)
    config = json.loads((checkpoint / "config.json").read_text()) | {"vocab_size": 30}
    copied = _damaged(checkpoint, tmp_path / "copy", "config.json", json.dumps(config))
    weights = load_file(copied / "model.safetensors")
    ends = {name: weights[name][:30].clone() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(weights | ends, copied / "model.safetensors", metadata={"format": "pt"})
    assert main(_command(copied, prompt)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("longgen: error: the tokenizer is not this model's: ")
    assert captured.err.endswith(", and the model has 30 of them\n")


def test_without_a_chat_template_the_prompt_is_taken_as_it_is(
    checkpoint: Path, prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = shutil.copytree(checkpoint, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    assert main(_command(bare, prompt, "--max-new-tokens", "2")) == 0
    assert capsys.readouterr().err.startswith("longgen: raw prompt, no chat template\n")


def test_the_stop_ids_of_the_config_end_a_text_without_a_generation_config(
    checkpoint: Path, prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = AutoTokenizer.from_pretrained(checkpoint)(TEXT, return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    first = int(model(ids).logits[0, -1].argmax())
    config = json.loads((checkpoint / "config.json").read_text()) | {"eos_token_id": [299, first]}
    copied = _damaged(checkpoint, tmp_path / "copy", "config.json", json.dumps(config))
    (copied / "generation_config.json").unlink()
    assert main(_command(copied, prompt, "--raw")) == 0
    captured = capsys.readouterr()
    assert captured.out == "\n"
    assert " 0 generated (stop)" in captured.err


def test_a_local_folder_needs_no_network(checkpoint: Path, prompt: Path) -> None:
    program = (
        "import socket, sys\n"
        "def refuse(*_, **__): raise SystemExit('touched the network')\n"
        "socket.getaddrinfo = socket.socket.connect = socket.socket.connect_ex = refuse\n"
        "from longgen.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    command = [sys.executable, "-c", program, *_command(checkpoint, prompt, "--max-new-tokens", "2")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


FAKE_KERNEL = """
__version__ = "0.9.0"
def chunk_gated_delta_rule(q, k, v, g, beta, **_):
    raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")
fused_recurrent_gated_delta_rule = causal_conv1d_fn = causal_conv1d_update = chunk_gated_delta_rule
"""


def test_a_hybrid_runs_on_the_cpu_beside_kernels_for_a_gpu_and_transformers_is_quiet(
    prompt: Path, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "hybrid", "qwen3_5")
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["rope_parameters"]["unheard_of"] = 1  # which transformers warns of
    (folder / "config.json").write_text(json.dumps(config))
    for package in ("fla", "causal_conv1d"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(FAKE_KERNEL)
    command = [sys.executable, "-m", "longgen", *_command(folder, prompt, "--max-new-tokens", "4", "--raw")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if not line.startswith("longgen: ")] == []
    assert done.stdout == _reference(folder, TEXT, 4, chat=False) + "\n"


def test_help_and_version_do_not_load_torch() -> None:
    program = (
        "import sys; from longgen.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 9 * ('torch' in sys.modules or 'transformers' in sys.modules))"
    )
    for arguments, expected in ((["--version"], f"longgen {__version__}\n"), (["run", "--help"], "--resident-blocks")):
        done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout


@pytest.fixture
def endless(checkpoint: Path, prompt: Path, tmp_path: Path) -> list[str]:
    """A command that takes minutes to its end."""
    return _command(never_ending(checkpoint, tmp_path / "endless"), prompt, "--max-new-tokens", "20K")


def test_an_interrupt_ends_with_130_and_one_line(endless: list[str]) -> None:
    process = _start(endless)
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert err.decode().endswith("\nlonggen: interrupted\n")
    assert "Traceback" not in err.decode()


def test_a_reader_that_goes_away_is_quiet(endless: list[str]) -> None:
    process = _start(endless)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(timeout=PATIENCE) == 141
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
    process.stderr.close()


def test_a_reader_that_was_never_there_is_quiet() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "longgen", "--version"],
            stdout=writing,
            stderr=subprocess.PIPE,
            env=environment,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_figures_are_printed_as_json_where_asked(
    checkpoint: Path, prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = _command(checkpoint, prompt, "--max-new-tokens", "4")
    assert main(empty) == 0
    captured = capsys.readouterr()
    assert "longgen: stats" not in captured.err
    assert main([*empty, "--prompt", str(prompt), "--stats"]) == 0
    again = capsys.readouterr()
    assert again.out == 2 * captured.out
    lines = [line.removeprefix("longgen: stats ") for line in again.err.splitlines() if "longgen: stats" in line]
    first, second, total, spent = (json.loads(line) for line in lines)
    assert first["request"] == second["request"] == prompt.name
    assert first["decode_steps"] == 3 and first["time_to_first_token"] > 0
    assert total["run"]["requests"] == 2 and total["run"]["prompt_tokens"] == 2 * first["prompt_tokens"]
    assert total["run"]["prefill"]["d2h_bytes"] == 2 * first["prefill"]["d2h_bytes"] > 0
    phases = spent["phases"]
    assert list(phases) == ["import", "prompt", "plan", "load", "prefill", "decode"] and min(phases.values()) > 0
    assert phases["prefill"] == pytest.approx(first["time_to_first_token"] + second["time_to_first_token"])
    assert phases["decode"] == pytest.approx(3 * (first["time_per_output_token"] + second["time_per_output_token"]))


def test_a_scrubbed_run_gives_the_same_text(
    checkpoint: Path, prompt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scrubbed, release = [], HostCache.release

    def noted(self: HostCache, slot_id: int, *, scrub: bool) -> None:
        scrubbed.append(scrub)
        release(self, slot_id, scrub=scrub)

    monkeypatch.setattr(HostCache, "release", noted)
    command = _command(checkpoint, prompt, "--prompt", str(prompt), "--max-new-tokens", "4")
    assert main(command) == 0
    plain = capsys.readouterr().out
    assert set(scrubbed) == {False}
    scrubbed.clear()
    assert main([*command, "--scrub"]) == 0
    assert capsys.readouterr().out == plain
    assert len(scrubbed) >= 2 and all(scrubbed)
