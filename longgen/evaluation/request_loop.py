"""Requests in, whole texts out: the request loop, for those who judge what comes."""

from __future__ import annotations

import io
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TextIO

from longgen import batch
from longgen.config import Settings
from longgen.requests import Request


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request came to. finish_reason: "stop", "length", or "error" for one that failed, with its text so far."""

    request: Request
    text: str
    finish_reason: str | None


def answers(model: str, requests: Sequence[Request], settings: Settings, err: TextIO) -> Generator[Answer, None, None]:
    """The answer to each request, in order, from one engine planned for the longest. Notices go to `err`.

    Raises LongGenError for what is wrong with the run as a whole, as `batch.run`.
    """
    with batch.open_run(model, requests, settings, err) as opened:
        for job in opened.jobs:
            out, reasons = io.BytesIO(), list[str | None]()
            batch.run_jobs(opened.engine, opened.tokenizer, [job], opened.options, out, err, reasons.append)
            text = out.getvalue().decode("utf-8").removesuffix("\n")  # the newline is the loop's
            yield Answer(job.request, text, reasons[0])
