"""A design of one's own: how the warps of a GEMM kernel share the work, registered and used like those of gemmsmith.

python examples/own_design.py

It is the plainest one there is. All warps multiply; one thread also starts the copies. A k-tile is copied, multiplied
and released before the next one is copied, so nothing overlaps but the first copies of a CTA. Operands of any layout,
clusters, multicast, rasters, split-K and every epilogue come with the parts that it is made of.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import gemmsmith
from gemmsmith import Config, Design, hw
from gemmsmith.collective.loaded_a import accumulator_of
from gemmsmith.collective.mainloop import Mainloop
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.device.lowering import Epilogue
from gemmsmith.lang.builder import Builder
from gemmsmith.schedule.stream import tile_scheduler


def serial(k: Builder, spec: KernelSpec) -> None:
    """Copy, wait, multiply, release; then the next k-tile."""
    # What the kernel is made of: each part declares its arguments and its shared memory.
    scheduler = tile_scheduler(spec)
    mainloop = Mainloop(spec, scheduler)
    epilogue = Epilogue(spec, scheduler, mainloop)
    # Prologue: barriers, and the first copies of the first tile.
    mainloop.prologue(*epilogue.pipelines, prefetch=epilogue.maps)

    with k.warpgroups(0, spec.config.consumers, "math") as warpgroup:
        producer = ((k.warp_index == 0) & hw.elect_one()).named("producer")
        write, read = mainloop.producer_start_state(), mainloop.pipe.consumer_start_state()
        rows = warpgroup * spec.warpgroup_rows
        accumulator = accumulator_of(spec)
        epilogue.start(warpgroup, rows)
        with scheduler.each() as tile:
            epilogue.load(tile)
            with k.when(tile.k_tiles == 0):
                accumulator.clear()
            with k.range(tile.k_tiles, name="k_tile") as k_tile:
                with k.when(k_tile >= mainloop.started.get()):  # the prologue has started those before
                    with k.when(producer):
                        mainloop.pipe.producer_acquire(write)
                        mainloop.load(write, tile, k_tile)
                    write.advance()
                mainloop.pipe.consumer_wait(read)
                a, b = mainloop.stage(read)
                accumulator.multiply(a.rows(rows, spec.warpgroup_rows), b, accumulate=k_tile > 0)
                accumulator.wait(pending=0)
                mainloop.pipe.consumer_release(read)
                read.advance()
            mainloop.started.set(0)
            epilogue.store(accumulator, tile)
        with k.when(producer):
            mainloop.tail(write)
        epilogue.finish()


SERIAL = gemmsmith.register_design(Design(
    "serial", serial,
    accumulators={1: 200, 2: 200},  # numbers of math warpgroups, and registers a thread for the accumulator
    takes=frozenset({"splits", "cluster_splits"}),
    defaults={"tile": (128, 128, 64), "stages": 2},
))  # fmt: skip


def main() -> None:
    rng = np.random.default_rng(0)
    a, b, bias = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((200, 300), (300, 264), (264,)))

    def epilogue(acc: Any, bias: Any) -> Any:
        return (acc + bias).relu()

    config = Config("serial", tile=(128, 128, 64), cluster=(1, 2), stages=2)
    done = gemmsmith.simulate(a, b, epilogue=epilogue, bias=bias, config=config)
    want = np.maximum(a.astype(float) @ b.astype(float) + bias.astype(float), 0)
    error = float(np.abs(done.result.astype(float) - want).max() / want.max())
    print(f"{config}: largest error {error:.4f} of the largest result, hazards: {done.hazards or 'none'}")


if __name__ == "__main__":
    main()
