"""mma_multistage design: mma.sync with fragments by ldmatrix and copies by cp.async, for Ampere and later GPUs.

CUTLASS: MmaMultistage.
"""

from __future__ import annotations

from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.cp_async_mainloop import CpAsyncStages
from gemmsmith.collective.fragments import Fragments, Tf32x3Fragments
from gemmsmith.core.design import Design, register_design
from gemmsmith.core.mma import MMA_SYNC
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.collective_epilogue import Epilogue
from gemmsmith.lang.builder import Builder
from gemmsmith.tile_scheduler import make_tile_scheduler


def mma_multistage(k: Builder, spec: KernelSpec) -> None:
    """Record the kernel.

    It is persistent. While one group of MMAs (see Fragments) runs, the fragments of the next group are loaded, and
    `stages` - 1 k-tiles are being copied. Warpgroups are arranged along N, their warps along M.
    """
    scheduler = make_tile_scheduler(spec)
    stages = CpAsyncStages(spec, scheduler)
    epilogue = Epilogue(spec, scheduler)
    mainloop = stages.prologue(*epilogue.pipelines, prefetch=epilogue.maps)

    with k.warpgroups(0, spec.config.consumers, "math") as warpgroup:
        warpgroup_column = (warpgroup * spec.warpgroup_columns).named("warpgroup_column")
        mma_accumulator = accumulator = Accumulator(spec.mma, spec.warpgroup_rows, spec.warpgroup_columns)
        if spec.promoted:
            accumulator = Accumulator(spec.mma, spec.warpgroup_rows, spec.warpgroup_columns, "promoted_accumulator")
        fragments = (Tf32x3Fragments if spec.is_3xtf32 else Fragments)(spec, warpgroup_column)
        warpgroup_epilogue = epilogue.start(warpgroup, 0, warpgroup_column)
        with scheduler.tile_loop() as tile:
            tile_epilogue = warpgroup_epilogue.load(tile)
            for each in dict.fromkeys((mma_accumulator, accumulator)):
                each.clear()
            fragments.load_first_group(mainloop.stage())
            k.comment("mainloop")
            for first, stop, copy in mainloop.unpredicated_and_tail_loops(tile.k_tiles):
                with (
                    k.range(first, stop, name="k_tile"),
                    k.unroll(fragments.mma_groups, name=fragments.group_name) as group,
                ):
                    with k.when(group == fragments.mma_groups - 1):
                        mainloop.next_stage()
                    fragments.multiply(mma_accumulator, group, mainloop.stage())
                    for step in range(fragments.k_steps - 1):
                        with k.when(group == step * (fragments.mma_groups // fragments.k_steps)):
                            copy(step, fragments.k_steps - 1)
                    if spec.promoted:
                        with k.when(group == fragments.mma_groups - 1):
                            mma_accumulator.add_into_and_clear(accumulator)
            tile_epilogue.store(accumulator)
        mainloop.drain()
        warpgroup_epilogue.finish()


register_design(Design(
    "mma_multistage", mma_multistage, max_accumulator_registers={1: 160, 2: 192, 4: 64},
    supported_options=frozenset({"splits", "3xtf32"}), groups_along=frozenset({"m", "k"}),
    max_promoted_registers={1: 128, 2: 128, 4: 64},
    defaults={"tile": (128, 128, 32), "cluster": (1, 1), "consumers": 2},
    mma_op=MMA_SYNC, required_arch="sm_80", uses_tma=False, warpgroups_split_n=True,
))  # fmt: skip
