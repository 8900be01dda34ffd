"""The merge as one Triton kernel: every partial result is read once, and the merged one written once.

Imported only where Triton is installed, see `merges.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from longgen.attention.merge import Part

TILE = 4096  # numbers of a program's part of the output: rows times channels
LARGEST_HEAD = 512


@triton.jit(do_not_specialize=["start_1", "stop_1", "start_2", "stop_2"])
def _merge_rows(  # type: ignore[no-untyped-def]  # Triton reads the annotations
    outs,  # three pointers
    lses,  # three pointers
    out_strides,  # of each: head, row, channel
    lse_strides,  # of each: head, row
    start_1,  # heads of the second part
    stop_1,
    start_2,  # heads of the third part, none where start_2 == stop_2
    stop_2,
    target,
    target_lse,
    target_strides,
    target_lse_strides,
    n,
    head_dim,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WRITES_LSE: tl.constexpr,
):
    """One program: ROWS rows of one query head."""
    head = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    real = row < n
    in_1 = row < tl.where((head >= start_1) & (head < stop_1), n, 0)
    in_2 = row < tl.where((head >= start_2) & (head < stop_2), n, 0)
    nothing = float("-inf")
    lse_0 = tl.load(lses[0] + head * lse_strides[0][0] + row * lse_strides[0][1], real, nothing)
    lse_1 = tl.load(lses[1] + (head - start_1) * lse_strides[1][0] + row * lse_strides[1][1], in_1, nothing)
    lse_2 = tl.load(lses[2] + (head - start_2) * lse_strides[2][0] + row * lse_strides[2][1], in_2, nothing)
    largest = tl.maximum(lse_0, tl.maximum(lse_1, lse_2))
    base = tl.where(largest == nothing, 0.0, largest)
    weight_0, weight_1, weight_2 = tl.exp(lse_0 - base), tl.exp(lse_1 - base), tl.exp(lse_2 - base)
    total = weight_0 + weight_1 + weight_2
    divisor = tl.where(total == 0.0, 1.0, total)
    width = (channel < head_dim)[None, :]
    at_0 = outs[0] + head * out_strides[0][0] + row[:, None] * out_strides[0][1] + channel[None, :] * out_strides[0][2]
    at_1 = (
        outs[1]
        + (head - start_1) * out_strides[1][0]
        + row[:, None] * out_strides[1][1]
        + channel[None, :] * out_strides[1][2]
    )
    at_2 = (
        outs[2]
        + (head - start_2) * out_strides[2][0]
        + row[:, None] * out_strides[2][1]
        + channel[None, :] * out_strides[2][2]
    )
    out_0 = tl.load(at_0, real[:, None] & width, 0.0).to(tl.float32)
    out_1 = tl.load(at_1, in_1[:, None] & width, 0.0).to(tl.float32)
    out_2 = tl.load(at_2, in_2[:, None] & width, 0.0).to(tl.float32)
    merged = out_0 * (weight_0 / divisor)[:, None]
    merged += out_1 * (weight_1 / divisor)[:, None]
    merged += out_2 * (weight_2 / divisor)[:, None]
    tl.debug_barrier()  # the target may be the first part: every thread has read before one writes
    place = head * target_strides[0] + row[:, None] * target_strides[1] + channel[None, :] * target_strides[2]
    tl.store(target + place, merged.to(target.dtype.element_ty), real[:, None] & width)
    if WRITES_LSE:
        lse = tl.where(total == 0.0, nothing, base + tl.log(divisor))
        tl.store(target_lse + head * target_lse_strides[0] + row * target_lse_strides[1], lse, real)


class TritonMerge:
    """Merges two or three parts in one pass over memory."""

    name = "triton"
    most_parts = 3
    in_place = False

    def __init__(self, device_type: str = "cuda") -> None:
        """`device_type`: of the tensors; Triton's interpreter takes those of the CPU."""
        self._device_type = device_type

    def refuses(self, part: Part) -> str | None:
        """See MergeKernel."""
        if part.out.device.type != self._device_type:
            return f"tensors are on {part.out.device.type}"
        if part.out.shape[2] > LARGEST_HEAD:
            return f"head size {part.out.shape[2]} is larger than {LARGEST_HEAD}"
        return None

    def __call__(self, parts: Sequence[Part], out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """See MergeKernel."""
        q_heads, n, head_dim = out.shape
        first, second = parts[:2]
        third = parts[2] if len(parts) > 2 else second
        last = third.heads.stop if len(parts) > 2 else third.first_head  # without a third part: no head of it
        given = (first, second, third)
        channels = triton.next_power_of_2(head_dim)
        rows = 1 if n == 1 else TILE // channels
        kept_lse = first.lse if lse is None else lse
        _merge_rows[(triton.cdiv(n, rows), q_heads)](
            tuple(part.out for part in given),
            tuple(part.lse for part in given),
            tuple(part.out.stride() for part in given),
            tuple(part.lse.stride() for part in given),
            second.heads.start,
            second.heads.stop,
            third.first_head,
            last,
            out,
            kept_lse,
            out.stride(),
            kept_lse.stride(),
            n,
            head_dim,
            ROWS=rows,
            CHANNELS=channels,
            WRITES_LSE=lse is not None,
            num_warps=1 if rows == 1 else 4,
        )
