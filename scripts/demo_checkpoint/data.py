"""Training batches: random strings, dense key/value pairs and needles in filler, made ahead on the CPU.

A batch follows from (seed, stage, step), so that any number of processes make the same batches.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from demo_checkpoint import text
from longgen.evaluation.needle import MAGIC_NUMBER, PASS_KEY

EOS_ID = 256
TEXT, FILLER, ANSWER = 0, 1, 2  # kinds of bytes; the loss is on answers, the bias on filler
MAX_JUMP_LOG2 = 24.0
MAX_REPEATS_LOG2 = 20.0
# Stands for the end of an answer while a sample is still bytes.
_EOS = "\0"

# Shorter sentences of the same sense: the key word and the number stand closer together, and are easier to connect.
_SHORT_NEEDLES = (
    "The special magic number for {key} is: {number}.",
    "The magic number for {key} is: {number}.",
    "{key} is: {number}.",
)
_SHORT_QUESTIONS = (
    "The special magic number for {key} mentioned in the text is",
    "The special magic number for {key} mentioned is",
    "The special magic number for {key} is",
    "The number for {key} in the provided text is",
    "{key} mentioned in the provided text is",
    "{key} is",
)
_TAIL = MAGIC_NUMBER.question[MAGIC_NUMBER.question.index("?") + 2 :]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the training.

    Attributes:
        steps, length: optimiser steps, and bytes in a sample.
        mix: share of each sort of sample: strings, pairs, needles.
        needles: fewest and most needles in a sample (as many as fit).
        short: share of short variants of the magic number's sentences.
        jump: share of samples whose positions jump, by up to 2**24 in all.
        bias: share of samples whose far filler counts as up to 2**14 copies of itself.
    """

    name: str
    steps: int
    length: int
    mix: dict[str, float]
    needles: tuple[int, int] = (1, 1)
    short: float = 0.0
    jump: float = 0.0
    bias: float = 0.0


STAGES = (
    Stage("strings", 700, 256, {"strings": 0.6, "pairs": 0.4}),
    Stage("pairs", 600, 384, {"pairs": 0.6, "needles": 0.4}, (1, 4), short=0.7, jump=0.3, bias=0.15),
    Stage("words", 900, 512, {"pairs": 0.2, "needles": 0.8}, (1, 6), short=0.5, jump=0.6, bias=0.3),
    Stage("needles", 900, 1024, {"pairs": 0.1, "needles": 0.9}, (1, 14), short=0.2, jump=0.7, bias=0.5),
    Stage("anneal", 1200, 2048, {"pairs": 0.05, "needles": 0.95}, (1, 30), short=0.05, jump=0.75, bias=0.65),
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of one length.

    Attributes:
        tokens: int16 [B, n] token ids.
        kinds: uint8 [B, n], TEXT, FILLER or ANSWER.
        positions: int64 [B, n], growing by one or jumping.
        log_repeats: float32 [B], the natural logarithm of how often far filler counts; 0 for once.
    """

    tokens: np.ndarray
    kinds: np.ndarray
    positions: np.ndarray
    log_repeats: np.ndarray


@dataclass(slots=True)
class Pieces:
    """A sample as pieces of text, each of one kind."""

    texts: list[str] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)

    def add(self, piece: str, kind: int) -> None:
        self.texts.append(piece)
        self.kinds.append(kind)

    def extend(self, other: Pieces) -> None:
        self.texts += other.texts
        self.kinds += other.kinds

    @property
    def size(self) -> int:
        return sum(map(len, self.texts))


@dataclass(frozen=True, slots=True)
class Hidden:
    """A needle to hide, and the question for it."""

    sentence: str
    question: str
    number: str


def make_batch(stage: Stage, stage_index: int, step: int, seed: int, tokens: int) -> Batch:
    """The batch of one step: tokens // stage.length samples."""
    rng = random.Random(f"{seed} {stage_index} {step}")
    makers = {"strings": _strings, "pairs": _pairs, "needles": _needles}
    count = tokens // stage.length
    samples = []
    for sort in rng.choices(list(stage.mix), list(stage.mix.values()), k=count):
        pieces = makers[sort](rng, stage)
        samples.append((*_arrays(pieces, stage.length), _positions(rng, pieces, stage)))
    repeats = [MAX_REPEATS_LOG2 * rng.random() if rng.random() < stage.bias else 0.0 for _ in range(count)]
    return Batch(
        tokens=np.stack([sample[0] for sample in samples]),
        kinds=np.stack([sample[1] for sample in samples]),
        positions=np.stack([sample[2] for sample in samples]),
        log_repeats=(np.log(2.0) * np.array(repeats)).astype(np.float32),
    )


def _arrays(pieces: Pieces, length: int) -> tuple[np.ndarray, np.ndarray]:
    data = np.frombuffer("".join(pieces.texts).encode("ascii"), np.uint8).astype(np.int16)
    if len(data) != length:
        raise ValueError(f"a sample has {len(data)} bytes, not {length}")
    kinds = np.repeat(np.array(pieces.kinds, np.uint8), [len(piece) for piece in pieces.texts])
    return np.where(data == 0, np.int16(EOS_ID), data), kinds


def _positions(rng: random.Random, pieces: Pieces, stage: Stage) -> np.ndarray:
    """Positions that jump where filler begins or ends, as if much more of it stood there."""
    lengths = [len(piece) for piece in pieces.texts]
    steps = np.ones(stage.length, np.int64)
    steps[0] = 0
    kinds = np.array(pieces.kinds)
    edges = np.cumsum(lengths)[:-1][(kinds[1:] == FILLER) | (kinds[:-1] == FILLER)]
    edges = edges[edges < stage.length]
    if len(edges) and rng.random() < stage.jump:
        places = rng.sample(edges.tolist(), min(len(edges), rng.randrange(1, 9)))
        shares = np.array([rng.expovariate(1.0) for _ in places])
        total = 2.0 ** (MAX_JUMP_LOG2 * rng.random())
        steps[places] += (total * shares / shares.sum()).astype(np.int64)
    return np.cumsum(steps)


def _strings(rng: random.Random, stage: Stage) -> Pieces:
    """A random string and its repetitions."""
    # As often short as long: short ones come again more often, and are easier to learn from.
    count = round(8 * (stage.length / 16) ** rng.random())
    unit = text.random_string(rng, count)
    pieces = Pieces()
    pieces.add(unit, TEXT)
    pieces.add((unit * (stage.length // count))[: stage.length - count], ANSWER)
    return pieces


def _pairs(rng: random.Random, stage: Stage) -> Pieces:
    """Key/value pairs close together, then many of their keys, each to be followed by its value."""
    separators = (" is:", " is", ":", " =", " ->", "")
    separator = rng.choice(separators)
    asked = " is" if rng.random() < 0.5 else separator
    end = rng.choice((".\n", ". ", "\n", "; "))
    width = rng.randrange(2, 8)
    keys = text.key_words(rng, stage.length // 16)
    values = [text.digits(rng, width) if rng.random() < 0.8 else text.letters(rng, width) for _ in keys]
    share = rng.uniform(0.45, 0.75)
    said = Pieces()
    count = 0
    while count < len(keys):
        piece = f"{keys[count]}{separator} {values[count]}{end}"
        if count and said.size + len(piece) > share * stage.length:
            break
        said.add(piece, TEXT)
        count += 1
    asks, room = Pieces(), stage.length - said.size
    for index in rng.sample(range(count), count):
        question, answer = f"{keys[index]}{asked}", f" {values[index]}{_EOS}"
        if asks.size + len(question) + len(answer) + 1 > room:
            break
        asks.add(question, TEXT)
        asks.add(answer, ANSWER)
        asks.add("\n", TEXT)
    return _filled(rng, said, asks, stage.length)


def _filled(rng: random.Random, said: Pieces, asks: Pieces, length: int, intro: str = "") -> Pieces:
    """Everything said, in filler, and the questions after it: `length` bytes in all, of which the last is an answer's
    end. `asks` ends with a newline, which goes."""
    del asks.texts[-1], asks.kinds[-1]
    room = length - said.size - asks.size - len(intro)
    sentences = text.filler(rng, room)
    if sentences:
        surplus = sum(map(len, sentences)) - room
        while surplus >= len(sentences[0]):
            surplus -= len(sentences.pop(0))
        sentences[0] = sentences[0][surplus:]
    pieces = Pieces()
    if intro:
        pieces.add(intro, TEXT)
    gaps = sorted(rng.randrange(len(sentences) + 1) for _ in said.texts)
    done = 0
    for gap, piece in zip(gaps, said.texts, strict=True):
        for sentence in sentences[done:gap]:
            pieces.add(sentence, FILLER)
        done = gap
        pieces.add(piece, TEXT)
    for sentence in sentences[done:]:
        pieces.add(sentence, FILLER)
    pieces.extend(asks)
    return pieces


def _needles(rng: random.Random, stage: Stage) -> Pieces:
    """Magic numbers and sometimes a pass key in filler, and questions for some of them."""
    least, most = stage.needles
    # As often few as many, whatever the most is.
    wanted = round(least * (most / least) ** rng.random())
    found: list[Hidden] = []
    if rng.random() < 0.35:
        found.append(_pass_key(rng))
        wanted -= int(rng.random() < 0.5)
    short = rng.random() < stage.short
    found += [_magic_number(rng, key, short) for key in text.key_words(rng, wanted)]
    rng.shuffle(found)
    intro = rng.choice((MAGIC_NUMBER, PASS_KEY)).intro + "\n"
    intro = intro if stage.length >= 512 and rng.random() < 0.5 else ""
    gap = "\n" if rng.random() < 0.25 else " "
    said, asks = _fitted(rng, found, gap, stage.length - len(intro))
    return _filled(rng, said, asks, stage.length, intro)


def _fitted(rng: random.Random, found: list[Hidden], gap: str, length: int) -> tuple[Pieces, Pieces]:
    """The needles that fit, and questions for some of them in random order; at least one of each."""
    said, asks = Pieces(), Pieces()
    longest = max(len(hidden.question) + len(hidden.number) for hidden in found) + 4
    kept: list[Hidden] = []
    for hidden in found:
        if kept and said.size + len(hidden.sentence) + longest > length * 0.92:
            break
        said.add(hidden.sentence + gap, TEXT)
        kept.append(hidden)
    if rng.random() < 0.5:
        asks.add("\n", TEXT)
    most = rng.randrange(1, 2 + length // 160)
    for place, index in enumerate(rng.sample(range(len(kept)), min(most, len(kept)))):
        question, number = kept[index].question, kept[index].number
        # A later question may come without its opening sentence, so that more of them fit.
        if place and rng.random() < 0.7:
            question = question[question.find("? ") + 2 if "? " in question else 0 :]
        if place and said.size + asks.size + len(question) + len(number) + 3 > length:
            break
        asks.add(question, TEXT)
        asks.add(f" {number}{_EOS}", ANSWER)
        asks.add("\n", TEXT)
    return said, asks


def _pass_key(rng: random.Random) -> Hidden:
    number = text.digits(rng, PASS_KEY.digits if rng.random() < 0.7 else rng.randrange(4, 9))
    return Hidden(PASS_KEY.needle.format(number=number), PASS_KEY.question, number)


def _magic_number(rng: random.Random, key: str, short: bool) -> Hidden:
    number = text.digits(rng, MAGIC_NUMBER.digits if rng.random() < 0.7 else rng.randrange(4, 9))
    if not short:
        return Hidden(MAGIC_NUMBER.needle.format(key=key, number=number), MAGIC_NUMBER.question.format(key=key), number)
    needles = (*_SHORT_NEEDLES, MAGIC_NUMBER.needle)
    questions = (*_SHORT_QUESTIONS, _TAIL)
    needle = rng.choice(needles).format(key=key, number=number)
    return Hidden(needle, rng.choice(questions).format(key=key), number)
