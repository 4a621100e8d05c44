"""fp32 on CUDA cores: cp.async and register double buffers, as mma_multistage, with an FFMA for each product."""

from __future__ import annotations

from functools import partial

from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.cuda_cores import CopiedWords, ThreadTiles
from gemmsmith.collective.multistage import MultistageMainloop
from gemmsmith.core.design import Design, register_design
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.device.lowering import Epilogue
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import I32
from gemmsmith.lang.values import Constant
from gemmsmith.schedule.stream import tile_scheduler


def sgemm(k: Builder, spec: KernelSpec) -> None:
    """Persistent. While a depth is multiplied the next one's rows and columns are loaded, and `stages` - 1 k-tiles are
    being copied. A thread of a tile of 256x128 has 8x16 results."""
    scheduler, depth = tile_scheduler(spec), spec.config.tile[2]
    mainloop = MultistageMainloop(spec, scheduler, partial(CopiedWords, spec))
    epilogue = Epilogue(spec, scheduler, mainloop)
    mainloop.prologue(*epilogue.pipelines, prefetch=epilogue.maps)

    with k.warpgroups(0, spec.config.consumers, "math") as warpgroup:
        first_column = (warpgroup * spec.warpgroup_columns).named("first_column")
        accumulator = Accumulator(spec.mma, spec.warpgroup_rows, spec.warpgroup_columns)
        own, first = ThreadTiles(spec, warpgroup), Constant(I32, 0)
        epilogue.start(warpgroup, 0, first_column)
        with scheduler.each() as tile:
            epilogue.load(tile)
            accumulator.clear()
            k.comment("mainloop")
            if own.ahead:
                own.load(mainloop.stage(), first, first)
                for begin, stop, copy in mainloop.spans(tile.k_tiles):
                    with k.range(begin, stop, name="k_tile"), k.unroll(depth, name="at") as at:
                        with k.when(at == depth - 1):
                            mainloop.next_stage()
                        own.load(mainloop.stage(), (at + 1) % depth, (at + 1) % 2)
                        with k.when(at == 0):
                            copy(0, 1)
                        own.multiply(accumulator, at % 2)
            else:  # registers are few
                with k.range(tile.k_tiles, name="k_tile"), k.unroll(depth, name="at") as at:
                    own.load_and_multiply(accumulator, mainloop.stage(), at)
                    with k.when(at == depth - 1):
                        mainloop.next_stage()
                    with k.when(at == 0):
                        mainloop.copy()
            own.settle(accumulator)
            epilogue.store(accumulator, tile)
        mainloop.finish()
        epilogue.finish()


register_design(Design(
    "sgemm", sgemm, accumulators={1: 128, 2: 128, 4: 64}, takes=frozenset({"splits"}),
    defaults={"tile": (256, 128, 8), "cluster": (1, 1), "consumers": 2},
    multiplies="fma", architecture="sm_80", side_by_side=True,
))  # fmt: skip
