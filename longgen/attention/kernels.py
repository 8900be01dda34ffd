"""The ordered lists of attention backends, the choice among them, and the check before one is trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from longgen.attention.call import AttentionCall, Partial, reference
from longgen.attention.merges import Merges
from longgen.errors import LongGenError

FEW_ROWS = 128  # up to here reading the keys costs more than multiplying them
CHECK_KEYS = 1024  # keys of the first-use check: a length that every backend takes
CHECK_HEADS = 8  # its KV heads on a GPU; on a CPU, where heads are alike and the reference is slow, two
CHECK_HEADS_CPU = 2


class Rows(Enum):
    """How many query rows a call has; different kernels are fast for each."""

    ONE = "one"
    FEW = "few"
    MANY = "many"

    @classmethod
    def of(cls, count: int) -> Rows:
        if count == 1:
            return cls.ONE
        return cls.FEW if count <= FEW_ROWS else cls.MANY


class Backend(Protocol):
    """One implementation of attention that returns (out, natural-log LSE)."""

    @property
    def name(self) -> str: ...

    def refuses(self, call: AttentionCall) -> str | None:
        """Why this backend cannot take the call, or None."""

    def __call__(self, call: AttentionCall) -> Partial: ...


@dataclass(frozen=True, slots=True)
class CallKind:
    """What calls have in common that one check covers. sees_past: see AttentionCall."""

    rows: Rows
    dtype: torch.dtype
    head_dim: int
    groups: int
    causal: bool
    windowed: bool
    sees_past: bool = False

    @classmethod
    def of(cls, call: AttentionCall) -> CallKind:
        rows = Rows.of(call.q.shape[1])
        windowed = call.window is not None
        return cls(rows, call.q.dtype, call.q.shape[2], call.groups, call.causal, windowed, call.sees_past)

    def sample(self, device: torch.device) -> AttentionCall:
        """A small random call of this kind; K and V are parts of a longer buffer, as in the store."""
        n = {Rows.ONE: 1, Rows.FEW: 8, Rows.MANY: 256}[self.rows]
        window = 33 if self.windowed else None
        m = n if self.causal and not (self.windowed or self.sees_past) else CHECK_KEYS
        generator = torch.Generator(device).manual_seed(0)

        def normal(heads: int, tokens: int) -> torch.Tensor:
            shape = (heads, tokens, self.head_dim)
            return torch.randn(shape, generator=generator, device=device).to(self.dtype)

        heads = CHECK_HEADS_CPU if device.type == "cpu" else CHECK_HEADS
        k, v = normal(heads, m + 64)[:, :m], normal(heads, m + 64)[:, :m]
        # Larger than 1/sqrt(head_dim): sharp rows show a wrong scale or a log-sum-exp of the wrong base.
        scale = 2 * self.head_dim**-0.5
        return AttentionCall(normal(heads * self.groups, n), k, v, scale, self.causal, window)


class Kernels:
    """Takes each call to the first backend that does not refuse it and that agreed with the reference.

    A backend is checked once for each kind of call, on its first use or in `prepare`.
    """

    def __init__(self, backends: Mapping[Rows, Sequence[Backend]], merges: Merges | None = None) -> None:
        """
        Args:
            backends: for each number of rows, fastest first.
            merges: of partial results; None: in plain torch.
        """
        self._backends = {rows: tuple(order) for rows, order in backends.items()}
        self.merges = merges or Merges()
        self._verdicts: dict[tuple[str, CallKind], str | None] = {}

    def __call__(self, call: AttentionCall) -> Partial:
        if call.k.shape[1] == 0:
            raise LongGenError("an attention call needs at least one key")
        call = call.simplified()
        if call.sees_past and self._is_faster_apart(call):
            own, past = call.split()
            merged = self.merges.begin(self(own))
            merged.add(self(past))
            return merged.partial()
        return self.choose(call)(call)

    def choose(self, call: AttentionCall) -> Backend:
        """The backend for a call; LongGenError with every backend's reason if none takes it."""
        reasons = []
        for backend in self._backends[Rows.of(call.q.shape[1])]:
            reason = self._objection(backend, call)
            if reason is None:
                return backend
            reasons.append(f"{backend.name}: {reason}")
        raise LongGenError("no attention backend takes this call: " + "; ".join(reasons))

    def taking(self, call: AttentionCall) -> list[Backend]:
        """Every backend that can take the call, in order."""
        call = call.simplified()
        return [b for b in self._backends[Rows.of(call.q.shape[1])] if self._objection(b, call) is None]

    def explain(self, call: AttentionCall) -> list[tuple[str, str | None]]:
        """Every backend in order, with why it cannot take the call (None: it can)."""
        call = call.simplified()
        return [(backend.name, self._objection(backend, call)) for backend in self._backends[Rows.of(call.q.shape[1])]]

    def prepare(self, dtype: torch.dtype, head_dim: int, groups: int, device: torch.device, *, windowed: bool) -> None:
        """Checks, before any pass, every kind of call a store of this shape makes."""
        for rows in Rows:
            for causal, window, past in (
                (False, False, False),
                (True, False, False),
                (True, False, True),
                (True, True, False),
            ):
                if (causal and rows is Rows.ONE) or (window and not windowed):
                    continue
                kind = CallKind(rows, dtype, head_dim, groups, causal, window, past)
                self.choose(kind.sample(device))
        self.merges.prepare(dtype, head_dim, device)

    def _is_faster_apart(self, call: AttentionCall) -> bool:
        """Whether the past alone goes to a faster backend than the whole call does."""
        order = [backend.name for backend in self._backends[Rows.of(call.q.shape[1])]]
        _, past = call.split()
        return order.index(self.choose(past).name) < order.index(self.choose(call).name)

    def _objection(self, backend: Backend, call: AttentionCall) -> str | None:
        reason = backend.refuses(call)
        if reason is not None:
            return reason
        key = (backend.name, CallKind.of(call))
        if key not in self._verdicts:
            self._verdicts[key] = _disagreement(backend, key[1].sample(call.q.device))
        return self._verdicts[key]


def _disagreement(backend: Backend, call: AttentionCall) -> str | None:
    """How a backend's result differs from the reference, or None if it does not."""
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-3}.get(call.q.dtype, 1e-2)
    if backend.refuses(call) is not None:
        return None  # the sample is not typical of its kind for this backend, which then refuses by itself
    try:
        out, lse = backend(call)
    except Exception as error:  # whatever a third-party kernel raises means that it cannot be used
        return f"failed when tried ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    expected_out, expected_lse = reference(call)
    if (out.shape, lse.shape) != (expected_out.shape, expected_lse.shape):
        return f"gives out {tuple(out.shape)} and log-sum-exp {tuple(lse.shape)}, which are not the shapes of the call"
    out_error = float((out.double() - expected_out).norm() / expected_out.norm())
    if not out_error <= tolerance:
        return f"differs from the reference by {out_error:.1e} (allowed: {tolerance:.0e})"
    lse_error = float((lse - expected_lse).abs().max())
    if not lse_error <= tolerance:
        return f"its log-sum-exp differs from the reference by {lse_error:.1e} (allowed: {tolerance:.0e})"
    return None
