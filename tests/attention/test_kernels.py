"""The order in which backends are tried, the check before one is trusted, and what is said when none serves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from longgen.attention.backends import default_kernels
from longgen.attention.call import AttentionCall, Partial, reference
from longgen.attention.cpu import CpuFlash
from longgen.attention.cuda import Missing, TorchCudnn, TorchFlash, flash_package
from longgen.attention.kernels import FEW_ROWS, Kernels, Rows
from longgen.attention.plain import PlainTorch
from longgen.errors import LongGenError


@dataclass
class Backend:
    """A backend whose answer can be spoilt, and which counts its calls."""

    name: str
    refusal: str | None = None
    spoil: Callable[[torch.Tensor, torch.Tensor], Partial] = lambda out, lse: (out, lse)
    calls: list[AttentionCall] = field(default_factory=list)

    def refuses(self, call: AttentionCall) -> str | None:
        return self.refusal

    def __call__(self, call: AttentionCall) -> Partial:
        self.calls.append(call)
        out, lse = reference(call)
        return self.spoil(out.to(call.q.dtype), lse)


def make_call(rows: int = 5, *, keys: int = 70, causal: bool = False, window: int | None = None) -> AttentionCall:
    torch.manual_seed(0)
    q, k, v = (torch.randn(heads, tokens, 16) for heads, tokens in ((4, rows), (2, keys), (2, keys)))
    return AttentionCall(q, k, v, 0.5, causal, window)


def kernels_of(*backends: object) -> Kernels:
    return Kernels(dict.fromkeys(Rows, backends))  # type: ignore[arg-type]


def fail(out: torch.Tensor, lse: torch.Tensor) -> Partial:
    raise ValueError("no kernel image\nfor this device")


@pytest.mark.parametrize(
    ("count", "rows"), [(1, Rows.ONE), (2, Rows.FEW), (FEW_ROWS, Rows.FEW), (FEW_ROWS + 1, Rows.MANY)]
)
def test_each_number_of_rows_has_its_own_order(count: int, rows: Rows) -> None:
    kernels = Kernels({kind: (Backend(kind.value),) for kind in Rows})
    assert kernels.choose(make_call(count)).name == rows.value


def test_the_first_backend_that_does_not_refuse_serves() -> None:
    first, second, third = Backend("first", refusal="not today"), Backend("second"), Backend("third")
    kernels, call = kernels_of(first, second, third), make_call()
    out, lse = kernels(call)
    torch.testing.assert_close(out, reference(call)[0].float())
    torch.testing.assert_close(lse, reference(call)[1])
    assert not first.calls and not third.calls
    assert second.calls[-1].q is call.q


@pytest.mark.parametrize("past_first", [False, True])
def test_the_past_goes_to_a_faster_backend_if_that_does_not_take_the_whole(past_first: bool) -> None:
    """One call where the first backend takes it; else the chunk is one call, and its past another."""

    class NoCausalPast(Backend):
        def refuses(self, call: AttentionCall) -> str | None:
            return "no keys before the first row" if call.sees_past and past_first else None

    first, second = NoCausalPast("first"), Backend("second")
    kernels, call = kernels_of(first, second), make_call(causal=True)
    out, lse = kernels(call)
    torch.testing.assert_close(out, reference(call)[0].float(), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, reference(call)[1])
    served = [used for used in first.calls if used.q is call.q]  # the others are checks
    shapes = [(used.q.shape[1], used.k.shape[1], used.causal) for used in served]
    assert shapes == ([(5, 5, True), (5, 65, False)] if past_first else [(5, 70, True)])
    assert not second.calls or second.calls[-1].q is not call.q


def test_a_chunk_with_its_past_stays_whole_on_the_only_backend_that_takes_either() -> None:
    only, last = Backend("only"), Backend("last")
    kernels, call = kernels_of(Backend("first", refusal="not today"), only, last), make_call(causal=True)
    kernels(call)
    assert only.calls[-1].q is call.q and only.calls[-1].k.shape[1] == 70


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda out, lse: (out, lse / math.log(2)), "log-sum-exp differs from the reference by"),
        (lambda out, lse: (out, torch.full_like(lse, torch.nan)), "log-sum-exp differs"),
        (lambda out, lse: (out * 1.05, lse), "differs from the reference by 5.0e-02"),
        (lambda out, lse: (out.flip(0), lse), "differs from the reference"),
        (lambda out, lse: (torch.full_like(out, torch.nan), lse), "differs from the reference by nan"),
        (fail, "failed when tried (ValueError: no kernel image)"),
    ],
    ids=["base-2", "nan-lse", "scaled", "heads-swapped", "nan", "raises"],
)
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_a_backend_that_is_wrong_is_passed_over_and_named(
    rows: int, spoil: Callable[[torch.Tensor, torch.Tensor], Partial], reason: str
) -> None:
    wrong, right = Backend("wrong", spoil=spoil), Backend("right")
    kernels, call = kernels_of(wrong, right), make_call(rows)
    torch.testing.assert_close(kernels(call)[0], reference(call)[0].float())
    (name, objection), (_, none) = kernels.explain(call)
    assert name == "wrong" and objection is not None and reason in objection
    assert none is None


@pytest.mark.parametrize("window", [None, 9])
def test_a_wrong_mask_is_found_out(window: int | None) -> None:
    class Unmasked(Backend):
        def __call__(self, call: AttentionCall) -> Partial:
            return super().__call__(AttentionCall(call.q, call.k, call.v, call.scale))

    kernels = kernels_of(Unmasked("unmasked"), Backend("right"))
    assert kernels.choose(make_call(5, causal=True, window=window)).name == "right"
    assert kernels.choose(make_call(5)).name == "unmasked"


def test_a_backend_is_checked_once_for_each_kind_of_call() -> None:
    backend = Backend("only")
    kernels = kernels_of(backend)
    for _ in range(3):
        kernels(make_call(5))
        kernels(make_call(7, keys=31))
    assert len(backend.calls) == 6 + 1
    kernels(make_call(5, causal=True))
    kernels(make_call(1))
    assert len(backend.calls) == 6 + 1 + 2 * 2


def test_prepare_leaves_no_check_for_later() -> None:
    backend = Backend("only")
    kernels = kernels_of(backend)
    kernels.prepare(torch.float32, 16, 2, torch.device("cpu"), windowed=True)
    checks = len(backend.calls)
    calls = [make_call(n, causal=c, window=w) for n in (8, 300) for c, w in ((False, None), (True, None), (True, 40))]
    calls += [make_call(1), make_call(1, causal=True), make_call(1, keys=40, causal=True, window=40)]
    for call in calls:
        kernels(call)
    assert len(backend.calls) == checks + len(calls)


def test_when_none_serves_every_reason_is_given() -> None:
    kernels = kernels_of(Backend("first", refusal="heads too large"), Backend("second", spoil=fail))
    with pytest.raises(LongGenError) as error:
        kernels(make_call())
    assert "first: heads too large; second: failed when tried (ValueError: no kernel image)" in str(error.value)


def test_a_mask_that_hides_nothing_is_not_handed_on() -> None:
    backend = Backend("only")
    kernels = kernels_of(backend)
    kernels(make_call(1, causal=True, window=70))
    assert backend.calls[-1].causal is False and backend.calls[-1].window is None
    kernels(make_call(1, causal=True, window=69))
    assert backend.calls[-1].causal is True and backend.calls[-1].window == 69
    kernels(make_call(5, causal=True, window=100))
    assert backend.calls[-1].causal is True and backend.calls[-1].window is None


def test_a_package_that_is_not_there_explains_itself() -> None:
    backend = flash_package("flash-attn-9", ("no_such_module_a", "no_such_module_b"), (9, 0))
    assert isinstance(backend, Missing)
    reason = backend.refuses(make_call())
    assert reason is not None and "no_such_module_a: No module named" in reason and "no_such_module_b" in reason
    with pytest.raises(RuntimeError, match="no_such_module_a"):
        backend(make_call())
    kernels = kernels_of(backend, PlainTorch())
    assert kernels.choose(make_call()).name == "plain-torch"
    assert dict(kernels.explain(make_call()))["flash-attn-9"] == reason


@pytest.mark.parametrize("backend", [TorchFlash(), TorchCudnn()], ids=lambda backend: backend.name)
def test_cuda_backends_refuse_tensors_of_the_cpu(backend: TorchFlash | TorchCudnn) -> None:
    assert backend.refuses(make_call()) == "tensors are on cpu"


def test_on_the_cpu_flash_serves_and_plain_torch_is_the_last_resort() -> None:
    kernels = default_kernels(torch.device("cpu"))
    for rows in (1, 5, 200):
        assert kernels.explain(make_call(rows)) == [(CpuFlash.name, None), (PlainTorch.name, None)]


def test_on_cuda_there_is_always_a_last_resort() -> None:
    kernels = default_kernels(torch.device("cuda"))
    for rows in (1, 5, 200):
        reasons = dict(kernels.explain(make_call(rows)))
        assert reasons.pop(PlainTorch.name) is None
        assert all(reasons.values())  # a tensor on the CPU is refused by all the others
