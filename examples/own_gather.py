"""A gathered operand from outside the package: rows of A by index, copied by cp.async beside B's TMA loads.

python examples/own_gather.py

D = epilogue(A[rows] @ B): the producer warpgroup copies A's rows into the stages; one of its threads loads B by TMA.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

import gemmsmith
from gemmsmith import Config, Design, hw
from gemmsmith.kernels import (
    Epilogue,
    KernelSpec,
    MmaOperand,
    PipelineState,
    PipelineTmaAsync,
    ThreadCopyPartition,
    TileScheduler,
    TmaOperand,
    TmaStages,
    WorkTile,
    consumer_loop,
)
from gemmsmith.lang import I32, I64, INT32, U32, U64, Builder, Value


class GatheredOperand:
    """Rows of a K-major operand, by the indices in the design's array `rows`."""

    def __init__(self, k: Builder, operand: MmaOperand, stages: int) -> None:
        size = operand.tile.dtype.bytes
        self.role, self.tile = operand.role, operand.tile
        self.stages = k.shared(operand.tile, stages=stages, name="A")
        self.address = k.pointer("a", lambda p: operand.source(p)[1])
        self.row_bytes = k.parameter("a_row_bytes", I64, lambda p: operand.source(p)[0].row_stride * size)
        self.rows = k.pointer("rows", lambda p: p.bound_operands["rows"][1])
        self.m = k.parameter("m_rows", compute=lambda p: p.m)
        self.k_bytes = k.parameter("k_bytes", compute=lambda p: p.k * size)


class RowCopier:
    """Copies the k-tiles of a tile's rows into the stages, with the threads of a warpgroup."""

    def __init__(self, k: Builder, operand: GatheredOperand, work: WorkTile) -> None:
        self.k, self.operand, self.tile = k, operand, operand.tile
        self.first = ThreadCopyPartition(self.tile, k.thread % 128, 128, "a")
        self.steps = self.first.copy_steps()
        self.indices = k.registers(I32, len(self.steps), "row_indices")
        for i, step in enumerate(self.steps):
            row = work.a.mn + self.first.row + step.row
            hw.load_global(self.indices.slice(i, 1), operand.rows + (row * 4).to(U64), row < operand.m)

    def copy(self, pipeline: PipelineTmaAsync, write: PipelineState, k_tile_idx: Value) -> None:
        """Copy a k-tile into a stage, once it is free."""
        k, x, tile, first = self.k, self.operand, self.tile, self.first
        pipeline.non_tma_producer_acquire(write)
        for i, step in enumerate(self.steps):
            byte = k_tile_idx * (tile.boxes * tile.pitch) + (first.box + step.box) * tile.pitch + first.vector_idx * 16
            source = x.address + (self.indices[i].to(I64) * x.row_bytes + byte.to(I64)).to(U64)
            valid = k.minimum(k.maximum(x.k_bytes - byte, 0), 16).to(U32)
            hw.cp_async_copy(x.stages[write.index].address + step.offset, source, valid, 16)
        pipeline.non_tma_producer_commit(write, 128, cp_async=True, st_shared=False)


def gather(k: Builder, spec: KernelSpec) -> None:
    """Record the kernel: the cooperative design with a producer that also copies A's rows."""
    scheduler, stages, (a, b) = TileScheduler(spec), spec.config.stages, spec.operands
    rows = GatheredOperand(k, a, stages)
    operands = TmaStages(spec, scheduler, [rows, TmaOperand(b, stages)])
    epilogue = Epilogue(spec, scheduler)
    mainloop = operands.prologue(*epilogue.pipelines, prefetch=epilogue.maps)
    with k.warpgroup(0, "producer"):
        hw.set_registers(56)  # per thread; with 2 x 224 of the consumers at most 512
        producer, write = mainloop.start_producer(), mainloop.pipeline.producer_start_state()
        is_leader = (k.warp_index == 0) & hw.elect_one()
        with scheduler.tile_loop() as tile:
            copier = RowCopier(k, rows, tile)
            with k.range(tile.k_tiles, name="k_tile") as k_tile:
                with k.when(k_tile >= mainloop.prologue_k_tiles.get()):
                    with k.when(is_leader):
                        producer.load(tile, k_tile)
                    producer.advance()
                copier.copy(mainloop.pipeline, write, tile.k_tile_index(k_tile))
                write.advance()
            mainloop.prologue_k_tiles.set(0)
        with k.when(is_leader):
            producer.tail()

    with k.warpgroups(1, 1 + spec.config.consumers, "consumer") as warpgroup:
        hw.set_registers(224)
        consumer_loop(mainloop, epilogue, warpgroup)


GATHER = gemmsmith.register_design(Design(
    "gather", gather, producer_warpgroups=1, max_accumulator_registers={2: 200}, arrays={"rows": INT32},
    shapes="tk,kn,m->mn", majors={"a": ("K",)},
))  # fmt: skip


def main() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((500, 200), (200, 136)))
    rows = rng.integers(0, 500, 300, dtype=np.int32)
    simulation = gemmsmith.simulate(a, b, rows=rows, config=Config("gather", tile=(128, 128, 64), cluster=(1, 1)))
    expected = a[rows].astype(float) @ b.astype(float)
    error = np.abs(simulation.result.astype(float) - expected).max() / expected.max()
    print(f"300 of 500 rows: maximum error {error:.4f} of the largest, {len(simulation.hazards)} hazards")


if __name__ == "__main__":
    main()
