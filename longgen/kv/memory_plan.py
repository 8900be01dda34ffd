"""What a plan is made of and what it says: the options, the machine, needs in bytes, and everything decided."""

from __future__ import annotations

from dataclasses import dataclass

from longgen.kv.budget import DeviceBudget, HostBudget
from longgen.kv.predict import Prediction, Rates
from longgen.kv.shape import KVShape
from longgen.kv.sizes import DeviceBytes, StoreSizes
from longgen.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the user fixed, as far as a request has use for it; None leaves the choice to the plan.

    Sizes in tokens, as in StoreSizes.
    """

    block_size: int = 1024
    chunk_size: int | None = None
    resident_blocks: int | None = None
    slots: int = 1
    compiled: bool = False  # norms, rotary angles and MLPs; changes the times alone


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a plan must fit and how fast it is.

    Attributes:
        host: host memory; None is not checked.
        device: device memory; None is not checked.
        rates: of the device.
        shared: the device is the host's own processor, and both kinds of memory are one.
    """

    host: HostBudget | None
    device: DeviceBudget | None
    rates: Rates | None = None
    shared: bool = False


@dataclass(frozen=True, slots=True)
class MeasuredUse:
    """Device bytes that a chunk of the planned size was seen to take beside weights, states and buffers, and time.

    runtime: outside torch.   allocator: held by torch and in no tensor.   activations: tensors of the pass.
    step_seconds: of a decode step after few tokens, which is the host's time to start it; None: not measured.
    """

    runtime: int
    allocator: int
    activations: int
    step_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """Device bytes by purpose. allocator: lost to rounding."""

    runtime: int
    weights: int
    states: int
    activations: int
    allocator: int
    store: DeviceBytes

    @property
    def total(self) -> int:
        return self.runtime + self.weights + self.states + self.activations + self.allocator + self.store.total


@dataclass(frozen=True, slots=True)
class HostNeeds:
    """Host bytes. process: Python and libraries; loading: weights on their way to the device; measuring: blocks of the
    chunk that is measured then; kv: blocks of the request. The last three are not there at once."""

    kv: int
    process: int
    loading: int
    measuring: int

    @property
    def first(self) -> int:
        """What is there before the request's own blocks must be."""
        return max(self.loading, self.measuring)

    @property
    def total(self) -> int:
        return self.process + max(self.kv, self.first)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Everything decided for requests of up to `prompt` + `new_tokens` tokens.

    sizes: what the store is built with.   reasons: why chunk, ring and residency are what they are.
    prediction: None where the machine's rates are unknown.
    """

    model: ModelShape
    kv: KVShape
    prompt: int
    new_tokens: int
    sizes: StoreSizes
    device: DeviceNeeds
    host: HostNeeds
    machine: Machine
    reasons: tuple[str, ...]
    prediction: Prediction | None

    @property
    def tokens(self) -> int:
        return self.prompt + self.new_tokens

    @property
    def resident_blocks(self) -> int:
        """Blocks of every layer on the device."""
        return self.sizes.resident_blocks if isinstance(self.sizes.resident_blocks, int) else 0

    @property
    def roomy(self) -> bool:
        """Whether nothing that could be measured would change the sizes: all blocks stay on the device, the prompt is
        one chunk, and there is room for twice of all that is only estimated."""
        budget, device = self.machine.device, self.device
        estimated = device.runtime + device.activations + device.allocator
        return (
            self.resident_blocks >= self.kv.blocks_for(self.tokens)
            and self.sizes.chunk_tokens >= self.prompt
            and (budget is None or device.total + estimated <= budget.usable)
        )

    @property
    def early_host_bytes(self) -> int:
        """Bytes of host blocks that there is room for while the weights are still being loaded."""
        budget, device = self.machine.host, self.device.total if self.machine.shared else 0
        if budget is None:
            return self.host.kv
        return max(0, min(self.host.kv, budget.usable - self.host.process - self.host.first - device))

    @property
    def host_blocks(self) -> int:
        """Blocks of every layer in host memory."""
        return max(0, self.kv.blocks_for(self.tokens) - self.resident_blocks) if self.kv.full_layers else 0
