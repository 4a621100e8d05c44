"""A tiny kernel for each kind of hazard that threads run into; what is wrong is at the line that says so."""

from __future__ import annotations

from typing import NamedTuple

from tests.backends.sim.tiny import Record, wait_for_ever, word
from tests.conformance.case import sync_cluster

from gemmsmith import hw
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.core.dtypes import BF16, FP32
from gemmsmith.core.mma import select_mma
from gemmsmith.core.tile import Tile
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import U32, U64
from gemmsmith.lang.values import Value


class Fault(NamedTuple):
    """A kernel and how it is run. `line`: a part of the source line that its hazard is at."""

    record: Record
    line: str
    threads: int = 64
    cluster: int = 1


def made_barrier(k: Builder, arrivals: int = 1) -> SharedView:
    barrier = k.shared(8, alignment=8, name="full")
    with k.when(k.thread == 0):
        hw.mbarrier_init(barrier[0], arrivals)
        hw.fence_mbarrier_init()
    hw.sync_threads()
    return barrier[0]


def neighbors(k: Builder, out: Value) -> None:
    smem = k.shared(256, name="words")
    hw.store_shared(word(k, k.thread.to(U32)), smem[0].address + (k.thread * 4).to(U32))
    hw.load_shared(k.registers(U32, 1, "got"), smem[0].address + ((k.thread ^ 32) * 4).to(U32))


def stored_without_a_fence(k: Builder, out: Value) -> None:
    box, smem = k.tensor_map("map"), k.shared(512, alignment=128, name="tile")
    hw.store_shared(word(k, k.thread.to(U32)), smem[0].address + (k.thread * 4).to(U32))
    hw.sync_threads()
    with k.when(k.thread == 0):
        hw.tma_store(box, 0, 0, 0, smem[0])
        hw.bulk_commit()
        hw.bulk_wait_read(0)


def fresh(k: Builder, out: Value) -> None:
    hw.load_shared(k.registers(U32, 1, "got"), k.shared(128, name="fresh")[0].address)


def two_phases_behind(k: Builder, out: Value) -> None:
    barrier = made_barrier(k)
    with k.when(k.thread == 0):
        hw.mbarrier_arrive(barrier)
        hw.mbarrier_arrive(barrier)
        hw.mbarrier_wait(barrier, 0)


def more_arrivals(k: Builder, out: Value) -> None:
    hw.mbarrier_arrive(made_barrier(k, 48))


def before_its_init(k: Builder, out: Value) -> None:
    hw.mbarrier_arrive(k.shared(8, alignment=8, name="full")[0])


def loaded(k: Builder, out: Value) -> None:
    box, smem = k.tensor_map("map"), k.shared(512, alignment=128, name="tile")
    barrier = made_barrier(k)
    with k.when(k.thread == 0):
        hw.mbarrier_arrive_expect_tx(barrier, 512)
        hw.tma_load(box, 0, 0, 0, smem[0], barrier, 0)


def loaded_by_all(k: Builder, out: Value) -> None:
    box, smem = k.tensor_map("map"), k.shared(512, alignment=128, name="tile")
    barrier = made_barrier(k)
    with k.when(k.thread == 0):
        hw.mbarrier_arrive_expect_tx(barrier, 1024)
    with k.when(k.thread < 2):
        hw.tma_load(box, 0, 0, 0, smem[0], barrier, 0)
    hw.mbarrier_wait(barrier, 0)


def peer_that_may_have_ended(k: Builder, out: Value) -> None:
    barrier = made_barrier(k)
    sync_cluster()
    with k.when(k.thread == 32):
        hw.mbarrier_arrive_remote(barrier, (hw.cluster_rank() ^ 1).to(U32), "cta")


def sums_cleared_early(k: Builder, out: Value) -> None:
    mma = select_mma(BF16, BF16, FP32)
    a, b = (k.shared(Tile(BF16, rows, mma.k, "K"), name=name) for name, rows in (("a", 64), ("b", 16)))
    for tile, words in ((a, 4), (b, 1)):
        for i in range(words):
            hw.store_shared(word(k, k.smem), tile[0].address + (k.thread * 4 + 512 * i).to(U32))
    hw.fence_proxy_async()
    hw.sync_threads()
    sums = Accumulator(mma, 64, 16)
    sums.multiply(a[0], b[0], accumulate=False)
    sums.fragments[0][0] = 0.0
    sums.wait(0)


def store_that_nobody_waits_for(k: Builder, out: Value) -> None:
    box, smem = k.tensor_map("map"), k.shared(512, alignment=128, name="tile")
    step = (k.thread * 4).to(U32)
    hw.store_shared(word(k, k.thread.to(U32)), smem[0].address + step)
    hw.store_shared(word(k, k.thread.to(U32)), smem[0].address + step + 256)
    hw.fence_proxy_async()
    hw.sync_threads()
    with k.when(k.thread == 0):
        hw.tma_store(box, 0, 0, 0, smem[0])
        hw.bulk_commit()


def fewer_by_an_increase(k: Builder, out: Value) -> None:
    with k.warpgroup(0):
        hw.register.SetMaxNReg("inc", 24).issue()


def beyond_the_end(k: Builder, out: Value) -> None:
    hw.store_global(word(k, k.smem), out + 4096, k.thread == 0)


def askew(k: Builder, out: Value) -> None:
    hw.load_global(k.registers(U32, 4, "r"), out + 8, k.thread == 0)


def too_large(k: Builder, out: Value) -> None:
    hw.store_global(word(k, (k.thread + (2**31 - 60)).to(U32)), out + (k.thread * 4).to(U64), True)


def as_often_as_its_lane(k: Builder, out: Value) -> None:
    hw.sync_threads()
    with k.range(k.lane, name="i"):
        hw.sync_warp()


def half_a_warp(k: Builder, out: Value) -> None:
    with k.when(k.lane < 16):
        hw.sync_threads()


FAULTS = {
    "race": Fault(neighbors, "hw.store_shared("),
    "missing proxy fence": Fault(stored_without_a_fence, "hw.tma_store(", 128),
    "uninitialized read": Fault(fresh, "hw.load_shared("),
    "deadlock": Fault(wait_for_ever, "hw.mbarrier_wait("),
    "phase aliasing": Fault(two_phases_behind, "hw.mbarrier_wait("),
    "over-arrival": Fault(more_arrivals, "hw.mbarrier_arrive(made"),
    "barrier": Fault(before_its_init, "hw.mbarrier_arrive("),
    "unconsumed phase": Fault(loaded, "hw.mbarrier_init("),
    "issued by several threads": Fault(loaded_by_all, "hw.tma_load("),
    "access to exited CTA": Fault(peer_that_may_have_ended, "hw.mbarrier_arrive_remote(", cluster=2),
    "wgmma register hazard": Fault(sums_cleared_early, "sums.fragments[0][0] = 0.0", 128),
    "missing wait_group": Fault(store_that_nobody_waits_for, "hw.tma_store("),
    "registers": Fault(fewer_by_an_increase, 'SetMaxNReg("inc"', 128),
    "out of bounds": Fault(beyond_the_end, "out + 4096"),
    "alignment": Fault(askew, "out + 8"),
    "overflow": Fault(too_large, "2**31 - 60"),
    "uniformity": Fault(as_often_as_its_lane, "k.range("),
    "divergence": Fault(half_a_warp, "hw.sync_threads("),
}
