"""The Triton merge against float64 and against plain torch: in Triton's interpreter on the CPU, compiled on CUDA."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from longgen.attention.call import Partial
from longgen.attention.merge import MergedAttention, MergeKernel, Part, TorchMerge
from longgen.attention.merges import Merges, UnavailableMerge, triton_merge

HALF_ROUNDING = 2.0**-8  # of a bf16 number


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MergeKernel:
    """The kernel for the device named; for the CPU, from a copy of its module made for the interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if request.param == "cuda":
        return triton_merge()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = importlib.util.find_spec("longgen.attention.triton_merge")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: MergeKernel = module.TritonMerge("cpu")
    return made


@pytest.fixture
def device(kernel: MergeKernel, request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.node.callspec.params["kernel"])


def random_parts(
    rng: random.Random, device: torch.device, dtype: torch.dtype, *, heads: int, rows: int, head_dim: int, count: int
) -> Iterator[tuple[Partial, slice]]:
    """Parts in any memory order, later ones of some heads or all, of any scale; some rows saw no key."""
    generator = torch.Generator(device).manual_seed(rng.randrange(1 << 30))
    for index in range(count):
        first = 0 if index == 0 or rng.random() < 0.6 else rng.randrange(heads)
        stop = heads if first == 0 and (index == 0 or rng.random() < 0.7) else rng.randint(first + 1, heads)
        width = stop - first
        long = torch.randn(rows + 3, width + 1, head_dim + 8, generator=generator, device=device).to(dtype)
        out = rng.choice(
            [
                long[:rows, :width, :head_dim].transpose(0, 1),
                long[:rows, :width, :head_dim].transpose(0, 1).contiguous(),
                long[:rows, :width, :head_dim].permute(2, 1, 0).contiguous().permute(1, 2, 0),
            ]
        )
        lse = torch.randn(rows + 5, width, generator=generator, device=device).T[:, :rows] + rng.choice([0.0, 1.0])
        lse = rng.choice([lse, lse.contiguous()])
        if rng.random() < 0.5:
            unseen = rng.randrange(rows)
            lse[:, unseen] = -torch.inf
        yield (out, lse), slice(first, stop)


def exact(parts: list[tuple[Partial, slice]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The merge in float64, all at once: out [heads, rows, head_dim] and lse."""
    (first, _), *_ = parts
    lses = torch.full((len(parts), *first[1].shape), -torch.inf, dtype=torch.float64, device=first[1].device)
    outs = torch.zeros((len(parts), *first[0].shape), dtype=torch.float64, device=first[0].device)
    for index, ((out, lse), heads) in enumerate(parts):
        lses[index, heads], outs[index, heads] = lse.double(), out.double()
    total = lses.logsumexp(0)
    weights = (lses - total).exp().nan_to_num(0.0)[..., None]
    return torch.where(weights == 0, 0.0, outs * weights).sum(0), total


def merge(parts: list[tuple[Partial, slice]], kernel: MergeKernel) -> MergedAttention:
    """Of copies, since a merge takes its parts over."""
    (first, _), *others = [((out.clone(), lse.clone()), heads) for (out, lse), heads in parts]
    merged = MergedAttention(first, kernel)
    for part, heads in others:
        merged.make_room()
        merged.add(part, heads)
    return merged


def close(got: torch.Tensor, expected: torch.Tensor, allowed: float) -> None:
    assert not got.isnan().any()
    finite = expected.isfinite()
    assert torch.equal(got.isfinite(), finite)
    got, expected = got[finite].double(), expected[finite].double()
    assert float((got - expected).norm()) <= allowed * float(expected.norm())


@pytest.mark.parametrize("seed", range(16))
def test_any_parts_merge_as_in_float64(kernel: MergeKernel, device: torch.device, seed: int) -> None:
    rng = random.Random(seed)
    dtype = rng.choice([torch.float32, torch.bfloat16])
    shape = {"heads": rng.choice([1, 3, 8]), "rows": rng.choice([1, 2, 33, 64]), "head_dim": rng.choice([8, 80, 128])}
    parts = list(random_parts(rng, device, dtype, count=1 + seed % 8, **shape))
    parts[0][0][1].nan_to_num_(neginf=0.0)  # every row sees a key of the first part, as in a causal chunk
    expected, expected_lse = exact(parts)
    for one in (kernel, TorchMerge()):
        out, lse = merge(parts, one).partial()
        assert out.dtype is torch.float32
        close(out, expected, 1e-6)
        close(lse, expected_lse, 1e-6)
        close(merge(parts, one).finish(torch.float32), expected.transpose(0, 1), 1e-6)
        close(merge(parts, one).finish(torch.bfloat16), expected.transpose(0, 1), HALF_ROUNDING)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_rows_that_no_part_saw_stay_empty(kernel: MergeKernel, device: torch.device, count: int) -> None:
    rng = random.Random(count)
    parts = list(random_parts(rng, device, torch.float32, heads=3, rows=5, head_dim=16, count=count))
    for (out, lse), _ in parts:
        lse[:, 2], out[:, 2] = -torch.inf, 0.0
    for one in (kernel, TorchMerge()):
        out, lse = merge(parts, one).partial()
        assert bool((out[:, 2] == 0).all()) and bool((lse[:, 2] == -torch.inf).all())
        assert not out.isnan().any()


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_stale_number_is_not_hidden(kernel: MergeKernel, device: torch.device, part: int) -> None:
    """NaN in what was read must show in the result, in `out` as in the log-sum-exp."""
    for spoiled in (0, 1):
        parts = [((torch.ones(2, 4, 16, device=device), torch.zeros(2, 4, device=device)), slice(0, 2)) for _ in "abc"]
        parts[part][0][spoiled][1, 3] = torch.nan
        for one in (kernel, TorchMerge()):
            out = merge(parts, one).finish(torch.float32)
            assert bool(out[3, 1].isnan().all()) and not out[:3].isnan().any()


def test_the_accumulator_is_one_tensor_however_many_parts_there_are(kernel: MergeKernel, device: torch.device) -> None:
    parts = list(random_parts(random.Random(0), device, torch.bfloat16, heads=2, rows=4, head_dim=16, count=9))
    merged = merge(parts[:4], kernel)
    accumulator = merged.result()
    for part, heads in parts[4:]:
        merged.add(part, heads)
    assert merged.result().data_ptr() == accumulator.data_ptr()


def test_parts_of_very_different_weight(kernel: MergeKernel, device: torch.device) -> None:
    out, lse = torch.ones(2, 3, 16, device=device), torch.zeros(2, 3, device=device)
    parts = [((out, lse - 500), slice(0, 2)), ((2 * out, lse + 500), slice(0, 2)), ((3 * out, lse), slice(0, 2))]
    torch.testing.assert_close(merge(parts, kernel).result(), 2 * out)


class Faulty:
    """TorchMerge with something done to its results."""

    name = "faulty"
    most_parts = 2
    in_place = True

    def __init__(self, spoil: Callable[[torch.Tensor, torch.Tensor | None], None]) -> None:
        self._spoil = spoil

    def refuses(self, part: Part) -> str | None:
        return None

    def __call__(self, parts: Sequence[Part], out: torch.Tensor, lse: torch.Tensor | None) -> None:
        TorchMerge()(parts, out, lse)
        self._spoil(out, lse)


def _spoil_out(out: torch.Tensor, lse: torch.Tensor | None) -> None:
    out[-1, -1, -1] += 1.0


def _spoil_lse(out: torch.Tensor, lse: torch.Tensor | None) -> None:
    if lse is not None:
        lse += 0.01


def _fail(out: torch.Tensor, lse: torch.Tensor | None) -> None:
    raise RuntimeError("no compiler\nand much more")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(_spoil_out, "its out differs"), (_spoil_lse, "its log-sum-exp differs"), (_fail, "RuntimeError: no compiler)")],
)
def test_a_kernel_that_is_wrong_is_passed_over_with_the_reason(
    spoil: Callable[[torch.Tensor, torch.Tensor | None], None], reason: str
) -> None:
    merges, device = Merges((Faulty(spoil),)), torch.device("cpu")
    merges.prepare(torch.float32, 16, device)
    verdicts = dict(merges.explain(torch.float32, 16, device))
    assert reason in str(verdicts["faulty"]) and verdicts["torch"] is None
    first = (torch.ones(2, 3, 16), torch.zeros(2, 3))
    assert isinstance(merges.choose(Part(*first)), TorchMerge)
    assert merges.begin(first).result().shape == (2, 3, 16)


def test_a_kernel_that_is_right_is_taken(kernel: MergeKernel, device: torch.device) -> None:
    merges = Merges((UnavailableMerge("absent", "not importable"), kernel))
    for dtype in (torch.float32, torch.bfloat16):
        assert merges.explain(dtype, 64, device) == [("absent", "not importable"), (kernel.name, None), ("torch", None)]


def test_without_a_device_for_it_torch_merges() -> None:
    """Where Triton is missing, that is the reason; where it is there, that tensors are on the CPU."""
    merges = Merges((triton_merge(),))
    ((name, reason), torch_verdict) = merges.explain(torch.float32, 16, torch.device("cpu"))
    assert name == "triton" and torch_verdict == ("torch", None)
    installed = importlib.util.find_spec("triton") is not None
    assert reason is not None and reason.startswith("tensors are on cpu" if installed else "not importable (No module")
