"""Mixed input from outside of the package: 16-bit activations times int4 weights, which have a scale for each 64 of k.

python examples/own_int4.py

Two weights, neighbors along k, share a byte, in memory and in the stages. Each thread converts those that it multiplies
by mma.sync: to their dtype in `Design.dtypes`, times the scale. The scales are an array of the design.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

import gemmsmith
from gemmsmith import ArgumentError, Config, Design, hw
from gemmsmith.kernels import (
    A_FRAGMENT,
    B_FRAGMENT,
    MMA_SYNC,
    Accumulator,
    BoundProblem,
    CpAsyncStages,
    Epilogue,
    KernelSpec,
    make_tile_scheduler,
    swizzled_vector_offset,
)
from gemmsmith.lang import BF16, F32, FP16, FP32, I32, INT4, U32, U64, Builder, SharedView, Value

GROUP = 64
"""Elements of k that have one scale."""


def word_at(view: SharedView, row: Value, byte: Value) -> Value:
    """Load the aligned word at a byte of a row of a K-major tile."""
    assert view.tile is not None
    offset = swizzled_vector_offset(view.tile, row, byte // 16, byte % 16)
    return hw.load_shared_word(view.address + offset, U32, "word")


class Scales:
    """The design's array `scales`, (groups of k, n)."""

    def __init__(self, k: Builder) -> None:
        self.address = k.pointer("scales", lambda p: p.bound_operands["scales"][1])
        self.n = k.parameter("n", compute=self._columns)

    def _columns(self, p: BoundProblem) -> int:
        found, groups = p.bound_operands["scales"][0].rows, -(-p.k // GROUP)
        if found != groups:
            raise ArgumentError(f"scales: got {found} rows for k = {p.k}; use {groups}, one for each {GROUP} of k")
        return p.n

    def load(self, k: Value, column: Value) -> Value:
        place = ((k // GROUP * self.n + column) * 4).to(U64)
        return hw.load_global_word(self.address + place, column < self.n, F32, "scale")


def int4(k: Builder, spec: KernelSpec) -> None:
    """Record the kernel: while a k-tile is multiplied, others are copied by cp.async."""
    scheduler, scales = make_tile_scheduler(spec), Scales(k)
    stages = CpAsyncStages(spec, scheduler)
    epilogue = Epilogue(spec, scheduler)
    mainloop = stages.prologue(*epilogue.pipelines, prefetch=epilogue.maps)
    depth, registers = spec.mma.k, spec.mma.accumulator_registers(8)
    with k.warpgroups(0, spec.config.consumers, "math") as warpgroup:
        first_column = (warpgroup * spec.warpgroup_columns).named("warpgroup_column")
        accumulator = Accumulator(spec.mma, spec.warpgroup_rows, spec.warpgroup_columns)
        a_frag, b_frag = k.registers_2d(U32, len(accumulator.fragments), 4, "a_frag"), k.registers(U32, 2, "b_frag")
        warpgroup_epilogue, thread = epilogue.start(warpgroup, 0, first_column), k.thread % 128
        with scheduler.tile_loop() as tile:
            tile_epilogue = warpgroup_epilogue.load(tile)
            accumulator.clear()
            with k.range(tile.k_tiles, name="k_tile") as k_tile:
                mainloop.copy_k_tile()
                a, b = mainloop.stage()
                with k.unroll(spec.config.tile[2] // depth, name="k_step") as k_step:
                    for mma_m, fragment in enumerate(a_frag):
                        for i in range(4):
                            row, word = A_FRAGMENT.element(thread, i)
                            fragment[i] = word_at(a, row + mma_m * spec.mma.m, k_step * (depth * 2) + word * 4)
                    group_k = tile.k_tile_index(k_tile) * spec.config.tile[2] + k_step * depth
                    with k.unroll(spec.warpgroup_columns // 8, name="n8") as n8:
                        column = first_column + n8 * 8 + k.lane // 4
                        scale = scales.load(group_k, tile.n + column)
                        for i in range(2):
                            _, word = B_FRAGMENT.element(thread, i)  # of two 16-bit elements: here, a byte
                            byte = k_step * (depth // 2) + word
                            codes = word_at(b, column, byte // 4 * 4) >> (byte % 4 * 8).to(U32)
                            low, high = (((codes >> bits & 15) ^ 8).to(I32) - 8 for bits in (0, 4))
                            b_frag[i] = hw.pack(low.to(F32) * scale, high.to(F32) * scale, spec.mma.b)
                        for d, fragment in zip(accumulator.fragments, a_frag, strict=True):
                            d8 = d.slice(n8 * registers, registers)
                            hw.mma_sync(d8, fragment.slice(0, 4), b_frag.slice(0, 2), spec.mma)
                mainloop.next_stage()
            tile_epilogue.store(accumulator)
        mainloop.drain()
        warpgroup_epilogue.finish()


INT4_WEIGHTS = gemmsmith.register_design(Design(
    "int4_weights", int4, max_accumulator_registers={1: 128, 2: 128}, mma_op=MMA_SYNC, required_arch="sm_80",
    dtypes={(BF16, INT4): BF16, (FP16, INT4): FP16}, majors={"a": ("K",), "b": ("K",)}, arrays={"scales": FP32},
    shapes="mk,kn,gn->mn", uses_tma=False, warpgroups_split_n=True,
    defaults={"tile": (64, 128, 64), "cluster": (1, 1), "consumers": 2},
))  # fmt: skip


def main() -> None:
    rng = np.random.default_rng(0)
    m, n, k = 100, 136, 320
    a, weights = rng.standard_normal((m, k)).astype(ml_dtypes.bfloat16), rng.integers(-8, 8, (n, k))
    scales = rng.uniform(0.5, 2, (k // GROUP, n)).astype(np.float32)
    codes = (weights & 15).astype(np.uint8)
    b = (codes[:, ::2] | codes[:, 1::2] << 4).T  # (k / 2, n), contiguous along k
    simulation = gemmsmith.simulate(a, b, scales=scales, config=Config("int4_weights", (64, 128, 64), (1, 1)))
    expected = a.astype(float) @ (weights.T * np.repeat(scales.astype(float), GROUP, 0))
    error = np.abs(simulation.result.astype(float) - expected).max() / np.abs(expected).max()
    print(f"int4 weights: maximum error {error:.4f} of the largest, {len(simulation.hazards)} hazards")


if __name__ == "__main__":
    main()
