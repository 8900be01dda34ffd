"""What the demo checkpoint is trained on and with, and the folder that is written."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longgen.model.checkpoint import load_model
from longgen.model.tokenizer import TextTokenizer

SCRIPTS = Path(__file__).parents[2] / "scripts"
STAGES = range(5)


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the training script as the script does."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return lambda name: importlib.import_module(f"demo_checkpoint.{name}")


def answers(tokens: np.ndarray, kinds: np.ndarray, eos: int, answer: int) -> list[tuple[int, bytes]]:
    """Where each answer of a sample begins, and its bytes up to the end token."""
    found, start = [], None
    for place, kind in enumerate(kinds):
        if kind != answer:
            continue
        start = place if start is None else start
        if tokens[place] == eos:
            found.append((start, bytes(tokens[start:place].astype(np.uint8))))
            start = None
    return found


@pytest.mark.parametrize("index", STAGES)
def test_every_answer_stands_earlier_in_its_sample(part: Any, index: int) -> None:
    data = part("data")
    stage, asked = data.STAGES[index], 0
    for step in range(4):
        batch = data.make_batch(stage, index, step, seed=0, tokens=8192)
        assert batch.tokens.shape == (8192 // stage.length, stage.length)
        for tokens, kinds in zip(batch.tokens, batch.kinds, strict=True):
            for start, answer in answers(tokens, kinds, data.EOS_ID, data.ANSWER):
                before = bytes(np.minimum(tokens[:start], 255).astype(np.uint8))
                assert answer.strip() in before
                asked += 1
    assert asked > 20


def test_a_batch_follows_from_seed_and_step(part: Any) -> None:
    data = part("data")
    one, same, other = (data.make_batch(data.STAGES[2], 2, step, seed=3, tokens=4096) for step in (5, 5, 6))
    assert np.array_equal(one.tokens, same.tokens) and np.array_equal(one.positions, same.positions)
    assert not np.array_equal(one.tokens, other.tokens)


def test_positions_grow_and_jump_only_at_filler(part: Any) -> None:
    data = part("data")
    jumped = 0
    for step in range(4):
        batch = data.make_batch(data.STAGES[4], 4, step, seed=0, tokens=8192)
        steps = np.diff(batch.positions, axis=1)
        assert (steps >= 1).all() and batch.positions.max() <= 2**24 + 2048
        filler = batch.kinds == data.FILLER
        assert not ((steps > 1) & ~(filler[:, 1:] | filler[:, :-1])).any()
        jumped += int((steps > 1).any(axis=1).sum())
    assert jumped > 4


def test_filler_with_a_bias_counts_as_copies_of_itself(part: Any) -> None:
    """softmax(scores + bias) over 40 keys equals the softmax in which every far filler key stands 8 times."""
    train, data = part("train"), part("data")
    kinds = torch.zeros(1, 60, dtype=torch.uint8)
    kinds[0, :20] = data.FILLER
    bias = train.attention_bias(kinds, torch.tensor([8.0]).log())[0, 0, -1]
    scores = torch.randn(60, generator=torch.Generator().manual_seed(0))
    copies = torch.cat((scores[:20].repeat(8), scores[20:])).softmax(0)
    torch.testing.assert_close((scores + bias).softmax(0)[20:], copies[160:])
    near = train.attention_bias(kinds, torch.tensor([8.0]).log())[0, 0, 19]
    assert torch.equal(near[:20], torch.zeros(20)) and near[20:].isneginf().all()


@pytest.mark.parametrize("shape", [(128, 384), (384, 128), (128, 128)])
def test_muon_makes_matrices_orthogonal(part: Any, shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(part("muon").orthogonalised(matrices))
    # Small singular values of a square random matrix need more iterations than there are.
    assert values.max() < 1.3 and values.median() > 0.6


def test_the_loss_falls(part: Any) -> None:
    train, data, model = part("train"), part("data"), part("model").make_model(torch.device("cpu"), seed=0)
    options = train.TrainOptions(tokens=512, lr=0.02, anneal=0.1, seed=0, workers=0, compiled=False)
    tensors = train._to_device(data.make_batch(data.STAGES[0], 0, 999, seed=0, tokens=2048), torch.device("cpu"))
    before = train._loss(model, *tensors)[0].item()
    ended: list[str] = []
    stage = data.Stage("strings", 25, 128, {"strings": 0.5, "pairs": 0.5})
    train.train(model, (stage,), options, torch.device("cpu"), lambda stage: ended.append(stage.name))
    assert ended == ["strings"] and train._loss(model, *tensors)[0].item() < before - 1


def test_the_folder_is_an_ordinary_checkpoint(part: Any, tmp_path: Path) -> None:
    module = part("model")
    model = module.make_model(torch.device("cpu"), seed=0)
    module.save_checkpoint(model, tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 4e6
    loaded: Any = load_model(tmp_path, torch.bfloat16, torch.device("cpu"))
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight.bfloat16())
    tokenizer = TextTokenizer.load(tmp_path)
    assert tokenizer.eos_ids(tmp_path) == {256}
    text = "".join(map(chr, range(1, 0x1000))) + " \n\n x\r\n 漢字🎉\t"
    assert tokenizer.encode(text, chat=True).tolist() == tokenizer.encode(text, chat=False).tolist()
    assert tokenizer.encode(text, chat=True).tolist() == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    # Bytes that are no text, one by one.
    assert tokenizer.decode([0xFF, 0x41, 0xE6, 0xBC, 0xA2, 256]) == "\ufffdA漢"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cuda:99"], "device cuda:99 is not there"),
        (["--eval-lengths", "16Q"], "'16Q' is not a length"),
        (["--eval-lengths", "8K,100"], "takes 1,024 bytes or more"),
        (["--eval-depths", "0"], "--eval-depths must be 1 or more"),
        (["--stages", "0"], "--stages 1 to 5"),
        (["--eval-chunk", "100"], "not a multiple of the block size"),
        (["--out", "FILE/folder"], "cannot be made: Not a directory"),
        (["--evaluate-only", "--out", "FILE/folder"], "there is no folder"),
    ],
)
def test_what_is_wrong_is_one_line_before_anything_is_trained(
    part: Any,
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command, file = part("command"), tmp_path / "file"
    file.touch()
    monkeypatch.setattr(command, "_train", lambda *_: pytest.fail("it trains"))
    given = ["--out", str(tmp_path), *(option.replace("FILE", str(file)) for option in options)]
    monkeypatch.setattr("sys.argv", ["train_demo_checkpoint.py", *given])
    assert command.main("About.") == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("train_demo_checkpoint: ") and captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize("name", ["train_demo_checkpoint", "make_needle_examples", "make_tiny_checkpoint"])
def test_scripts_run_from_a_checkout(name: str, tmp_path: Path) -> None:
    # Without the site, nothing that is installed is found but by its path.
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))}
    command = [sys.executable, "-S", str(SCRIPTS / f"{name}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
