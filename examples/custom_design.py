"""A custom design (CUTLASS: kernel schedule): how the warps of a GEMM kernel share the work.

python examples/custom_design.py

This is the simplest one: all warps multiply, and one thread also issues the copies. A k-tile is copied, multiplied and
released before the next one is copied, so only the prologue's copies overlap. It is registered and used like
gemmsmith's own designs. Operands of any layout, clusters, multicast, rasters, split-K and all epilogues work, because
the tile scheduler, the mainloop and the epilogue implement them.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import gemmsmith
from gemmsmith import Config, Design, hw
from gemmsmith.kernels import Accumulator, Epilogue, KernelSpec, TmaStages, make_tile_scheduler
from gemmsmith.lang import Builder


def serial(k: Builder, spec: KernelSpec) -> None:
    """Copy a k-tile, wait for it, multiply it and release its stage; then go on with the next k-tile."""
    # The parts of the kernel. Each declares its arguments and its shared memory.
    scheduler = make_tile_scheduler(spec)
    stages = TmaStages(spec, scheduler)
    epilogue = Epilogue(spec, scheduler)
    # Prologue: initializes barriers and issues the first copies of the first tile.
    mainloop = stages.prologue(*epilogue.pipelines, prefetch=epilogue.maps)

    with k.warpgroups(0, spec.config.consumers, "math") as warpgroup:
        is_producer = ((k.warp_index == 0) & hw.elect_one()).named("is_producer")
        producer, read = mainloop.start_producer(), mainloop.pipeline.consumer_start_state()
        warpgroup_row = warpgroup * spec.warpgroup_rows
        accumulator = Accumulator(spec.mma, spec.warpgroup_rows, spec.warpgroup_columns)
        warpgroup_epilogue = epilogue.start(warpgroup, warpgroup_row)
        with scheduler.tile_loop() as tile:
            tile_epilogue = warpgroup_epilogue.load(tile)
            with k.when(tile.k_tiles == 0):
                accumulator.clear()
            with k.range(tile.k_tiles, name="k_tile") as k_tile:
                with k.when(k_tile >= mainloop.prologue_k_tiles.get()):  # the prologue has issued the others
                    with k.when(is_producer):
                        producer.load(tile, k_tile)
                    producer.advance()
                mainloop.pipeline.consumer_wait(read)
                a, b = mainloop.stage(read)
                accumulator.multiply(a.rows(warpgroup_row, spec.warpgroup_rows), b, accumulate=k_tile > 0)
                accumulator.wait(pending=0)
                mainloop.pipeline.consumer_release(read)
                read.advance()
            mainloop.prologue_k_tiles.set(0)
            tile_epilogue.store(accumulator)
        with k.when(is_producer):
            producer.tail()
        warpgroup_epilogue.finish()


SERIAL = gemmsmith.register_design(Design(
    "serial", serial,
    max_accumulator_registers={1: 200, 2: 200},  # by the number of consumer warpgroups; per thread
    supported_options=frozenset({"splits", "cluster_splits", "interleaved_b"}),
    defaults={"tile": (128, 128, 64), "stages": 2},
))  # fmt: skip


def main() -> None:
    rng = np.random.default_rng(0)
    a, b, bias = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((200, 300), (300, 264), (264,)))

    def epilogue(acc: Any, bias: Any) -> Any:
        return (acc + bias).relu()

    config = Config("serial", tile=(128, 128, 64), cluster=(1, 2), stages=2)
    simulation = gemmsmith.simulate(a, b, epilogue=epilogue, bias=bias, config=config)
    expected = np.maximum(a.astype(float) @ b.astype(float) + bias.astype(float), 0)
    error = float(np.abs(simulation.result.astype(float) - expected).max() / expected.max())
    print(f"{config}: maximum error {error:.4f} of the largest result, hazards: {simulation.hazards or 'none'}")


if __name__ == "__main__":
    main()
