"""The memory plan of a request: every size, chosen before anything is loaded. Pure arithmetic, without torch.

The device holds, in this order: the CUDA context and its libraries, weights, recurrent states, activations of a chunk,
decode and window buffers, ring and prefill buffers; what is left holds resident blocks. The host holds the other
blocks. Of all chunks and rings that fit, the plan takes the largest that is predicted to answer as fast as any, but
for a few per cent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from longgen.costs import estimate_activations, started_layers
from longgen.errors import CapacityError
from longgen.kv.memory_plan import DeviceNeeds, HostNeeds, Machine, MeasuredUse, MemoryPlan, PlanOptions
from longgen.kv.predict import Prediction, Rates, balanced_chunk, predict, reference_rates
from longgen.kv.reasons import ChunkReason, ResidentReason, ring_reason
from longgen.kv.refusals import device_refusal, host_refusal, what_to_do
from longgen.kv.sizes import StoreSizes, check_chunk
from longgen.model_shape import FULL, ModelShape

RUNTIME_BYTES = 768 << 20  # CUDA context, kernels, workspaces of cuBLAS and cuDNN
SPARE_PART = 32  # a thirty-second of the device is left free of resident blocks: library workspaces, page tables, gaps
ALLOCATOR_PART = 50  # a fiftieth of what torch allocates is lost to rounding and gaps
PROCESS_BYTES = 1 << 30  # host memory of Python, torch and CUDA beside the KV cache
# Wanted on a GPU: small chunks leave it waiting for loads and for kernels to start. Of 33K tokens, attention's tiles of
# 128 rows fill the 132 multiprocessors of an H100 or H200 twice for every head, without a rest: 2% faster than of 16K.
CHUNK_TOKENS = 33 << 10
HOST_CHUNK_TOKENS = 4096  # wanted where the device is the host's own processor, which waits for neither
# (entries, tokens in each). Longer runs are merged less often: 32K instead of 16K save 1% of a prefill.
RINGS = ((4, 32768), (4, 16384), (4, 8192), (3, 8192), (2, 8192), (2, 4096), (2, 2048), (2, 1024))
MOST_PREFILL_DEPTH = 8
AS_GOOD = 1.03  # times within this factor of the best count as equal
SEARCH_LIMIT = 1 << 30  # tokens
MEASURED_BLOCKS = 4  # before the chunk that is measured, each a run: merging their results takes all the memory it may


class Planner:
    """Makes plans for one model on one machine."""

    def __init__(
        self,
        model: ModelShape,
        machine: Machine,
        options: PlanOptions | None = None,
        use: MeasuredUse | None = None,
    ) -> None:
        """`use`: measured on the device with the chunk size of `options`; None estimates it.

        Raises UsageError for a chunk size that is not a multiple of the block size.
        """
        if use is not None and use.step_seconds is not None and machine.rates is not None:
            measured = replace(machine.rates, layer=use.step_seconds / started_layers(model))
            machine = replace(machine, rates=measured)
        self.model, self.machine = model, machine
        self._options = options or PlanOptions()
        if self._options.chunk_size is not None:
            check_chunk(self._options.chunk_size, self._options.block_size)
        self._kv = model.kv(self._options.block_size)
        self._use = use
        self._activations = estimate_activations(model, self._options.slots)
        self._rates = machine.rates or reference_rates(model.head_dim)

    def plan(self, prompt: int, new_tokens: int) -> MemoryPlan:
        """The plan for a prompt and the tokens generated after it.

        Raises CapacityError, with each number and the longest prompt that fits, if there is too little memory.
        """
        tokens = prompt + new_tokens
        candidates = list(self._candidates(prompt, tokens))
        on_device = [self._filled(sizes, tokens) for sizes in candidates if self._fits(sizes)]
        fitting = [sizes for sizes in on_device if self._fits_host(sizes, tokens)]
        if not fitting:
            smallest = on_device[-1] if on_device else candidates[-1]
            raise CapacityError(self._refusal(smallest, prompt, new_tokens))
        sizes = self._fastest(fitting, prompt, new_tokens)
        known = self.machine.rates
        return MemoryPlan(
            model=self.model,
            kv=self._kv,
            prompt=prompt,
            new_tokens=new_tokens,
            sizes=sizes,
            device=self._needs(sizes),
            host=self._host_needs(sizes, tokens),
            machine=self.machine,
            reasons=self._reasons(sizes, prompt, tokens),
            prediction=self._predict(sizes, known, prompt, new_tokens) if known else None,
        )

    def rated(self, rates: Rates) -> Planner:
        """The same planner for a device of these rates."""
        return Planner(self.model, replace(self.machine, rates=rates), self._options, self._use)

    def again(self, plan: MemoryPlan, use: MeasuredUse) -> MemoryPlan:
        """`plan` once it is known what a chunk takes: with its chunk size, or, if that does not fit after all and was
        not given, with the largest of its halves that does. Raises as `plan`."""
        measured, refusals = plan.sizes.chunk_tokens, []
        for chunk in (each for each in self._chunks(plan.prompt) if each <= measured):
            part = self._activations.bytes(chunk) / self._activations.bytes(measured)
            scaled = replace(use, activations=round(part * use.activations))
            try:
                planner = Planner(self.model, self.machine, replace(self._options, chunk_size=chunk), scaled)
                return planner.plan(plan.prompt, plan.new_tokens)
            except CapacityError as refusal:
                refusals.append(refusal)
        raise refusals[0]

    def longest_prompt(self, new_tokens: int) -> int:
        """The most prompt tokens that fit with `new_tokens` after them; 0 if none do."""
        low, high = 0, SEARCH_LIMIT
        while low < high:
            middle = (low + high + 1) // 2
            if self._has_room(middle, new_tokens):
                low = middle
            else:
                high = middle - 1
        return low

    def _has_room(self, prompt: int, new_tokens: int) -> bool:
        """Whether the smallest sizes fit: with the most resident blocks, and so the least host memory."""
        tokens = prompt + new_tokens
        smallest = list(self._candidates(prompt, tokens))[-1]
        return self._fits(smallest) and self._fits_host(self._filled(smallest, tokens), tokens)

    def _candidates(self, prompt: int, tokens: int) -> Iterator[StoreSizes]:
        """Sizes to choose from, largest first, without resident blocks but for those that were asked for."""
        kv, options = self._kv, self._options
        block, blocks = kv.block_size, kv.blocks_for(prompt)
        rings = dict.fromkeys((entries, max(1, min(tokens // block, blocks))) for entries, tokens in RINGS)
        for chunk in self._chunks(prompt):
            for entries, run_blocks in rings:
                yield StoreSizes.for_block(
                    block,
                    slots=options.slots,
                    chunk_tokens=chunk,
                    ring_entries=entries,
                    run_blocks=run_blocks,
                    prefill_depth=2,
                    resident_blocks=min(options.resident_blocks or 0, kv.blocks_for(tokens)),
                )

    def _chunks(self, prompt: int) -> list[int]:
        """Chunk sizes in tokens, largest first, whole blocks, none larger than the prompt."""
        block, blocks = self._kv.block_size, max(1, self._kv.blocks_for(prompt))
        if self._options.chunk_size is not None:
            return [min(self._options.chunk_size, blocks * block)]
        wanted = HOST_CHUNK_TOKENS if self.machine.shared else CHUNK_TOKENS
        counts = [max(1, min(wanted // block, blocks))]
        full = prompt // block
        if self._options.compiled and full:
            # What is left over after full chunks runs eager: less than a block for each of them, in even ones.
            counts = [full // -(-full // counts[0])]
        while counts[-1] > 1:
            counts.append(counts[-1] // 2)
        return [count * block for count in counts]

    def _needs(self, sizes: StoreSizes) -> DeviceNeeds:
        store = sizes.device_bytes(self._kv)
        states = self.model.state_bytes(sizes.slots)
        weights = self.model.weight_bytes
        if self._use is not None:
            use = self._use
            return DeviceNeeds(use.runtime, weights, states, use.activations, use.allocator, store)
        activations = self._activations.bytes(sizes.chunk_tokens)
        rounded = 0 if self.machine.shared else (weights + activations) // ALLOCATOR_PART
        runtime = 0 if self.machine.shared else RUNTIME_BYTES
        return DeviceNeeds(runtime, weights, states, activations, rounded, store)

    @property
    def _room(self) -> int | None:
        """Device bytes there are; None is not checked."""
        if self.machine.shared:
            return None  # checked together with the host's
        return self.machine.device.usable if self.machine.device else None

    def _fits(self, sizes: StoreSizes) -> bool:
        return self._room is None or self._needs(sizes).total <= self._room

    def _filled(self, sizes: StoreSizes, tokens: int) -> StoreSizes:
        """`sizes` with what is left of the device given to deeper prefill buffers and resident blocks."""
        if self._room is None or not self.model.count(FULL):
            return sizes
        left = self._room - self._needs(sizes).total
        layer = sizes.chunk_tokens * self._kv.token_bytes
        depth = max(2, min(self.model.count(FULL), MOST_PREFILL_DEPTH, 2 + left // 16 // layer))
        sizes = replace(sizes, prefill_depth=depth)
        if self._options.resident_blocks is not None:
            return sizes
        left = self._room - self._room // SPARE_PART - self._needs(sizes).total
        blocks = left // (sizes.slots * self.model.count(FULL) * self._kv.block_bytes)
        return replace(sizes, resident_blocks=max(0, min(blocks, self._kv.blocks_for(tokens))))

    def _fastest(self, fitting: list[StoreSizes], prompt: int, new_tokens: int) -> StoreSizes:
        """Of sizes that fit, largest first: the first that takes no longer than the best, but for AS_GOOD."""
        if self.machine.shared:
            return fitting[0]
        seconds = []
        for sizes in fitting:
            times = self._predict(sizes, self._rates, prompt, new_tokens)
            seconds.append(times.prefill_seconds + new_tokens / times.decode_rate)
        sizes = next(each for each, time in zip(fitting, seconds, strict=True) if time <= AS_GOOD * min(seconds))
        if sizes.resident_blocks == self._kv.blocks_for(prompt + new_tokens):
            sizes = replace(sizes, ring_entries=2, run_blocks=1)  # nothing will be loaded
        return sizes

    def _predict(self, sizes: StoreSizes, rates: Rates, prompt: int, new_tokens: int) -> Prediction:
        compiled = self._options.compiled
        return predict(self.model, self._kv, sizes, rates, prompt, new_tokens, compiled=compiled)

    def _host_needs(self, sizes: StoreSizes, tokens: int) -> HostNeeds:
        return HostNeeds(
            kv=sizes.slots * sizes.host_bytes(self._kv, tokens),
            process=PROCESS_BYTES,
            loading=0 if self.machine.shared else self.model.weight_bytes,
            measuring=0 if self.machine.shared else self._measuring_bytes(sizes),
        )

    def _measuring_bytes(self, sizes: StoreSizes) -> int:
        """Of a chunk of these sizes that is measured, of the blocks before it and of a token after it, all hosted."""
        return (sizes.chunk_tokens + (MEASURED_BLOCKS + 1) * self._kv.block_size) * self._kv.cached_token_bytes

    def _shared_bytes(self, sizes: StoreSizes) -> int:
        """Of the device's bytes, those that are host memory."""
        return self._needs(sizes).total if self.machine.shared else 0

    def _fits_host(self, sizes: StoreSizes, tokens: int) -> bool:
        needed = self._host_needs(sizes, tokens).total + self._shared_bytes(sizes)
        return self.machine.host is None or needed <= self.machine.host.usable

    def _refusal(self, sizes: StoreSizes, prompt: int, new_tokens: int) -> str:
        """Why a request does not fit, of which `sizes` are the smallest."""
        tokens, slots = prompt + new_tokens, sizes.slots
        device, host, shared = self.machine.device, self.machine.host, self.machine.shared
        on_device, longest = not self._fits(sizes), self.longest_prompt(new_tokens)
        fewer = not longest and self.longest_prompt(1) > 0
        advice = what_to_do(longest, new_tokens, self._options, fewer=fewer, on_device=on_device, shared=shared)
        request = f"{self.model.name} with {f'{slots:,} times ' if slots > 1 else ''}{tokens:,} tokens"
        if on_device and device is not None:
            return device_refusal(request, self._needs(sizes), device, advice)
        assert host is not None, "what fits on the device, and is refused, does not fit on the host"
        return host_refusal(request, self._host_needs(sizes, tokens), self._shared_bytes(sizes), host, advice)

    def _reasons(self, sizes: StoreSizes, prompt: int, tokens: int) -> tuple[str, ...]:
        kv, options, attends = self._kv, self._options, self.model.count(FULL) > 0
        total = kv.blocks_for(tokens)
        chunk = ChunkReason(
            chunk=sizes.chunk_tokens,
            prompt=prompt,
            given=sizes.chunk_tokens == options.chunk_size,
            largest=sizes.chunk_tokens == self._chunks(prompt)[0],
            larger_fits=any(
                self._fits(each) for each in self._candidates(prompt, tokens) if each.chunk_tokens > sizes.chunk_tokens
            ),
            shared=self.machine.shared,
            hidden_from=balanced_chunk(self.model, self._rates) if attends and sizes.resident_blocks != total else None,
        )
        resident = ResidentReason(
            blocks=min(sizes.resident_by_layer(kv).values(), default=0),
            total=total,
            given=options.resident_blocks is not None,
            known=self._room is not None,
            attends=attends,
        )
        return chunk.text(), ring_reason(sizes, kv), resident.text()
