"""Token ids as callers give them, checked."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longgen.errors import UsageError

TokenIds = Sequence[int] | torch.Tensor  # of a tensor: integers, one dimension


def as_token_ids(tokens: TokenIds, vocab_size: int) -> torch.Tensor:
    """Token ids on the CPU as int64 [n].

    Raises UsageError if there are none, if they are no list of whole numbers, or if one is not below `vocab_size`.
    """
    try:
        ids = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UsageError(f"token ids must be a list of whole numbers: {error}") from None
    if not ids.numel():
        raise UsageError("there are no tokens to run: an empty prompt has no answer")
    if ids.ndim != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UsageError(
            f"token ids must be a list of whole numbers, not {str(ids.dtype).removeprefix('torch.')} of shape "
            f"{list(ids.shape)}"
        )
    ids = ids.to("cpu", torch.int64)
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise UsageError(f"token id {wrong} is not in the model's vocabulary of {vocab_size:,}")
    return ids
