"""From a policy's selection to the runs that are read: which lie on the device, which must be loaded, in what order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from longgen.errors import LongGenError
from longgen.sparse.base import AvailableBlocks, BlockSelection, Phase, SparsePolicy

ALL_HEADS = slice(None)


@dataclass(frozen=True, slots=True)
class Member:
    """One slot's part in a pass: `tokens` new tokens after `length` earlier ones."""

    slot_id: int
    length: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens [start, stop) of one layer of one slot, read by the KV heads `heads`."""

    start: int
    stop: int
    heads: slice


@dataclass(frozen=True, slots=True)
class LayerRuns:
    """What one layer of one slot reads of its complete blocks: where they lie, then what must be loaded."""

    resident: tuple[Run, ...]
    loaded: tuple[Run, ...]


def block_runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Maximal ascending runs [first, stop) of consecutive blocks, in the order given."""
    if isinstance(indices, range) and indices.step == 1:
        if len(indices):
            yield indices.start, indices.stop
        return
    first = 0
    for i in range(1, len(indices) + 1):
        if i == len(indices) or indices[i] != indices[i - 1] + 1:
            yield indices[first], indices[i - 1] + 1
            first = i


def place_runs(
    selection: BlockSelection, available: AvailableBlocks, *, block_size: int, resident_blocks: int, run_blocks: int
) -> LayerRuns:
    """Splits a selection at the end of the resident tier, and what is beyond it into ring entries.

    Runs to load end at multiples of `run_blocks`, so that each lies in one extent of the host cache.

    Raises:
        LongGenError: a block that is not among the `available` ones, or is named twice.
    """
    resident: list[Run] = []
    loaded: list[Run] = []
    for heads, blocks in _by_head(selection.blocks):
        _check(blocks, available)
        for first, stop in block_runs(blocks):
            inside = min(stop, resident_blocks)
            if first < inside:
                resident.append(Run(first * block_size, inside * block_size, heads))
            first = max(first, resident_blocks)
            while first < stop:
                end = min(stop, (first // run_blocks + 1) * run_blocks)
                loaded.append(Run(first * block_size, end * block_size, heads))
                first = end
    return LayerRuns(tuple(resident), tuple(loaded))


def _by_head(blocks: range | torch.Tensor) -> Iterator[tuple[slice, Sequence[int]]]:
    if isinstance(blocks, range):
        yield ALL_HEADS, blocks
    elif blocks.ndim == 1:
        yield ALL_HEADS, blocks.tolist()
    else:
        for head, indices in enumerate(blocks.tolist()):
            yield slice(head, head + 1), indices


def _check(blocks: Sequence[int], available: AvailableBlocks) -> None:
    if not blocks:
        return
    if min(blocks) < 0 or max(blocks) >= available.count:
        raise LongGenError(
            f"the sparse policy selected blocks {min(blocks)} to {max(blocks)} of slot {available.slot_id}, "
            f"which has {available.count} complete blocks"
        )
    if len(set(blocks)) != len(blocks):
        raise LongGenError(f"the sparse policy selected a block of slot {available.slot_id} twice")


@dataclass(frozen=True, slots=True)
class Load:
    """One ring entry's worth of loading: `run` of `layer` for `member`."""

    layer: int
    member: Member
    run: Run


class ReadSchedule:
    """What a pass reads, layer by layer and slot by slot, as one flat sequence of loads.

    The sequence runs ahead of the model up to the next layer whose policy needs that layer's query.
    """

    def __init__(
        self,
        policy: SparsePolicy,
        phase: Phase,
        layers: tuple[int, ...],
        members: tuple[Member, ...],
        *,
        block_size: int,
        resident_blocks: Mapping[int, int],
        run_blocks: int,
    ) -> None:
        self._policy, self._phase = policy, phase
        self._steps = [(layer, member) for layer in layers for member in members]
        self._block_size, self._resident, self._run_blocks = block_size, resident_blocks, run_blocks
        self._planned: dict[tuple[int, int], LayerRuns] = {}
        self._next_step = 0
        self._pending: deque[Load] = deque()

    def runs(self, layer: int, member: Member, query: torch.Tensor) -> LayerRuns:
        """What this layer of this slot reads. `query` is [q_heads, n, head_dim]. Called once each, in order."""
        while (layer, member.slot_id) not in self._planned:
            step_layer, step_member = self._steps[self._next_step]
            self._plan_step(query if (step_layer, step_member) == (layer, member) else None)
        return self._planned.pop((layer, member.slot_id))

    def next_load(self) -> Load | None:
        """The next load that is known without a query, or None."""
        while not self._pending:
            if self._next_step == len(self._steps):
                return None
            if self._policy.needs_query(self._steps[self._next_step][0], self._phase):
                return None
            self._plan_step(None)
        return self._pending.popleft()

    def _plan_step(self, query: torch.Tensor | None) -> None:
        layer, member = self._steps[self._next_step]
        self._next_step += 1
        if not self._policy.needs_query(layer, self._phase):
            query = None
        available = AvailableBlocks(member.slot_id, member.length // self._block_size)
        selection = self._policy.select_blocks(layer, self._phase, query, available)
        runs = place_runs(
            selection,
            available,
            block_size=self._block_size,
            resident_blocks=self._resident[layer],
            run_blocks=self._run_blocks,
        )
        self._planned[layer, member.slot_id] = runs
        self._pending.extend(Load(layer, member, run) for run in runs.loaded)
