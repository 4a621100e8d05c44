"""mbarriers that are initialized wrongly, and arrivals that may be counted in the phase before."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
from tests.backends.sim.tiny import kinds, run, word

from gemmsmith import hw
from gemmsmith.hw.tma import EVICT_NORMAL
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Value


@pytest.mark.parametrize(
    ("counts", "offset", "message"),
    [
        ((1, 1), 0, "full is initialized twice"),
        ((0,), 0, "full is initialized for 0 arrivals"),
        ((1,), 4, "full: mbarrier address is not a multiple of 8"),
        ((1,), 0, None),
    ],
)
def test_an_mbarrier_is_initialized_once_for_some_arrivals(
    counts: tuple[int, ...], offset: int, message: str | None
) -> None:
    def record(k: Builder, out: Value) -> None:
        barrier = k.shared(16, alignment=8, name="full")
        with k.when(k.thread == 0):
            for count in counts:
                hw.mbarrier_init(barrier[0].at(offset), k.smem * 0 + count)

    done = run(record, threads=32)
    assert [h.message.partition(" [")[0] for h in done.hazards] == ([] if message is None else [message])
    assert kinds(done) == (set() if message is None else {"alignment"} if offset else {"barrier"})


@pytest.mark.parametrize("threads", [1, 32])
def test_one_thread_initializes_an_mbarrier(threads: int) -> None:
    """PTX ISA, "mbarrier.init": the location must not be a valid mbarrier."""

    def record(k: Builder, out: Value) -> None:
        with k.when(k.thread < threads):
            hw.mbarrier_init(k.shared(8, alignment=8, name="full")[0], 1)

    done = run(record, threads=64)
    assert [h.message.partition(" [")[0] for h in done.hazards] == ["full is initialized twice"] * (threads > 1)


def test_an_mbarrier_outside_shared_memory() -> None:
    def record(k: Builder, out: Value) -> None:
        with k.when(k.thread == 0):
            hw.mbarrier_init(k.shared(16, alignment=8, name="full")[0].at(16), 1)

    assert kinds(run(record, threads=32)) == {"out of bounds"}


@pytest.mark.parametrize("meet", [True, False])
@pytest.mark.parametrize("waits", [hw.mbarrier_wait, hw.mbarrier_test_wait])
def test_each_warp_that_waits_knows_of_the_init(waits: Callable[..., Value], meet: bool) -> None:
    def record(k: Builder, out: Value) -> None:
        barrier = k.shared(8, alignment=8, name="full")[0]
        with k.when(k.thread == 0):
            hw.mbarrier_init(barrier, 1)
            hw.mbarrier_arrive(barrier)
        if meet:
            hw.sync_threads()
        waits(barrier, 0)

    assert kinds(run(record)) == (set() if meet else {"barrier"})


@pytest.mark.parametrize("delay", [0, 8, 40])
@pytest.mark.parametrize("ordered", [True, False])
def test_an_arrival_follows_the_phase_before_its_own(ordered: bool, delay: int) -> None:
    """Warp 1 arrives twice: without the wait its second arrival may complete phase 0 before warp 0 has stored."""

    def record(k: Builder, out: Value) -> None:
        words, full, go = k.shared(512, stages=3), *(k.shared(8, alignment=8, name=name) for name in ("full", "go"))
        with k.when(k.thread == 0):
            hw.mbarrier_init(full[0], 2)
            hw.mbarrier_init(go[0], 1)
        hw.sync_threads()
        place = (k.thread % 32 * 4).to(U32)
        with k.warpgroup(0):
            with k.warp(0):
                hw.store_shared(word(k, k.thread.to(U32)), words[0].address + place)
                hw.sync_warp()
                with k.when(k.thread == 0):
                    hw.mbarrier_arrive(full[0])
                    hw.mbarrier_wait(go[0], 0)
                    hw.mbarrier_arrive(full[0])
            with k.warp(1), k.when(k.thread == 32):
                hw.mbarrier_arrive(full[0])
                if ordered:
                    hw.mbarrier_wait(full[0], 0)
                for i in range(delay):
                    hw.store_shared(word(k, k.thread.to(U32)), words[1 + i % 2].address + place)
                hw.mbarrier_arrive(full[0])
            with k.warp(2):
                hw.mbarrier_wait(full[0], 0)
                hw.load_shared(k.registers(U32, 1, "a"), words[0].address + place)
                hw.sync_warp()
                with k.when(k.thread == 64):
                    hw.mbarrier_arrive(go[0])
                hw.mbarrier_wait(full[0], 1)

    done = run(record)
    assert kinds(done) == (set() if ordered else {"barrier"})
    assert all("is not ordered after phase 0 and may be counted in it" in h.message for h in done.hazards)


@pytest.mark.parametrize("ordered", [True, False])
def test_bytes_are_expected_before_a_phase_may_complete(ordered: bool) -> None:
    def record(k: Builder, out: Value) -> None:
        source, tile = k.tensor_map("map"), k.shared(512, alignment=128, name="tile")
        full = k.shared(8, alignment=8, name="full")
        with k.when(k.thread == 0):
            hw.mbarrier_init(full[0], 1)
            hw.fence_mbarrier_init()
        hw.sync_threads()
        with k.when(k.thread == 32):
            hw.grid_dependency_wait()
            hw.mbarrier_expect_tx(full[0], 512)
            hw.tma_load(source, 0, 0, 0, tile[0], full[0], EVICT_NORMAL)
        if ordered:
            hw.sync_threads()
        with k.when(k.thread == 64):
            hw.mbarrier_arrive(full[0])
        hw.mbarrier_wait(full[0], 0)

    done = run(record)
    assert kinds(done) == (set() if ordered else {"barrier"})
    assert ordered or "phase 0 may complete before this expect_tx" in done.hazards[0].message


@pytest.mark.parametrize("waits", [True, False])
def test_a_lane_may_arrive_once_its_warp_has_seen_the_phase(waits: bool) -> None:
    """All lanes arrive, and one of them once more."""

    def record(k: Builder, out: Value) -> None:
        full = k.shared(8, alignment=8, name="full")
        with k.when(k.thread == 0):
            hw.mbarrier_init(full[0], 33)
        hw.sync_warp()
        for phase in range(2):
            for alone in (phase == 1, phase == 0):
                with k.when(k.thread == 5) if alone else nullcontext():
                    hw.mbarrier_arrive(full[0])
            if waits or phase == 1:
                hw.mbarrier_wait(full[0], phase)

    done = run(record, threads=32)
    assert any("is not ordered after phase 0" in h.message for h in done.hazards) != waits
    assert not (waits and done.hazards)
