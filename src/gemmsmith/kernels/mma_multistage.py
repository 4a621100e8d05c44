"""Multistage (CUTLASS: MmaMultistage): mma.sync with fragments by ldmatrix, copies by cp.async; for every GPU from
Ampere on."""

from __future__ import annotations

from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.fragments import Fragments, SplitFragments
from gemmsmith.collective.multistage import MultistageMainloop
from gemmsmith.core.design import Design, register_design
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.device.lowering import Epilogue
from gemmsmith.lang.builder import Builder
from gemmsmith.schedule.stream import tile_scheduler


def mma_multistage(k: Builder, spec: KernelSpec) -> None:
    """Persistent. While a part of a k-tile is multiplied the next one's fragments are loaded, and `stages` - 1
    k-tiles are being copied. Warpgroups lie side by side along N, their warps one below the other along M."""
    scheduler = tile_scheduler(spec)
    mainloop = MultistageMainloop(spec, scheduler)
    epilogue = Epilogue(spec, scheduler, mainloop)
    mainloop.prologue(*epilogue.pipelines, prefetch=epilogue.maps)

    with k.warpgroups(0, spec.config.consumers, "math") as warpgroup:
        first_column = (warpgroup * spec.warpgroup_columns).named("first_column")
        accumulator = total = Accumulator(spec.mma, spec.warpgroup_rows, spec.warpgroup_columns)
        if spec.promoted:
            total = Accumulator(spec.mma, spec.warpgroup_rows, spec.warpgroup_columns, "total")
        fragments = (SplitFragments if spec.promoted else Fragments)(spec, first_column)
        epilogue.start(warpgroup, 0, first_column)
        with scheduler.each() as tile:
            epilogue.load(tile)
            for sums in dict.fromkeys((accumulator, total)):
                sums.clear()
            fragments.start(mainloop.stage())
            k.comment("mainloop")
            for first, stop, copy in mainloop.spans(tile.k_tiles):
                with k.range(first, stop, name="k_tile"), k.unroll(fragments.parts, name="part") as part:
                    with k.when(part == fragments.parts - 1):
                        mainloop.next_stage()
                    fragments.multiply(accumulator, part, mainloop.stage())
                    for step in range(fragments.steps - 1):
                        with k.when(part == step * (fragments.parts // fragments.steps)):
                            copy(step, fragments.steps - 1)
                    if spec.promoted:
                        with k.when(part == fragments.parts - 1):
                            accumulator.move(total)
            epilogue.store(total, tile)
        mainloop.finish()
        epilogue.finish()


register_design(Design(
    "mma_multistage", mma_multistage, accumulators={1: 160, 2: 192, 4: 64}, takes=frozenset({"splits"}),
    promoted={1: 128, 2: 128, 4: 64}, defaults={"tile": (128, 128, 32), "cluster": (1, 1), "consumers": 2},
    multiplies="mma", architecture="sm_80", side_by_side=True,
))  # fmt: skip
