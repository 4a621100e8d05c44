"""Roles, registers, values, addresses and launches: what executes, and what the hardware would trap or corrupt."""

from __future__ import annotations

import numpy as np
import pytest
from tests.backends.sim.tiny import kernel, kinds, run, word

from gemmsmith import hw
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.backends.sim.execute.counters import Counters
from gemmsmith.core.errors import ArgumentError, KernelError
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import F32, PRED, U32, U64
from gemmsmith.lang.values import Constant, Value, as_value


def store_thread(k: Builder, out: Value) -> None:
    """Each thread that gets here stores its number + 1."""
    hw.store_global(word(k, (k.thread + 1).to(U32)), out + (k.thread * 4).to(U64), True)


def test_warp_roles_execute_wherever_they_stand() -> None:
    """At the top, in a second role of the same warpgroup, and inside a loop."""

    def top(k: Builder, out: Value) -> None:
        with k.warp(1):
            store_thread(k, out)

    def second(k: Builder, out: Value) -> None:
        with k.warpgroup(0):
            hw.sync_warp()
        hw.sync_threads()
        with k.warpgroup(0), k.warp(1):
            store_thread(k, out)

    def inside(k: Builder, out: Value) -> None:
        with k.range(hw.grid_size()), k.warpgroup(0), k.warp(1):
            store_thread(k, out)

    expected = np.where(np.arange(128) // 32 == 1, np.arange(128) + 1, 0)
    for record in (top, second, inside):
        out = np.zeros(1024, np.uint32)
        assert kinds(run(record, out=out)) == set()
        assert np.array_equal(out[:128], expected), record.__name__


@pytest.mark.parametrize("written", ["before", "by an earlier launch", "in part", "by nobody"])
@pytest.mark.parametrize("read", ["load", "atomic"])
def test_scratch_memory_is_written_before_it_is_read(read: str, written: str) -> None:
    """Of two launches, the second reads 128 words."""

    def store_words(k: Builder, out: Value) -> None:
        is_stored = k.thread < 127 if written == "in part" else as_value(written == "by an earlier launch", PRED)
        hw.store_global(word(k, k.thread.to(U32)), out + (k.thread * 4).to(U64), is_stored)

    def read_words(k: Builder, out: Value) -> None:
        if read == "load":
            hw.load_global(k.registers(U32, 1, "got"), out + (k.thread * 4).to(U64), True)
        else:
            hw.red_add_u32(out + (k.thread * 4).to(U64), as_value(1, U32))

    memory = GlobalMemory()
    arguments = {"out": memory.add_buffer(np.zeros(512, np.uint8), "words", uninitialized=written != "before")}
    first, second = (simulate(kernel(x, 128), 1, arguments, memory) for x in (store_words, read_words))
    assert not first.hazards
    found = {"uninitialized read"} if written in ("in part", "by nobody") else set()
    assert kinds(second) == found


@pytest.mark.parametrize("type", [U32, F32])
@pytest.mark.parametrize("written", [True, False])
def test_registers_are_written_before_they_are_read(type, written: bool) -> None:
    def operand(k: Builder, out: Value) -> None:
        r = k.registers(type, 1, "r")
        if written:
            r[0] = 0
        hw.store_global(r, out + (k.thread * 4).to(U64), True)

    def element(k: Builder, out: Value) -> None:
        r = k.registers(type, 2, "r")
        r[1] = 0
        copy = k.registers(type, 1, "copy")
        copy[0] = r[1 if written else 0]

    for record in (operand, element):
        result = run(record)
        assert kinds(result) == (set() if written else {"uninitialized read"})
        assert written or "register r" in str(result.hazards[0])


def test_registers_that_inactive_threads_leave_are_no_mistake() -> None:
    def record(k: Builder, out: Value) -> None:
        r = k.registers(U32, 1, "r")
        with k.when(k.thread < 8):
            r[0] = k.thread.to(U32)
            hw.store_global(r, out + (k.thread * 4).to(U64), True)

    assert kinds(run(record)) == set()


def test_overflow_of_one_thread() -> None:
    def record(k: Builder, out: Value, limit: int) -> None:
        with k.when(k.thread < limit):
            hw.store_global(word(k, (k.thread + (2**31 - 64)).to(U32)), out + (k.thread * 4).to(U64), True)

    assert kinds(run(lambda k, out: record(k, out, 64))) == set()
    result = run(lambda k, out: record(k, out, 65))
    assert kinds(result) == {"overflow"}
    assert "+: 2147483648 overflows i32" in str(result.hazards[0])


def test_min_and_max_take_the_number_where_the_other_is_nan() -> None:
    """As CUDA's min(float, float) does."""
    out = np.full(1024, np.nan, np.float32)

    def record(k: Builder, address: Value) -> None:
        r = k.registers(F32, 2, "r")
        hw.load_global(r, address + (k.thread * 8).to(U64), True)
        r[0], r[1] = k.minimum(r[0], 3.0), k.maximum(r[1], 4.0)
        hw.store_global(r, address + (k.thread * 8).to(U64), True)

    assert kinds(run(record, out=out)) == set()
    assert np.array_equal(out[:256].reshape(128, 2), np.tile(np.float32([3, 4]), (128, 1)))


@pytest.mark.parametrize(("offset", "found"), [(16, set()), (8, {"alignment"})])
def test_accesses_are_aligned_to_their_width(offset: int, found: set[str]) -> None:
    def global_load(k: Builder, out: Value) -> None:
        hw.load_global(k.registers(U32, 4, "r"), out + offset, k.thread == 0)

    def shared_store(k: Builder, out: Value) -> None:
        r = k.registers(U32, 4, "r")
        for i in range(4):
            r[i] = k.smem
        with k.when(k.thread == 0):
            hw.store_shared(r, k.shared(64, name="s")[0].address + offset)

    def copy(k: Builder, out: Value) -> None:
        with k.when(k.thread == 0):
            hw.cp_async_copy(k.shared(64, name="s")[0].address, out + offset, 16, 16)
            hw.cp_async_commit()
            hw.cp_async_wait(0)

    for record in (global_load, shared_store, copy):
        assert kinds(run(record)) == found, record.__name__


def test_a_missing_argument_a_ragged_cluster_and_one_that_is_not_along_x() -> None:
    def nothing(k: Builder, out: Value) -> None:
        hw.sync_threads()

    with pytest.raises(ArgumentError, match="out missing"):
        simulate(kernel(nothing, 64), 1, {}, GlobalMemory())
    with pytest.raises(ArgumentError, match="grid: got 3 CTAs; use a multiple of the cluster's 2"):
        simulate(kernel(nothing, 64, cluster=2), 3, {"out": 0}, GlobalMemory())
    with Builder("k", threads=64, cluster=(1, 2, 1)) as k:
        hw.sync_threads()
        turned = k.finish()
    with pytest.raises(KernelError, match="along x only"):
        simulate(turned, 2, {}, GlobalMemory())


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("by_thread", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_warps_of_a_warpgroup_may_wait_for_one_another(arrives: bool, by_thread: bool, seed: int) -> None:
    """Without roles they execute in lockstep until one holds up another; what they have stored is not stored twice."""

    def record(k: Builder, out: Value) -> None:
        go, warp = k.shared(8, stages=3, alignment=8, name="go"), k.thread // 32 if by_thread else k.warp_index
        with k.when(k.thread == 0):
            for stage in range(3):
                hw.mbarrier_init(go[stage], 32)
        hw.sync_threads()
        hw.red_add_u32(out, Constant(U32, 1))
        for i in range(4):  # from the last to the first
            with k.when(warp == i):
                if i < 3:
                    hw.mbarrier_wait(go[i], 0)
                hw.red_add_u32(out, Constant(U32, 1))
                if i > (0 if arrives else 1):
                    hw.mbarrier_arrive(go[i - 1])

    found, counters = np.zeros(1024, np.uint32), Counters()
    done = run(record, out=found, seed=seed, counters=counters)
    assert kinds(done) == (set() if arrives else {"deadlock"})
    if arrives:
        assert found[0] == 256
        (executed,) = counters.kernels
        assert sum(count.instructions for count in counters.lines(executed)) == 8
