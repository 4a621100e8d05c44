"""Second step of reductions: combines the partial results of all results of a GEMM in a fixed order, in one launch.

Each result has CTAs of its own. A CTA computes a chunk of consecutive outputs. If outputs have many partials, several
CTAs share a chunk: each combines a slice of the partials to a state, and the one that finishes last, which a counter
tells, combines the states of the slices in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from gemmsmith import hw
from gemmsmith.core.arguments import Pointer
from gemmsmith.core.chip import HOPPER, Chip
from gemmsmith.core.dtypes import DType
from gemmsmith.core.scalars import ceil_div
from gemmsmith.epilogue.outputs import store_rounded
from gemmsmith.epilogue.partials import RANGE_BYTES, PartialsShape
from gemmsmith.graph.reductions import Monoid, ReductionKind
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.shared import SharedBuffer
from gemmsmith.lang.types import F32, I32, I64, PRED, U32, U64, ScalarType
from gemmsmith.lang.values import Constant, RegisterArray, Value

THREADS = 256
"""Threads per CTA; chosen, not measured: of so small a CTA an SM has several, which load while others merge."""
LOADS_IN_FLIGHT = 16
"""Partials that a thread has in flight; chosen, not measured."""
SLICE_LOADS_IN_FLIGHT = 4
"""States of slices that a thread has in flight; chosen, not measured: there are few slices."""
MAX_LANES = 8
"""Maximum threads that share an output: with 8, a CTA has 32 outputs, and reads 128 bytes of each line of partials.
Chosen, not measured."""
MAX_LANES_OF_GROUPS = 32
"""The same of groups, whose partials are not sliced."""
ROUNDS_PER_SLICE = 2
"""Rounds of loads of a slice. Chosen, not measured: 256 partials of a column take less than a second step of theirs."""
MAX_SLICES = 256
"""Slices of an output, at most; chosen, not measured."""


@dataclass(frozen=True)
class ReduceSpec:
    """Compile-time parameters of the second step of a result.

    Attributes:
        kind: The kind of the reduction, such as a sum (graph/reductions.py).
        dtype: Dtype of the result: fp32, fp16 or bf16.
        lanes: Threads that share an output. All threads do if its partials are contiguous.
        is_split: Whether several CTAs share an output.
        has_ranges: Whether batches are groups, which have ranges of the partials.
    """

    kind: ReductionKind
    dtype: DType
    lanes: int
    is_split: bool = False
    has_ranges: bool = False

    @classmethod
    def from_partials(cls, kind: ReductionKind, dtype: DType, partials: PartialsShape) -> ReduceSpec:
        """Return the spec for partials of a shape.

        The more partials an output has, the more threads share it; all threads of a CTA share the one output of a full
        reduction (with `tiles_per_batch`). Otherwise the spec does not depend on the number of outputs, and neither
        does the order of additions.
        """
        has_ranges = partials.groups > 0 and partials.num_partials > 0
        lanes = THREADS
        if not partials.tiles_per_batch:
            num_partials = ceil_div(partials.num_partials, partials.groups or 1)
            lanes, most = 1, MAX_LANES_OF_GROUPS if has_ranges else MAX_LANES
            while lanes < most and lanes * LOADS_IN_FLIGHT < num_partials:
                lanes *= 2
        spec = cls(kind, dtype, lanes, has_ranges=has_ranges)
        return replace(spec, is_split=not has_ranges and partials.num_partials > spec.min_partials_per_slice)

    @property
    def name(self) -> str:
        suffix = "_split" * self.is_split + "_of_groups" * self.has_ranges
        return f"{self.kind.name}_{self.dtype}_{self.columns}x{self.lanes}{suffix}"

    @property
    def is_contiguous(self) -> bool:
        """Whether an output's partials are contiguous; a batch or group has one output then."""
        return self.lanes == THREADS

    @property
    def columns(self) -> int:
        """Outputs of a CTA."""
        return THREADS // self.lanes

    @property
    def min_partials_per_slice(self) -> int:
        """Partials of each but the last slice of an output, unless there would be more than MAX_SLICES."""
        return self.lanes * LOADS_IN_FLIGHT * (1 if self.is_contiguous else ROUNDS_PER_SLICE)


@dataclass(frozen=True)
class BoundReduction:
    """Launch arguments of the second step of a result: out = scale * total + offset for each output's total.

    `source`: address of the partial results, aligned to 16 bytes. `out`: that of the contiguous results. `ranges`: that
    of the range of partials of each group (see GroupPartials); 0 if there are no groups.
    """

    spec: ReduceSpec
    partials: PartialsShape
    source: Pointer | int
    out: Pointer
    scale: float = 1.0
    offset: float = 0.0
    ranges: Pointer | int = 0

    @property
    def chunks(self) -> int:
        """Chunks of a CTA's outputs per batch."""
        return ceil_div(self.partials.num_outputs, self.spec.columns)

    @property
    def partials_per_slice(self) -> int:
        """Partials of each but the last slice of an output."""
        shortest = self.spec.min_partials_per_slice
        return shortest * ceil_div(self.partials.num_partials, shortest * MAX_SLICES)

    @property
    def slices(self) -> int:
        return ceil_div(self.partials.num_partials, self.partials_per_slice) if self.spec.is_split else 1

    @property
    def batches(self) -> int:
        return self.partials.batch * max(self.partials.groups, 1)

    @property
    def slice_states(self) -> int:
        return self.batches * self.slices * self.partials.num_outputs

    @property
    def ctas(self) -> int:
        return self.batches * self.slices * self.chunks


@lru_cache(maxsize=256)
def reduce_kernel(specs: tuple[ReduceSpec, ...], chip: Chip = HOPPER) -> Kernel:
    """Build the kernel that combines the partials of several results, one spec each, in one launch.

    A launch takes a tuple of BoundReductions, one per spec. Result i has the CTAs after those of results 0 to i - 1.
    """
    name = "_".join(["reduce", *(spec.name for spec in specs)])
    with Builder(name, threads=THREADS, chip=chip) as k:
        k.header += [f"gemmsmith: {name}", "combines partials (batch, partials, outputs) in order"]
        k.work_clusters = partial(_ctas_before, len(specs))
        components = max(len(spec.kind.monoid.identity) for spec in specs)
        states = k.shared(4 * THREADS, stages=components, name="reduction_state")
        last_flag = k.shared(4, name="is_last_slice") if any(spec.is_split for spec in specs) else None
        steps = [_SecondStep(spec, i, f"_{i}" if len(specs) > 1 else "", states, last_flag)
                 for i, spec in enumerate(specs)]  # fmt: skip
        first_ctas = [k.parameter(f"first_cta_{i}", compute=partial(_ctas_before, i)) for i in range(1, len(specs))]
        cta = hw.block_index().with_name_hint("cta")
        for step, first, stop in zip(steps, [None, *first_ctas], [*first_ctas, None], strict=True):
            is_here: Value = Constant(PRED, True) if first is None else cta >= first
            if stop is not None:
                is_here = cta < stop if first is None else is_here & (cta < stop)
            with k.when(is_here):
                step.run(cta if first is None else cta - first)
        return k.finish()


def _ctas_before(index: int, reductions: Sequence[BoundReduction]) -> int:
    return sum(r.ctas for r in reductions[:index])


class _SecondStep:
    """The second step of result `index` of a launch.

    Kernel arguments, each with `suffix`: `partials` and `out`, addresses; `num_partials` and `num_outputs`, per batch;
    `chunks`, the CTAs of a batch (of a slice); `component_stride`, the elements between the components of a state (a
    partial result); `scale` and `affine_offset`. With groups: `ranges`. If several CTAs share an output: `slices` and
    `partials_per_slice`; `slice_states`, where the slices' states are stored, as partials are; their
    `slice_component_stride`; `arrivals`, a counter for each chunk that is zero before and after.
    """

    def __init__(
        self, spec: ReduceSpec, index: int, suffix: str, buffers: SharedBuffer, last_flag: SharedBuffer | None
    ) -> None:
        """Declare the arguments.

        `buffers`: shared memory for a state of each thread, component by component. `last_flag`: shared memory for a
        word; needed if CTAs share an output.
        """
        k = current_builder()
        self.spec, self.monoid, self._buffers, self._last_flag = spec, spec.kind.monoid, buffers, last_flag

        def of(compute: Callable[[BoundReduction], Any]) -> Callable[[Any], Any]:
            return lambda reductions: compute(reductions[index])

        def parameter(name: str, compute: Callable[[BoundReduction], Any], type: ScalarType = I32) -> Value:
            return k.parameter(f"{name}{suffix}", type, of(compute))

        self.source = k.pointer(f"partials{suffix}", of(lambda r: r.source))
        self.out = k.pointer(f"out{suffix}", of(lambda r: r.out))
        self.num_partials = parameter("num_partials", lambda r: r.partials.num_partials)
        self.num_outputs = parameter("num_outputs", lambda r: r.partials.num_outputs)
        self.chunks = parameter("chunks", lambda r: r.chunks)
        self.component_stride = parameter("component_stride", lambda r: r.partials.component_stride, I64)
        self.scale = parameter("scale", lambda r: r.scale, F32)
        self.affine_offset = parameter("affine_offset", lambda r: r.offset, F32)
        if spec.has_ranges:
            self.ranges = k.pointer(f"ranges{suffix}", of(lambda r: r.ranges))
        if spec.is_split:
            self.slices = parameter("slices", lambda r: r.slices)
            self.partials_per_slice = parameter("partials_per_slice", lambda r: r.partials_per_slice)
            self.slice_component_stride = parameter("slice_component_stride", lambda r: r.slice_states, I64)
            state_bytes, counter_bytes = 4 * len(self.monoid.identity), 4
            self.slice_states = k.scratch(f"slice_states{suffix}", of(lambda r: state_bytes * r.slice_states))
            counters = of(lambda r: counter_bytes * r.batches * r.chunks)
            self.arrivals = k.scratch(f"arrivals{suffix}", counters, zero_initialized=True)

    def run(self, cta: Value) -> None:
        """Combine the partials of one CTA: `cta` is its number among the CTAs of the result.

        CTAs are numbered by batch (or group), then slice, then chunk.
        """
        k, columns = current_builder(), self.spec.columns
        line, chunk = (cta // self.chunks).named("line"), (cta % self.chunks).named("chunk")
        output = (chunk * columns + k.thread % columns).named("output")
        is_output = (output < self.num_outputs).named("is_output")
        if not self.spec.is_split:
            batch, first = line, line * self.num_partials
            count: Value = self.num_partials
            hw.grid_dependency_wait()
            if self.spec.has_ranges:
                address = self.ranges + (batch * RANGE_BYTES).to(U64)
                first, count = (
                    hw.load_global_word(address + 4 * i, Constant(PRED, True), I32, name)
                    for i, name in enumerate(("first_partial", "partial_count"))
                )
            self._store(self._reduce(first, count, output, is_output), batch, output, is_output)
            return
        batch, slice = (line // self.slices).named("batch"), (line % self.slices).named("slice")
        begin = (slice * self.partials_per_slice).named("slice_begin")
        count = k.minimum(self.partials_per_slice, self.num_partials - begin).named("slice_partials")
        hw.grid_dependency_wait()
        state = self._reduce(batch * self.num_partials + begin, count, output, is_output)
        self._store_slice(state, line, output, is_output)
        with k.when(self._is_last(batch * self.chunks + chunk)):
            k.comment("the last CTA of a chunk combines the states of all its slices")
            state = self._reduce(batch * self.slices, self.slices, output, is_output, of_slices=True)
            self._store(state, batch, output, is_output)

    def _reduce(
        self, first: Value, count: Value, output: Value, is_output: Value, of_slices: bool = False
    ) -> list[RegisterArray]:
        """Merge the partials of each of the CTA's outputs, and return the states, a register per component.

        Only the first `columns` threads have the merged states, one output each. Partial i of all outputs is line i;
        `count` lines from `first` on are merged. `of_slices`: merge the states of slices instead of partials.
        """
        k, spec, monoid = current_builder(), self.spec, self.monoid
        source = self.slice_states if of_slices else self.source
        component_stride = self.slice_component_stride if of_slices else self.component_stride
        loads = SLICE_LOADS_IN_FLIGHT if of_slices else LOADS_IN_FLIGHT
        width = 4 if spec.is_contiguous and not of_slices else 1
        first.with_name_hint("first_line")
        lane = (k.thread // spec.columns).named("reduction_lane")
        state = [k.registers(F32, 1, name) for name in monoid.names_of("thread", "state")]
        for register, identity in zip(state, monoid.identity, strict=True):
            register[0] = identity
        per_round = loads * spec.lanes
        with k.range((count + (per_round - 1)) // per_round, name="round") as round:
            loaded = [k.registers(F32, loads, name) for name in monoid.names_of("loaded", "")]
            with k.unroll(loads // width, name="load") as load:
                index = (round * per_round + (load * spec.lanes + lane) * width).named("partial_idx")
                in_bounds = ((index < count) & is_output).named("in_bounds")
                offset = (first + index).to(I64)
                if not spec.is_contiguous:
                    offset = offset * self.num_outputs.to(I64) + output.to(I64)
                offset.with_name_hint("partial_offset")
                for i, (registers, identity) in enumerate(zip(loaded, monoid.identity, strict=True)):
                    address = source + ((offset + component_stride * i) * 4).to(U64)
                    hw.load_global(registers.slice(load * width, width), address, in_bounds)
                    if identity:  # a load that is out of bounds returns zeros
                        with k.unroll(width, name="j") as j:
                            registers[load * width + j] = k.select(in_bounds, registers[load * width + j], identity)
            _merge_halves(monoid, loaded)
            _merge(monoid, state, 0, loaded)
        self._merge_lanes(state)
        return state

    def _merge_lanes(self, state: list[RegisterArray]) -> None:
        """Merge the states of the threads that share an output into the first thread's, always in the same tree.

        Within a warp by shuffles, if the warp's lanes share an output; then through shared memory.
        """
        k, spec, monoid = current_builder(), self.spec, self.monoid
        count = spec.lanes
        row: Value = k.thread
        is_writer: Value = Constant(PRED, True)
        if spec.is_contiguous:
            for mask in (16, 8, 4, 2, 1):
                peer = [k.registers(F32, 1, name) for name in monoid.names_of("peer", "")]
                for register, other in zip(state, peer, strict=True):
                    other[0] = hw.shuffle_xor_fp32(register[0], mask)
                _merge(monoid, state, 0, peer)
            count, row, is_writer = THREADS // 32, k.warp_index, k.lane == 0
        if count == 1:
            return
        addresses = [self._buffers[i].address.with_name_hint("state_buffer") for i in range(len(state))]
        with k.when(is_writer):
            for address, register in zip(addresses, state, strict=True):
                hw.store_shared(register, address + (row * 4).to(U32))
        k.comment("all threads have written their states")
        hw.sync_threads()
        with k.when(k.thread < spec.columns):
            others = [k.registers(F32, count, name) for name in monoid.names_of("lane", "states")]
            with k.unroll(count, name="lane") as i:
                for address, registers in zip(addresses, others, strict=True):
                    hw.load_shared(registers.slice(i, 1), address + ((k.thread + i * spec.columns) * 4).to(U32))
            _merge_halves(monoid, others)
            for register, other in zip(state, others, strict=True):
                register[0] = other[0]

    def _store_slice(self, state: list[RegisterArray], line: Value, output: Value, is_output: Value) -> None:
        """Store the states of a slice for the CTA that combines the slices. `line`: batch * slices + slice."""
        k = current_builder()
        offset = (line.to(I64) * self.num_outputs.to(I64) + output.to(I64)).named("slice_offset")
        is_written = ((k.thread < self.spec.columns) & is_output).named("is_written")
        for i, register in enumerate(state):
            address = self.slice_states + ((offset + self.slice_component_stride * i) * 4).to(U64)
            hw.store_global(register, address, is_written)

    def _is_last(self, chunk: Value) -> Value:
        """Count this CTA's slice as finished, and return whether it was the chunk's last; then the counter is reset.

        `chunk`: batch * chunks + chunk. The result is the same in all threads.
        """
        k = current_builder()
        assert self._last_flag
        flag = self._last_flag[0].address.with_name_hint("last_flag")
        k.comment("all threads have written the states that the counter announces")
        hw.sync_threads()
        with k.when(k.thread == 0):
            counter = (self.arrivals + (chunk * 4).to(U64)).named("counter")
            finished = hw.atom_add_u32(counter, Constant(U32, 1), "acq_rel").named("finished_slices")
            is_last = (finished == self.slices.to(U32) - 1).named("is_last")
            hw.store_shared_word(flag, k.select(is_last, Constant(U32, 1), 0), "last")
            with k.when(is_last):
                hw.store_strong(counter, Constant(U32, 0), "relaxed", "gpu")
        k.comment("the counter has been read")
        hw.sync_threads()
        return hw.load_shared_word(flag, U32, "last_of_chunk") == 1

    def _store(self, state: list[RegisterArray], batch: Value, output: Value, is_output: Value) -> None:
        """Store the results of the CTA's outputs of a batch: scale * total + offset, from their merged states."""
        k = current_builder()
        total = self.monoid.finish(tuple(register[0] for register in state))
        result = hw.fma(total, self.scale, self.affine_offset)
        index = batch * self.num_outputs + output
        address = self.out + (index.to(I64) * self.spec.dtype.bytes).to(U64)
        store_rounded(result, address, (k.thread < self.spec.columns) & is_output, self.spec.dtype, "result")


def _merge_halves(monoid: Monoid, states: list[RegisterArray]) -> None:
    """Merge states, a power of two of them, into state 0: always the first half with the second, pair by pair."""
    k, half = current_builder(), len(states[0]) // 2
    while half:
        with k.unroll(half, name="i") as i:
            _merge(monoid, states, i, states, i + half)
        half //= 2


def _merge(
    monoid: Monoid, states: list[RegisterArray], i: Value | int, others: list[RegisterArray], j: Value | int = 0
) -> None:
    """Merge state j of `others` into state i of `states`; both have a register array per component."""
    merged = monoid.merge(tuple(x[i] for x in states), tuple(x[j] for x in others))
    for register, x in zip(states, merged, strict=True):
        register[i] = x
