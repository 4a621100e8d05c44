"""Second kernel of a reduction: combines partial results in a fixed order and rounds the total to its dtype."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

from gemmsmith import hw
from gemmsmith.core.chip import HOPPER, Chip
from gemmsmith.core.dtypes import DType
from gemmsmith.core.integers import ceil_div
from gemmsmith.core.pointer import Pointer
from gemmsmith.epilogue.group_partials import RANGE_BYTES
from gemmsmith.epilogue.outputs import store_rounded
from gemmsmith.epilogue.reductions import MONOIDS, Monoid, PartialsShape, State
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.shared import SharedBuffer
from gemmsmith.lang.types import F32, I32, I64, PRED, U32, U64
from gemmsmith.lang.values import Constant, RegisterArray, Value

LOADS_IN_FLIGHT = 8
"""Loads that a thread has in flight; chosen, not measured."""


def launch_shape(partials: PartialsShape) -> tuple[int, int]:
    """Return the outputs per CTA and the threads per output.

    A full reduction (with `tiles_per_batch`) uses 1024 threads for one output. Others use just enough threads to have
    all loads in flight. Both depend on `num_partials` only, not on the number of outputs; so does the order of
    additions.
    """
    if partials.tiles_per_batch:
        return 1, 1024
    num_partials = ceil_div(partials.num_partials, partials.groups or 1)
    threads = min(1 << (max(ceil_div(num_partials, LOADS_IN_FLIGHT), 1) - 1).bit_length(), 32)
    return (32, threads) if threads <= 8 else (8, threads)


@dataclass(frozen=True)
class BoundReduction:
    """Launch arguments of a reduction: out = scale * total + offset for each output.

    Attributes:
        partials: Shape of the partial results.
        source: Their address.
        out: Address of the contiguous results.
        scale: Factor of the total.
        offset: Addend.
        ranges: Address of which partials each group has, see GroupPartials.
    """

    partials: PartialsShape
    source: Pointer | int
    out: Pointer
    scale: float = 1.0
    offset: float = 0.0
    ranges: Pointer | int = 0

    @property
    def total(self) -> int:
        """Number of outputs."""
        return self.partials.total_outputs


@lru_cache(maxsize=64)
def reduce_kernel(
    kind: str, dtype: DType, columns: int, threads: int, chip: Chip = HOPPER, has_ranges: bool = False
) -> Kernel:
    """Build a reduction kernel.

    `threads` threads share the partials of an output and combine their states in shared memory; a CTA has `columns`
    outputs, stored as `dtype`: fp32, fp16 or bf16. `has_ranges`: batches are groups, which have ranges of the partials.
    """
    monoid = MONOIDS[kind]
    of_groups = "_of_groups" * has_ranges
    with Builder(f"reduce_{kind}_{dtype}_{columns}x{threads}{of_groups}", threads=columns * threads, chip=chip) as k:
        k.header += [f"gemmsmith: reduce ({kind})", "combines partials (batch, partials, outputs) in order"]
        k.work_clusters, k.persistent = partial(_ctas, columns, has_ranges), True
        source, out = k.pointer("partials", lambda r: r.source), k.pointer("out", lambda r: r.out)
        ranges = k.pointer("ranges", lambda r: r.ranges) if has_ranges else None
        num_partials = k.parameter("num_partials", compute=lambda r: r.partials.num_partials)
        num_outputs = k.parameter("num_outputs", compute=lambda r: r.partials.num_outputs)
        total = k.parameter("total", compute=lambda r: r.total)
        component_stride = k.parameter("component_stride", I64, lambda r: r.partials.component_stride)
        scale = k.parameter("scale", F32, lambda r: r.scale)
        affine_offset = k.parameter("affine_offset", F32, lambda r: r.offset)
        hw.grid_dependency_wait()
        reduction_lane = (k.thread // columns).named("reduction_lane")
        state_buffers = k.shared(4 * columns * threads, stages=len(monoid.identity), name="reduction_state")
        groups, grid = (total + columns - 1) // columns, hw.grid_size().with_name_hint("num_ctas")
        if has_ranges:
            chunks = k.parameter("chunks_per_group", compute=lambda r: ceil_div(r.partials.num_outputs, columns))
            groups = chunks * k.parameter("groups", compute=lambda r: r.partials.groups)
        with k.range((groups - hw.block_index() + grid - 1) // grid, name="group") as group:
            index = ((hw.block_index() + group * grid) * columns + k.thread % columns).named("index")
            batch, output = (index // num_outputs).with_name_hint("batch"), (index % num_outputs).named("output")
            count: Value = num_partials
            first = None
            if ranges is not None:  # a CTA has outputs of one group
                chunk = (hw.block_index() + group * grid).named("chunk")
                batch = (chunk // chunks).named("batch")
                output = ((chunk - batch * chunks) * columns + k.thread % columns).named("output")
                index = batch * num_outputs + output
                address = ranges + (batch * RANGE_BYTES).to(U64)
                first, count = (
                    hw.load_global_word(address + 4 * i, Constant(PRED, True), I32, name)
                    for i, name in enumerate(("first_partial", "partial_count"))
                )
            is_output = (
                partial(_is_output, index, total) if ranges is None else partial(_is_output, output, num_outputs)
            )
            state = [k.registers(F32, 1, name) for name in monoid.names_of("thread", "state")]
            for register, identity in zip(state, monoid.identity, strict=True):
                register[0] = identity
            in_flight = threads * LOADS_IN_FLIGHT
            with k.range((count + in_flight - 1) // in_flight, name="round") as round:
                loaded = [k.registers(F32, LOADS_IN_FLIGHT, name) for name in monoid.names_of("loaded", "")]
                with k.unroll(LOADS_IN_FLIGHT, name="load") as load:
                    partial_idx = (round * in_flight + load * threads + reduction_lane).with_name_hint("partial_idx")
                    in_bounds = ((partial_idx < count) & is_output()).named("in_bounds")
                    line = batch * num_partials + partial_idx if first is None else first + partial_idx
                    offset = line.to(I64) * num_outputs.to(I64) + output.to(I64)
                    offset.with_name_hint("partial_offset")
                    for s, (registers, identity) in enumerate(zip(loaded, monoid.identity, strict=True)):
                        address = source + ((offset + component_stride * s) * 4).to(U64)
                        registers[load] = k.select(in_bounds, _load(address, in_bounds), identity)
                with k.unroll(LOADS_IN_FLIGHT, name="load") as load:
                    _merge(monoid, state, tuple(x[load] for x in loaded))
            if threads > 1:
                _reduce_threads(monoid, state, state_buffers, reduction_lane, threads, columns)
            result = hw.fma(monoid.finish(tuple(register[0] for register in state)), scale, affine_offset)
            address = out + (index.to(I64) * dtype.bytes).to(U64)
            store_rounded(result, address, (reduction_lane == 0) & is_output(), dtype, "result")
        return k.finish()


def _ctas(columns: int, has_ranges: bool, r: BoundReduction) -> int:
    """Return the CTAs that have outputs."""
    if has_ranges:
        return r.partials.groups * ceil_div(r.partials.num_outputs, columns)
    return ceil_div(r.total, columns)


def _is_output(index: Value, outputs: Value) -> Value:
    return index < outputs


def _reduce_threads(
    monoid: Monoid, state: list[RegisterArray], buffers: SharedBuffer, reduction_lane: Value, threads: int, columns: int
) -> None:
    """Merge the states of an output's threads into the first one's, in a tree that is always the same."""
    k = current_builder()
    addresses = [buffers[s].address.with_name_hint("state_buffer") for s in range(len(state))]
    with k.unroll(threads.bit_length() - 1, name="level") as level:
        half = (Constant(I32, threads // 2) >> level).named("half")
        for address, register in zip(addresses, state, strict=True):
            hw.store_shared(register, address + (k.thread * 4).to(U32))
        k.comment("all threads have written the states that are merged now")
        hw.sync_threads()
        with k.when(reduction_lane < half):
            others = [k.registers(F32, 1, name) for name in monoid.names_of("other", "")]
            for address, other_register in zip(addresses, others, strict=True):
                hw.load_shared(other_register, address + ((k.thread + half * columns) * 4).to(U32))
            _merge(monoid, state, tuple(other_register[0] for other_register in others))
        k.comment("all threads have read the states that are overwritten next")
        hw.sync_threads()


def _merge(monoid: Monoid, state: list[RegisterArray], other: State) -> None:
    merged = monoid.merge(tuple(register[0] for register in state), other)
    for register, x in zip(state, merged, strict=True):
        register[0] = x


def _load(address: Value, in_bounds: Value) -> Value:
    return hw.load_global_word(address, in_bounds, F32, "partial")
