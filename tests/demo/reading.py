"""The demo checkpoint behind small blocks, and documents whose needles stand where a test wants them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice

from longgen.engine import Engine, EngineOptions
from longgen.evaluation.ask import Reader
from longgen.evaluation.filler import tales
from longgen.evaluation.needle import MAGIC_NUMBER, PASS_KEY, Document, Needle
from longgen.model.checkpoint import resolve_checkpoint
from longgen.model.tokenizer import TextTokenizer

BLOCK = 256
# Plain words, which are in no training text but by chance.
KEYS = (
    "acorn",
    "bridge",
    "candle",
    "desert",
    "engine",
    "falcon",
    "guitar",
    "hammer",
    "island",
    "jacket",
    "kettle",
    "ladder",
    "marble",
    "needle",
    "oyster",
    "pillow",
    "quartz",
    "rocket",
    "spider",
    "turtle",
    "umbrella",
    "velvet",
    "wagon",
    "zebra",
)


def open_reader(dtype: str = "auto") -> Reader:
    """Blocks of 256 on the CPU, a ring of two entries of eight blocks, nothing resident."""
    folder = resolve_checkpoint("demo")
    options = EngineOptions(
        device="cpu", dtype=dtype, block_size=BLOCK, chunk_size=16 * BLOCK, ring_entries=2, ring_blocks=8
    )
    tokenizer = TextTokenizer.load(folder)
    return Reader(Engine.load(folder, options), tokenizer, tokenizer.eos_ids(folder))


def pass_key(seed: int) -> Needle:
    return Needle(PASS_KEY, str(random.Random(f"pass key {seed}").randrange(10_000, 100_000)))


def magic_numbers(count: int, seed: int) -> list[Needle]:
    """Needles with different key words and numbers."""
    rng = random.Random(f"magic {seed}")
    return [Needle(MAGIC_NUMBER, str(rng.randrange(1_000_000, 10_000_000)), key) for key in rng.sample(KEYS, count)]


def one_in_every_block(needles: Sequence[Needle], seed: int) -> Document:
    """A document of len(needles) whole blocks, in each of which one needle stands, and the intro in the first."""
    text, spans = MAGIC_NUMBER.intro + "\n", []
    filler = tales(seed)
    for index, needle in enumerate(needles):
        spans.append((len(text), len(text) + len(needle.text)))
        text += needle.text + " "
        room = (index + 1) * BLOCK - len(text)
        text += " ".join(islice(filler, 1 + room // 20))[: room - 1] + ("\n" if index + 1 == len(needles) else " ")
    return Document(text, tuple(spans))
