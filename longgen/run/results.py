"""Results as lines: longgen's own, or those of OpenAI's batch API; and what a line that was written says."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from longgen.run.requests import Request
from longgen.run.truncation import Cut

_BEGINNING = b'{"id": '  # of every line
# What a JSON string may hold as it is and a line had better not: other ends of lines, controls, half characters.
_AWKWARD = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a record.

    prompt_hash: see Request.prompt_hash.   pred: the answer's text; empty if it failed.
    finish_reason: stop, length or error.   error: why it failed; None if it did not.
    prompt_tokens: None if the record failed before it had any.   generated_tokens: of the answer.
    cut: what was left out of the prompt, see longgen.run.truncation.Cut; None if nothing was.
    settings: in effect, by name; None if they were not allowed.   timings: seconds; None if it failed.
    stats: figures of the request, see longgen.metrics; None: not asked for, or it failed.
    judgement: what else its line says of the answer.
    """

    request: Request
    prompt_hash: str
    pred: str = ""
    finish_reason: str = "error"
    error: str | None = None
    prompt_tokens: int | None = None
    generated_tokens: int = 0
    settings: Mapping[str, Any] | None = None
    timings: Mapping[str, float | None] | None = None
    stats: Mapping[str, Any] | None = None
    judgement: Mapping[str, Any] = field(default_factory=dict)
    cut: Cut | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """What a line of an output says of its record; the names are those of Result."""

    id: str
    prompt_hash: str
    failed: bool
    prompt_tokens: int | None
    settings: Mapping[str, Any] | None


def result_line(result: Result, output_format: str) -> bytes:
    """The line of a result, with the line feed that ends it. output_format: "jsonl" or "openai"."""
    value = _openai(result) if output_format == "openai" else _own(result)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return (_AWKWARD.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n").encode("utf-8")


def read_line(line: bytes, output_format: str) -> Written | None:
    """What `result_line` wrote; None for any other line."""
    try:
        value = json.loads(line)
        details = value["longgen"] if output_format == "openai" else value
        written = Written(
            id=str(value["custom_id" if output_format == "openai" else "id"]),
            prompt_hash=details["prompt_hash"],
            failed=details["finish_reason"] == "error",
            prompt_tokens=details["prompt_tokens"],
            settings=details["settings"],
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return written


def may_be_torn(line: bytes) -> bool:
    """Whether a line without its line feed may be the beginning of one that `result_line` made."""
    if not line.startswith(_BEGINNING) and not _BEGINNING.startswith(line):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False  # it is whole, and something else


def _own(result: Result) -> dict[str, Any]:
    fields = {"id": result.request.id, **result.request.fields}
    return fields | {
        "pred": result.pred,
        **result.judgement,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "generated_tokens": result.generated_tokens,
        "cut": _cut(result),
        "timings": result.timings,
        **_stats(result),
        "settings": result.settings,
        "error": result.error,
        "prompt_hash": result.prompt_hash,
    }


def _stats(result: Result) -> dict[str, Any]:
    """The field for a request's figures; none where they were not asked for."""
    return {} if result.stats is None else {"stats": result.stats}


def _openai(result: Result) -> dict[str, Any]:
    details = {
        **result.request.fields,
        **result.judgement,
        "prompt_hash": result.prompt_hash,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "cut": _cut(result),
        "timings": result.timings,
        **_stats(result),
        "settings": result.settings,
    }
    error = None if result.error is None else {"code": "failed", "message": result.error}
    return {
        "id": f"batch_req_{_name(result)}",
        "custom_id": result.request.id,
        "response": None if error else _response(result),
        "error": error,
        "longgen": details,
    }


def _name(result: Result) -> str:
    """32 hex digits that are the record's own; records may have the same prompt."""
    text = json.dumps([result.request.id, result.prompt_hash])
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


def _cut(result: Result) -> dict[str, Any] | None:
    return None if result.cut is None else asdict(result.cut)


def _response(result: Result) -> dict[str, Any]:
    prompt, generated = result.prompt_tokens or 0, result.generated_tokens
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": result.pred},
        "logprobs": None,
        "finish_reason": result.finish_reason,
    }
    body = {
        "id": f"chatcmpl-{_name(result)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": (result.settings or {}).get("model"),
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated},
    }
    return {"status_code": 200, "request_id": f"req_{_name(result)}", "body": body}
