"""Each kind of hazard on a tiny kernel, beside the same kernel without the mistake. Whole designs: see mutants."""

from __future__ import annotations

import pytest
from tests.backends.sim.tiny import kinds, recorded, run, word

from gemmsmith import hw
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32, U64
from gemmsmith.lang.values import Value


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_warps_that_share_without_a_barrier(ordered: bool, seed: int) -> None:
    def record(k: Builder, out: Value) -> None:
        smem = k.shared(256, name="shared")
        hw.store_shared(word(k, k.thread.to(U32)), smem[0].address + (k.thread * 4).to(U32))
        if ordered:
            hw.sync_threads()
        got = k.registers(U32, 1, "got")
        hw.load_shared(got, smem[0].address + ((k.thread ^ 32) * 4).to(U32))

    result = run(record, threads=64, seed=seed)
    assert bool(kinds(result) & {"race", "uninitialized read"}) != ordered
    if not ordered:
        assert "shared" in str(result.hazards[0])
        assert "test_hazards.py" in str(result.hazards[0])


@pytest.mark.parametrize("ordered", [True, False])
def test_lanes_of_a_warp_need_syncwarp(ordered: bool) -> None:
    def record(k: Builder, out: Value) -> None:
        smem = k.shared(128, name="shared")
        with k.when(k.lane == 0):
            hw.store_shared(word(k, k.smem), smem[0].address)
        if ordered:
            hw.sync_warp()
        hw.load_shared(k.registers(U32, 1, "got"), smem[0].address)

    assert kinds(run(record, threads=32)) == (set() if ordered else {"race"})


def test_memory_read_before_it_is_written() -> None:
    def record(k: Builder, out: Value) -> None:
        hw.load_shared(k.registers(U32, 1, "got"), k.shared(128, name="fresh")[0].address)

    assert kinds(run(record, threads=64)) == {"uninitialized read"}


def test_out_of_bounds_global_and_shared() -> None:
    def record(k: Builder, out: Value) -> None:
        hw.store_global(word(k, k.smem), out + 4094, k.thread == 0)
        hw.store_shared(word(k, k.smem), k.shared(64, name="s")[0].address + 62)

    result = run(record, threads=64)
    assert kinds(result) >= {"out of bounds"}
    assert len(result.hazards) >= 2


def test_a_deadlock_says_who_waits_for_what() -> None:
    def record(k: Builder, out: Value) -> None:
        barrier = k.shared(8, alignment=8, name="full")
        with k.when(k.thread == 0):
            hw.mbarrier_init(barrier[0], 2)
            hw.fence_mbarrier_init()
        hw.sync_threads()
        with k.when(k.thread == 0):
            hw.mbarrier_arrive_expect_tx(barrier[0], 64)
        hw.mbarrier_wait(barrier[0], 0)

    result = run(record, threads=64)
    assert kinds(result) == {"deadlock"}
    assert "waits for full phase 0 (parity 0): 1 of 2 arrivals and 64 bytes are missing" in str(result.hazards[0])


def test_a_barrier_used_before_its_init_and_more_arrivals_than_it_takes() -> None:
    def early(k: Builder, out: Value) -> None:
        hw.mbarrier_arrive(k.shared(8, alignment=8, name="b")[0])

    def many(k: Builder, out: Value) -> None:
        barrier = k.shared(8, alignment=8, name="b")
        with k.when(k.thread == 0):
            hw.mbarrier_init(barrier[0], 48)
        hw.sync_threads()
        hw.mbarrier_arrive(barrier[0])

    assert kinds(run(early, threads=64)) == {"barrier"}
    assert kinds(run(many, threads=64)) == {"over-arrival"}


def test_a_parity_two_phases_behind() -> None:
    def record(k: Builder, out: Value) -> None:
        barrier = k.shared(8, alignment=8, name="b")
        with k.when(k.thread == 0):
            hw.mbarrier_init(barrier[0], 1)
            hw.mbarrier_arrive(barrier[0])
            hw.mbarrier_arrive(barrier[0])
            hw.mbarrier_wait(barrier[0], 0)

    assert "phase aliasing" in kinds(run(record, threads=32))


@pytest.mark.parametrize("ready", [True, False])
def test_the_register_pool(ready: bool) -> None:
    """More registers are to be had only once others are given back; here perhaps only after a barrier."""
    with Builder("k", threads=512) as k:
        with k.warpgroup(0):
            if not ready:
                hw.barrier_sync(1, 256)
            hw.set_registers(24)
            if ready:
                hw.barrier_sync(1, 256)
        with k.warpgroup(1):
            hw.set_registers(232)
            hw.barrier_sync(1, 256)
        kernel = k.finish()
    result = simulate(kernel, 1, {}, GlobalMemory())
    assert kinds(result) == (set() if ready else {"deadlock"})
    assert ready or "104 more registers per thread" in str(result.hazards[0])


def test_loops_are_uniform() -> None:
    def record(k: Builder, out: Value) -> None:
        with k.range(k.lane, name="i"):
            hw.sync_warp()

    assert kinds(run(record, threads=64)) == {"uniformity"}


def test_overflow() -> None:
    def record(k: Builder, out: Value) -> None:
        hw.store_global(word(k, ((hw.grid_size() + 2**30) * 2).to(U32)), out + (k.thread * 4).to(U64), True)

    assert kinds(run(record, threads=64)) == {"overflow"}


def test_the_same_seed_gives_the_same_schedule() -> None:
    def record(k: Builder, out: Value) -> None:
        hw.sync_threads()
        hw.store_global(word(k, k.thread.to(U32)), out + (k.thread * 4).to(U64), True)

    first, second = (recorded(record, threads=256, seed=5) for _ in range(2))
    assert first.events == second.events
