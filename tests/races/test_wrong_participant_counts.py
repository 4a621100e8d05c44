"""A barrier expects other arrivals than it gets.

Sources: tilelang #2566, where a loop of one iteration hangs: its copy is lowered otherwise, with expect_tx alone, which
is no arrival; QuACK #146, where a named barrier counts two warps, of which three arrive; flashinfer #4732, where warps
that do not wait at a named barrier arrive for the next tile before the others have come for this one: the surplus
arrival completes this phase, and the last one never completes (PTX ISA, "bar / barrier"). In the end warps hang, or go
on before the data is there.
Mended: mbarrier.arrive.expect_tx; the count of the warps that do arrive; two identifiers in turn.
"""

from __future__ import annotations

import pytest
from tests.backends.sim.tiny import kinds, run, word
from tests.conformance.case import barriers, load_shared_word

from gemmsmith import hw
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Value

SEEDS = range(6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("iterations", "arrives"), [(1, True), (1, False), (2, True)])
def test_an_expect_tx_that_nobody_arrives_after(iterations: int, arrives: bool, seed: int) -> None:
    def record(k: Builder, out: Value) -> None:
        box, tile = k.tensor_map("map"), k.shared(512, stages=2, alignment=128, name="tile")
        full = barriers(1, 1)
        for number in range(iterations):
            with k.when(k.thread == 0):
                (hw.mbarrier_arrive_expect_tx if arrives else hw.mbarrier_expect_tx)(full[number], 512)
                hw.tma_load(box, 0, 0, 0, tile[number], full[number], 0)
            hw.mbarrier_wait(full[number], 0)
            load_shared_word(tile[number].address + (k.thread * 4).to(U32))

    done = run(record, seed=seed)
    assert kinds(done) == (set() if arrives else {"deadlock"})
    assert arrives or "1 of 1 arrivals and 0 bytes are missing" in str(done.hazards[0])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("counted", [3, 2, 4])
def test_a_named_barrier_of_three_warps(counted: int, seed: int) -> None:
    """Two warps start their loads, and one waits for both."""

    def record(k: Builder, out: Value) -> None:
        words = k.shared(256, name="words")[0]
        with k.warpgroup(0):
            for warp in range(2):
                with k.warp(warp):
                    hw.store_shared(word(k, k.thread.to(U32)), words.address + (k.thread * 4).to(U32))
                    hw.barrier_arrive(1, 32 * counted)
            with k.warp(2):
                hw.barrier_sync(1, 32 * counted)
                for warp in range(2):
                    load_shared_word(words.address + ((k.lane + 32 * warp) * 4).to(U32))

    reported = [kinds(run(record, seed=seed)), kinds(run(record, seed=0))]
    assert not any(reported) if counted == 3 else all(reported), reported


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("identifiers", [2, 1])
def test_warps_that_arrive_for_the_next_tile(identifiers: int, seed: int) -> None:
    """`free` tells the math warps, which do not wait, only that the tile before the last has been read."""

    def record(k: Builder, out: Value) -> None:
        words = k.shared(256, stages=2, name="tile")
        free = barriers(1, 1)
        with k.warpgroup(0):
            for warp in range(2):
                with k.warp(warp):
                    for tile in range(4):
                        hw.mbarrier_wait(free[tile % 2], (tile // 2 + 1) % 2)
                        hw.store_shared(word(k, k.thread.to(U32)), words[tile % 2].address + (k.thread * 4).to(U32))
                        hw.barrier_arrive(1 + tile % identifiers, 96)
            with k.warp(2):
                for tile in range(4):
                    hw.barrier_sync(1 + tile % identifiers, 96)
                    for warp in range(2):
                        load_shared_word(words[tile % 2].address + ((k.lane + 32 * warp) * 4).to(U32))
                    hw.sync_warp()
                    with k.when(k.lane == 0):
                        hw.mbarrier_arrive(free[tile % 2])

    reported = kinds(run(record, seed=seed))
    assert bool(reported) == (identifiers == 1), reported
