"""sgemm design: fp32 on CUDA cores (CUTLASS: SIMT), with cp.async and register double buffers as in mma_multistage."""

from __future__ import annotations

from functools import partial

from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.cp_async_mainloop import CpAsyncStages
from gemmsmith.collective.simt import SimtFragments, SimtOperand
from gemmsmith.core.design import Design, register_design
from gemmsmith.core.mma import FMA
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.collective_epilogue import Epilogue
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import I32
from gemmsmith.lang.values import Constant
from gemmsmith.tile_scheduler import make_tile_scheduler


def sgemm(k: Builder, spec: KernelSpec) -> None:
    """Record the kernel.

    It is persistent. While the fragments of one index of K (`kk` in the k-tile) are multiplied, those of the next are
    loaded, and `stages` - 1 k-tiles are being copied. With a tile of 256x128 a thread has 8x16 results.
    """
    scheduler, tile_k = make_tile_scheduler(spec), spec.config.tile[2]
    stages = CpAsyncStages(spec, scheduler, partial(SimtOperand, spec))
    epilogue = Epilogue(spec, scheduler)
    mainloop = stages.prologue(*epilogue.pipelines, prefetch=epilogue.maps)

    with k.warpgroups(0, spec.config.consumers, "math") as warpgroup:
        warpgroup_column = (warpgroup * spec.warpgroup_columns).named("warpgroup_column")
        accumulator = Accumulator(spec.mma, spec.warpgroup_rows, spec.warpgroup_columns)
        fragments, zero = SimtFragments(spec, warpgroup), Constant(I32, 0)
        warpgroup_epilogue = epilogue.start(warpgroup, 0, warpgroup_column)
        with scheduler.tile_loop() as tile:
            tile_epilogue = warpgroup_epilogue.load(tile)
            accumulator.clear()
            k.comment("mainloop")
            if fragments.double_buffered:
                fragments.load(mainloop.stage(), zero, zero)
                for begin, stop, copy in mainloop.unpredicated_and_tail_loops(tile.k_tiles):
                    with k.range(begin, stop, name="k_tile"), k.unroll(tile_k, name="kk") as kk:
                        with k.when(kk == tile_k - 1):
                            mainloop.next_stage()
                        next_kk, next_buffer = ((kk + 1) % tile_k).with_name_hint("next_kk"), (kk + 1) % 2
                        fragments.load(mainloop.stage(), next_kk, next_buffer.with_name_hint("next_buffer"))
                        with k.when(kk == 0):
                            copy(0, 1)
                        fragments.multiply(accumulator, (kk % 2).with_name_hint("buffer"))
            else:  # too few registers for two fragments
                with k.range(tile.k_tiles, name="k_tile"), k.unroll(tile_k, name="kk") as kk:
                    fragments.load_and_multiply(accumulator, mainloop.stage(), kk)
                    with k.when(kk == tile_k - 1):
                        mainloop.next_stage()
                    with k.when(kk == 0):
                        mainloop.copy_k_tile()
            fragments.unpermute_lanes(accumulator)
            tile_epilogue.store(accumulator)
        mainloop.drain()
        warpgroup_epilogue.finish()


register_design(Design(
    "sgemm", sgemm, max_accumulator_registers={1: 128, 2: 128, 4: 64}, supported_options=frozenset({"splits"}),
    defaults={"tile": (256, 128, 8), "cluster": (1, 1), "consumers": 2},
    mma_op=FMA, required_arch="sm_80", uses_tma=False, warpgroups_split_n=True,
))  # fmt: skip
