"""Which kernel merges partial results, and the check before one is trusted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module

import torch

from longgen.attention.call import Partial
from longgen.attention.merge import MergedAttention, MergeKernel, Part, TorchMerge

# A decoded token, a full chunk, a last chunk: a compiler makes code of its own for a number that sixteen divides.
CHECK_ROWS = (1, 256, 250)
CHECK_PARTS = (2, 6)  # too few to be merged before the end, and more
CHECK_HEADS = 4


class Merges:
    """Takes each merge to the first kernel that does not refuse its first part and that agreed with TorchMerge.

    A kernel is checked once for each head size, in the dtype that it meets first or that `prepare` is told.
    """

    def __init__(self, kernels: Sequence[MergeKernel] = ()) -> None:
        """`kernels`: fastest first; TorchMerge comes after them."""
        self._kernels = (*kernels, TorchMerge())
        self._verdicts: dict[tuple[str, int], str | None] = {}

    def begin(self, first: Partial) -> MergedAttention:
        """A merge that starts from one part, as MergedAttention does."""
        return MergedAttention(first, self.choose(Part(*first)))

    def choose(self, part: Part) -> MergeKernel:
        """The kernel for parts like this one."""
        return next(kernel for kernel in self._kernels if self._objection(kernel, part) is None)

    def explain(self, dtype: torch.dtype, head_dim: int, device: torch.device) -> list[tuple[str, str | None]]:
        """Every kernel in order, with why it cannot merge such parts (None: it can)."""
        part = Part(*next(_sample(dtype, head_dim, device, rows=1, count=1))[0])
        return [(kernel.name, self._objection(kernel, part)) for kernel in self._kernels]

    def prepare(self, dtype: torch.dtype, head_dim: int, device: torch.device) -> None:
        """Checks, before any pass, the kernel for attention in `dtype`."""
        self.choose(Part(*next(_sample(dtype, head_dim, device, rows=1, count=1))[0]))

    def _objection(self, kernel: MergeKernel, part: Part) -> str | None:
        reason = kernel.refuses(part)
        if reason is not None or isinstance(kernel, TorchMerge):
            return reason
        key = (kernel.name, part.out.shape[2])
        if key not in self._verdicts:
            self._verdicts[key] = _disagreement(kernel, part.out.dtype, part.out.shape[2], part.out.device)
        return self._verdicts[key]


class UnavailableMerge:
    """A kernel that cannot be imported; kept in the list so that its absence is explained."""

    most_parts = 2
    in_place = False

    def __init__(self, name: str, reason: str) -> None:
        self.name, self._reason = name, reason

    def refuses(self, part: Part) -> str | None:
        """Always: why it could not be imported."""
        return self._reason

    def __call__(self, parts: Sequence[Part], out: torch.Tensor, lse: torch.Tensor | None) -> None:
        raise RuntimeError(self._reason)


def triton_merge() -> MergeKernel:
    """The kernel of `triton_merge.py`, if Triton can be imported."""
    try:
        kernel: MergeKernel = import_module("longgen.attention.triton_merge").TritonMerge()
    except Exception as error:  # a broken binary package raises more than ImportError
        return UnavailableMerge("triton", f"not importable ({_first_line(error)})")
    return kernel


def _sample(
    dtype: torch.dtype, head_dim: int, device: torch.device, *, rows: int, count: int
) -> Iterator[tuple[Partial, slice]]:
    """Random parts as attention gives them: token-major, one of fewer heads, rows that saw no key."""
    generator = torch.Generator(device).manual_seed(rows + count)
    for index in range(count):
        heads = slice(1, 3) if index == 2 else slice(0, CHECK_HEADS)
        shape = (rows, heads.stop - heads.start, head_dim)
        out = torch.randn(shape, generator=generator, device=device).to(dtype).transpose(0, 1)
        lse = torch.randn(shape[1::-1], generator=generator, device=device)
        if index == 1:
            lse[0, -1] = -torch.inf
        yield (out, lse), heads


def _disagreement(kernel: MergeKernel, dtype: torch.dtype, head_dim: int, device: torch.device) -> str | None:
    """How a kernel's merge differs from TorchMerge's, or None if it does not."""

    def merged(by: MergeKernel, rows: int, count: int) -> MergedAttention:
        (first, _), *others = _sample(dtype, head_dim, device, rows=rows, count=count)
        result = MergedAttention(first, by)
        for part, heads in others:
            result.add(part, heads)
        return result

    try:
        for rows in CHECK_ROWS:
            for count in CHECK_PARTS:
                out, lse = merged(kernel, rows, count).partial()
                expected, expected_lse = merged(TorchMerge(), rows, count).partial()
                finished = merged(kernel, rows, count).finish(dtype)
                rounding = {torch.float32: 1e-5, torch.float16: 2e-3}.get(dtype, 1e-2)
                for name, got, wanted, allowed in (
                    ("out", out, expected, 1e-5),
                    ("log-sum-exp", lse, expected_lse, 1e-5),
                    ("finished out", finished, expected.transpose(0, 1), rounding),
                ):
                    error = float((got.double() - wanted.double()).norm() / wanted.double().norm())
                    if not error <= allowed:
                        return f"its {name} differs from plain torch by {error:.1e} (allowed: {allowed:.0e})"
    except Exception as error:  # whatever a compiler or a driver raises means that it cannot be used
        return f"failed when tried ({type(error).__name__}: {_first_line(error)})"
    return None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
