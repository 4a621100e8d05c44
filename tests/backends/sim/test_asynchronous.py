"""Who learns what from waiting: bulk groups and cp.async bind the thread that issued them, not its neighbors."""

from __future__ import annotations

import numpy as np
import pytest
from tests.backends.sim.tiny import kinds, run, word
from tests.instructions import bulk_wait

from gemmsmith import hw
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import U32, U64
from gemmsmith.lang.values import Constant, Value


def own_word(k: Builder, smem: SharedView) -> Value:
    return smem.address + (k.thread * 4).to(U32)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("everybody_waits", [True, False])
@pytest.mark.parametrize("barrier", [True, False])
def test_a_bulk_wait_binds_only_the_thread_that_stored(everybody_waits: bool, barrier: bool, seed: int) -> None:
    def record(k: Builder, out: Value) -> None:
        box = k.tensor_map("map")
        smem = k.shared(512, alignment=128, name="tile")
        hw.store_shared(word(k, k.thread.to(U32)), own_word(k, smem[0]))
        hw.fence_proxy_async()
        hw.sync_threads()
        with k.when(k.thread == 0):
            hw.tma_store(box, 0, 0, 0, smem[0])
            hw.bulk_commit()
        with k.when((k.thread == 0) | everybody_waits):
            hw.bulk_wait_read(0)
        if barrier:
            hw.sync_threads()
        hw.store_shared(word(k, k.thread.to(U32)), own_word(k, smem[0]))

    result = run(record, seed=seed)
    assert kinds(result) == (set() if barrier else {"race"})
    assert barrier or "write after read of tile" in str(result.hazards[0])


@pytest.mark.parametrize("read_only", [True, False])
def test_read_is_no_visibility(read_only: bool) -> None:
    """After wait_group.read the source is free, but the result may not be there yet."""

    def record(k: Builder, out: Value) -> None:
        box = k.tensor_map("map")
        smem = k.shared(512, alignment=128, name="tile")
        hw.store_shared(word(k, k.thread.to(U32)), own_word(k, smem[0]))
        hw.fence_proxy_async()
        hw.sync_threads()
        with k.when(k.thread == 0):
            hw.tma_store(box, 0, 0, 0, smem[0])
            hw.bulk_commit()
            (hw.bulk_wait_read if read_only else bulk_wait)(0)
        hw.sync_threads()
        hw.load_global(k.registers(U32, 1, "got"), out + (k.thread * 4).to(U64), True)

    assert kinds(run(record)) == ({"race"} if read_only else set())


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("barrier", [True, False])
@pytest.mark.parametrize("apart", [0, 1, 32])
def test_cp_async_is_known_to_the_lane_that_copied(wait: bool, barrier: bool, apart: int) -> None:
    """Once it has waited; to others, of its warp too, behind a barrier as well."""

    def record(k: Builder, out: Value) -> None:
        smem = k.shared(2048, name="tile")
        step = (k.thread * 16).to(U32)
        hw.cp_async_copy(smem[0].address + step, out + step.to(U64), 16, 16)
        hw.cp_async_commit()
        if wait:
            hw.cp_async_wait(0)
        if barrier:
            hw.sync_threads()
        thread = k.thread ^ apart
        hw.load_shared(k.registers(U32, 1, "got"), smem[0].address + (thread * 16).to(U32))
        hw.cp_async_wait(0)

    assert kinds(run(record)) == (set() if wait and (barrier or not apart) else {"race"})


@pytest.mark.parametrize("what", [
    "source of cp.async", "destination of cp.async", "row of ldmatrix", "load of 16 bytes", "store of 8 bytes",
])  # fmt: skip
@pytest.mark.parametrize("offset", [0, 4, 16])
def test_misaligned_rows_and_pointers(what: str, offset: int) -> None:
    """One lane's alone is enough."""

    def record(k: Builder, out: Value) -> None:
        smem = k.shared(4096, alignment=16, name="tile")[0].address
        hw.store_shared(word(k, k.thread.to(U32)), smem + (k.thread * 4).to(U32))
        hw.sync_threads()
        step = (k.thread % 32 * 16).to(U32) + k.select(k.thread == 5, Constant(U32, offset), 0)
        four, two = k.registers(U32, 4, "four"), k.registers(U32, 2, "two")
        if what == "source of cp.async":
            hw.cp_async_copy(smem + 2048 + (k.thread * 16).to(U32), out + step.to(U64), 16, 16)
        elif what == "destination of cp.async":
            with k.when(k.thread < 32):
                hw.cp_async_copy(smem + 2048 + step, out, 16, 16)
        elif what == "row of ldmatrix":
            with k.when(k.warp_index == 0):
                hw.load_matrix(four, smem + step)
        elif what == "load of 16 bytes":
            hw.load_global(four, out + step.to(U64), True)
        else:
            two[0], two[1] = 0, 0
            with k.when(k.thread == 5):
                hw.store_global(two, out + step.to(U64), True)
        hw.cp_async_commit()
        hw.cp_async_wait(0)

    assert kinds(run(record)) - {"race", "uninitialized read"} == ({"alignment"} if offset == 4 else set())


@pytest.mark.parametrize(("wait", "fence"), [(True, True), (True, False), (False, True)])
def test_cp_async_needs_the_proxy_fence_before_tma_reads(wait: bool, fence: bool) -> None:
    def record(k: Builder, out: Value) -> None:
        box = k.tensor_map("map")
        smem = k.shared(512, alignment=128, name="tile")
        step = (k.thread * 4).to(U32)
        hw.cp_async_copy(smem[0].address + step, out + (step + 2048).to(U64), 4, 4)
        hw.cp_async_commit()
        if wait:
            hw.cp_async_wait(0)
        if fence:
            hw.fence_proxy_async()
        hw.sync_threads()
        with k.when(k.thread == 0):
            hw.tma_store(box, 0, 0, 0, smem[0])
            hw.bulk_commit()
            hw.bulk_wait_read(0)

    found = kinds(run(record))
    if wait:
        assert found == (set() if fence else {"missing proxy fence"})
    else:
        assert "race" in found


@pytest.mark.parametrize("arrival", ["after copies", "without waiting", "of other threads"])
def test_an_arrival_after_copies_makes_them_known(arrival: str) -> None:
    def record(k: Builder, out: Value) -> None:
        smem, full = k.shared(512, name="tile"), k.shared(8, alignment=8, name="full")
        with k.when(k.thread == 0):
            hw.mbarrier_init(full[0], 64 if arrival == "of other threads" else 128)
        hw.sync_threads()
        step = (k.thread * 4).to(U32)
        hw.cp_async_copy(smem[0].address + step, out + step.to(U64), 4, 4)
        if arrival == "of other threads":
            with k.when(k.thread < 64):
                hw.cp_async_arrive(full[0])
        else:
            (hw.mbarrier_arrive if arrival == "without waiting" else hw.cp_async_arrive)(full[0])
        hw.mbarrier_wait(full[0], 0)
        hw.load_shared(k.registers(U32, 1, "got"), smem[0].address + ((k.thread ^ 96) * 4).to(U32))

    found = kinds(run(record))
    assert found == set() if arrival == "after copies" else "race" in found


def test_some_groups_may_stay_open() -> None:
    """With one group pending, the first copy is known and the second is not."""

    def record(k: Builder, out: Value, slot: int) -> None:
        smem = k.shared(512, stages=2, name="tile")
        step = (k.thread * 4).to(U32)
        for i in range(2):
            hw.cp_async_copy(smem[i].address + step, out + step.to(U64), 4, 4)
            hw.cp_async_commit()
        hw.cp_async_wait(1)
        hw.load_shared(k.registers(U32, 1, "got"), smem[slot].address + step)
        hw.cp_async_wait(0)

    assert kinds(run(lambda k, out: record(k, out, 0))) == set()
    assert kinds(run(lambda k, out: record(k, out, 1))) == {"race"}


def test_a_copy_on_a_barrier_nobody_initialized_names_its_own_line() -> None:
    def record(k: Builder, out: Value) -> None:
        box = k.tensor_map("map")
        smem = k.shared(512, alignment=128, name="tile")
        barrier = k.shared(8, alignment=8, name="full")
        with k.when(k.thread == 0):
            hw.tma_load(box, 0, 0, 0, smem[0], barrier[0], 0)  # the line
        hw.sync_threads()

    (hazard,) = run(record).hazards
    assert hazard.kind == "barrier"
    assert "full is used but was never initialized" in hazard.message
    with open(__file__) as file:
        line = next(i for i, text in enumerate(file, 1) if text.rstrip().endswith("# the line"))
    assert hazard.location.line == line


@pytest.mark.parametrize("waits", [True, False])
def test_data_nobody_waits_for(waits: bool) -> None:
    def record(k: Builder, out: Value) -> None:
        box = k.tensor_map("map")
        smem = k.shared(512, alignment=128, name="tile")
        barrier = k.shared(8, alignment=8, name="full")
        with k.when(k.thread == 0):
            hw.mbarrier_init(barrier[0], 1)
            hw.fence_mbarrier_init()
        hw.sync_threads()
        with k.when(k.thread == 0):
            hw.mbarrier_arrive_expect_tx(barrier[0], 512)
            hw.tma_load(box, 0, 0, 0, smem[0], barrier[0], 0)
        if waits:
            hw.mbarrier_wait(barrier[0], 0)
            hw.load_shared(k.registers(U32, 1, "got"), own_word(k, smem[0]))

    result = run(record)
    assert kinds(result) == (set() if waits else {"unconsumed phase", "access to exited CTA"})
    assert all(h.location.file == __file__ for h in result.hazards)


def test_the_bytes_arrive() -> None:
    out = np.arange(1024, dtype=np.uint32)

    def record(k: Builder, address: Value) -> None:
        smem = k.shared(2048, name="tile")
        step = (k.thread * 16).to(U32)
        hw.cp_async_copy(smem[0].address + step, address + step.to(U64), (k.thread % 2 * 16).to(U32), 16)
        hw.cp_async_commit()
        hw.cp_async_wait(0)
        got = k.registers(U32, 4, "got")
        hw.load_shared(got, smem[0].address + step)
        hw.store_global(got, address + (step + 2048).to(U64), True)

    assert kinds(run(record, out=out, seed=3)) == set()
    expected = np.arange(512, dtype=np.uint32).reshape(128, 4)
    expected[::2] = 0
    assert np.array_equal(out[512:].reshape(128, 4), expected)
