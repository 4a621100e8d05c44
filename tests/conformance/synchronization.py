"""Whatever orders threads: mbarriers, named and cluster barriers, distributed memory, atomics, pipelines."""

from __future__ import annotations

from itertools import product

import numpy as np
from tests.conformance.case import (
    Case,
    Map,
    at,
    barriers,
    integers,
    load_shared_word,
    poisoned,
    read_word,
    slot,
    sync_cluster,
    words,
    write,
)
from tests.instructions import load_cluster, load_strong, store_cluster
from tests.pipelines import PipelineAsync

from gemmsmith import hw
from gemmsmith.collective.pipeline import (
    Peers,
    PipelineTmaAsync,
    init_barriers,
)
from gemmsmith.core.dtypes import FP32
from gemmsmith.hw.tma import EVICT_NORMAL
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.shared import SharedBuffer, SharedView
from gemmsmith.lang.types import F32, U32, U64
from gemmsmith.lang.values import Constant, Value

CASES: list[Case] = []
THREAD = np.arange(128, dtype=np.uint32)


def put(k: Builder, view: SharedView, value: Value) -> None:
    """Each thread's own word of shared memory."""
    hw.store_shared(words(value), slot(view, k.thread % 128, 4))


def taken(k: Builder, view: SharedView) -> Value:
    """The word of the thread opposite."""
    return load_shared_word(slot(view, 127 - k.thread % 128, 4))


# -- mbarriers -------------------------------------------------------------------------------------------
def arrive(k: Builder) -> None:
    """All threads arrive on one barrier, phase after phase, and then read what others wrote."""
    out, buffer = k.pointer("out"), k.shared(512)
    (barrier,) = barriers(128)
    for phase in range(3):
        put(k, buffer[0], (k.thread * 3 + 1000 * phase).to(U32))
        hw.mbarrier_arrive(barrier)
        hw.mbarrier_wait(barrier, phase % 2)
        write(out, k.thread + 128 * phase, taken(k, buffer[0]))
        hw.sync_threads()


def test_wait(k: Builder) -> None:
    """Tests of a fresh barrier, of one in the middle of a phase, and of a complete one, for both parities."""
    out = k.pointer("out")
    (barrier,) = barriers(2)
    for row in range(4):
        if row in (1, 2):  # the first of two arrivals, then the second
            with k.when(k.thread == 0):
                hw.mbarrier_arrive(barrier)
            hw.sync_threads()
        parities = (1, 0) if row < 2 else (0, 1)
        seen = [hw.mbarrier_test_wait(barrier, parity) for parity in parities]
        one = k.lane.to(U32) * 0 + 1
        flags = [k.select(x, one, one - 1) for x in seen]
        with k.when(k.thread == 0):
            write(out, k.thread + row, *flags)
        hw.sync_threads()


def expect_tx(k: Builder) -> None:
    """Bytes expected without an arrival, of two copies, with one arrival by another thread."""
    out, source, buffer = k.pointer("out"), k.tensor_map("source"), k.shared(512, stages=2, alignment=128)
    (barrier,) = barriers(1)
    with k.when(k.thread == 32):
        hw.mbarrier_expect_tx(barrier, 512)
        hw.tma_load(source, 0, 0, 0, buffer[0], barrier, EVICT_NORMAL)
        hw.mbarrier_expect_tx(barrier, 512)
        hw.tma_load(source, 0, 1, 0, buffer[1], barrier, EVICT_NORMAL)
    hw.sync_threads()
    with k.when(k.thread == 64):
        hw.mbarrier_arrive(barrier)
    hw.mbarrier_wait(barrier, 0)
    for i in range(2):
        write(out, k.thread + 128 * i, taken(k, buffer[i]))


def arrive_expect_tx(k: Builder) -> None:
    """Two turns of one barrier: the same slot is loaded again once all have read it."""
    out, source, buffer = k.pointer("out"), k.tensor_map("source"), k.shared(512, alignment=128)
    (barrier,) = barriers(1)
    for turn in range(2):
        with k.when(k.thread == 0):
            hw.mbarrier_arrive_expect_tx(barrier, 512)
            hw.tma_load(source, 0, turn, 0, buffer[0], barrier, EVICT_NORMAL)
        hw.mbarrier_wait(barrier, turn)
        write(out, k.thread + 128 * turn, taken(k, buffer[0]))
        hw.fence_proxy_async()
        hw.sync_threads()


def remote_arrive(k: Builder) -> None:
    """Lane r of each CTA arrives on CTA r's barriers, in turn on two.

    With one, a CTA that has seen its own phase could arrive for the next on a peer that the others have yet to reach.
    """
    out, size = k.pointer("out"), k.cluster[0]
    pair = barriers(size, size)
    for turn in range(4):
        barrier = pair[turn % 2]
        with k.when(k.thread < size):
            hw.mbarrier_arrive_remote(barrier, k.lane.to(U32), "cluster")
        hw.mbarrier_wait(barrier, turn // 2)
        hw.sync_threads()  # all have seen this phase before the next may complete
    write(out, hw.block_index() * 128 + k.thread, (k.thread + hw.cluster_rank()).to(U32))
    sync_cluster()


_rows = integers("rows", (2, 128), np.float32, 1000)
_opposite = np.ascontiguousarray(_rows[:, ::-1]).view(np.uint32)
_load = {"inputs": {"x": _rows}, "maps": {"source": Map("x", FP32, (128, 2, 1), (128, 0), (128, 1, 1), 0)}}
CASES += [
    Case("mbarrier_arrive", arrive, np.stack([THREAD[::-1] * 3 + 1000 * p for p in range(3)])),
    Case("mbarrier_test_wait", test_wait, np.array([[1, 0], [1, 0], [1, 0], [1, 0]], np.uint32)),
    Case("mbarrier_expect_tx", expect_tx, _opposite, **_load),
    Case("mbarrier_arrive_expect_tx", arrive_expect_tx, _opposite, **_load),
]
CASES += [
    Case(f"mbarrier_arrive_cluster{size}", remote_arrive,
         np.stack([THREAD + block % size for block in range(2 * size)]), cluster=size, grid=2 * size)
    for size in (2, 4)
]  # fmt: skip


# -- named barriers, warps, register budgets -------------------------------------------------------------
def named_barrier(k: Builder) -> None:
    """One warpgroup arrives without waiting, another waits for it; then each synchronizes on a barrier of its own."""
    out, buffer = k.pointer("out"), k.shared(512, stages=3)
    with k.warpgroup(0):
        put(k, buffer[0], (k.thread * 5).to(U32))
        hw.barrier_arrive(1, 256)
    with k.warpgroup(1):
        hw.barrier_sync(1, 256)
        write(out, k.thread - 128, taken(k, buffer[0]))
    hw.sync_threads()
    with k.warpgroups(0, 2) as warpgroup:
        put(k, buffer[warpgroup + 1], (k.thread * 7).to(U32))
        hw.barrier_sync(warpgroup + 2, 128)
        write(out, k.thread + 128, taken(k, buffer[warpgroup + 1]))


def register_budget(producer: int, consumer: int) -> Case:
    """One warpgroup gives registers back, two ask for them: all go on, and keep what they held."""

    def record(k: Builder) -> None:
        out, x = k.pointer("out"), k.pointer("x")
        word = read_word(x, k.thread)
        with k.warpgroup(0):
            hw.set_registers(producer)
            write(out, k.thread, word + 1)
        with k.warpgroups(1, 3):
            hw.set_registers(consumer)
            write(out, k.thread, word + 2)

    x = integers("budget", (384,))
    expected = x + np.where(np.arange(384) < 128, 1, 2).astype(np.uint32)
    return Case(f"setmaxnreg_{producer}_{consumer}", record, expected, {"x": x}, threads=384)


def elect(k: Builder) -> None:
    """One lane of each warp, whichever, adds one; then the elected lane of one warp does."""
    out = k.pointer("out")
    with k.when(hw.elect_one()):
        hw.atom_add_u32(at(out, k.warp_index, 4), 1)
    with k.warpgroup(0), k.warp(2), k.when(hw.elect_one()):
        hw.atom_add_u32(out + 16, 2)


def grid_dependency(k: Builder) -> None:
    """Without a kernel before it the wait ends at once."""
    out = k.pointer("out")
    hw.launch_dependent_grids()
    hw.grid_dependency_wait()
    write(out, hw.block_index() * 128 + k.thread, k.thread.to(U32))


_named = np.concatenate([THREAD[::-1] * 5, THREAD[::-1] * 7, (THREAD[::-1] + 128) * 7]).astype(np.uint32)
_poison = poisoned((5,), np.uint32)
CASES += [
    Case("named_barriers", named_barrier, _named, threads=256),
    register_budget(40, 232),
    register_budget(24, 240),
    Case("elect_one", elect, _poison + np.array([1, 1, 1, 1, 2], np.uint32)),
    Case("griddepcontrol", grid_dependency, np.tile(THREAD, 2), grid=2),
]


# -- clusters ----------------------------------------------------------------------------------------------
def where(k: Builder) -> None:
    out = k.pointer("out")
    numbers = [x.to(U32) for x in (hw.cluster_rank(), hw.block_index(), hw.grid_size(), k.thread, k.lane)]
    write(out, hw.block_index() * k.threads + k.thread, *numbers, k.warp_index.to(U32), k.warpgroup_index.to(U32))


def places(threads: int, cluster: int, grid: int) -> Case:
    block, thread = (x.reshape(-1) for x in np.mgrid[:grid, :threads])
    columns = [block % cluster, block, block * 0 + grid, thread, thread % 32, thread // 32, thread // 128]
    expected = np.stack(columns, 1).astype(np.uint32)
    return Case(f"places_{threads}_cluster{cluster}", where, expected, threads=threads, cluster=cluster, grid=grid)


def cluster_memory(count: int, size: int) -> Case:
    """Each CTA reads its right neighbor's shared memory, and writes into its left one's."""
    x = integers(f"cluster{count}{size}", (size, 128, count))

    def record(k: Builder) -> None:
        out, source, buffer = k.pointer("out"), k.pointer("x"), k.shared(512 * count, stages=2)
        rank = hw.cluster_rank()
        right, left = ((rank + step) % size for step in (1, size - 1))
        values, near, far = (k.registers(U32, count, name) for name in ("values", "near", "far"))
        hw.load_global(values, at(source, rank * 128 + k.thread, 4 * count), True)
        hw.store_shared(values, slot(buffer[0], k.thread, 4 * count))
        sync_cluster()
        load_cluster(far, hw.mapa(slot(buffer[0], k.thread ^ 9, 4 * count), right.to(U32)))
        store_cluster(far, hw.mapa(slot(buffer[1], k.thread ^ 6, 4 * count), left.to(U32)))
        sync_cluster()
        hw.load_shared(near, slot(buffer[1], k.thread, 4 * count))
        hw.store_global(near, at(out, rank * 128 + k.thread, 4 * count), True)

    # What a CTA finds was sent by its right neighbor, who took it from the one beyond.
    expected = np.roll(x, -2, 0)[:, np.arange(128) ^ 6 ^ 9]
    return Case(f"cluster_memory_{4 * count}_bytes_cluster{size}", record, expected, {"x": x}, cluster=size, grid=size)


def stored_asynchronously(count: int, size: int) -> Case:
    """Each CTA's bytes complete on a barrier of its left neighbor, which reads them."""
    x = integers(f"stored_asynchronously{count}{size}", (size, 128, count))

    def record(k: Builder) -> None:
        out, source, buffer = k.pointer("out"), k.pointer("x"), k.shared(512 * count)
        full = k.shared(8, alignment=8, name="full")
        rank = hw.cluster_rank()
        left = ((rank + size - 1) % size).to(U32)
        with k.when(k.thread == 0):
            hw.mbarrier_init(full[0], 1)
            hw.fence_mbarrier_init()
            hw.mbarrier_arrive_expect_tx(full[0], 512 * count)
        sync_cluster()
        values, near = k.registers(U32, count, "values"), k.registers(U32, count, "near")
        hw.load_global(values, at(source, rank * 128 + k.thread, 4 * count), True)
        there = hw.mapa(slot(buffer[0], k.thread ^ 5, 4 * count), left)
        hw.store_async(values, there, hw.mapa(full[0], left))
        hw.mbarrier_wait(full[0], 0, "cluster")
        hw.load_shared(near, slot(buffer[0], k.thread, 4 * count))
        hw.store_global(near, at(out, rank * 128 + k.thread, 4 * count), True)
        sync_cluster()

    expected = np.roll(x, -1, 0)[:, np.arange(128) ^ 5]
    return Case(f"stored_asynchronously_{4 * count}_bytes_cluster{size}", record, expected, {"x": x},
                cluster=size, grid=size)  # fmt: skip


CASES += [stored_asynchronously(*how) for how in product((1, 2, 4), (2, 4))]
CASES += [places(*how) for how in ((32, 1, 3), (96, 2, 4), (384, 1, 2), (256, 4, 8))]
CASES += [cluster_memory(*how) for how in product((1, 2, 4), (2, 4))]


# -- atomics, acquire and release ---------------------------------------------------------------------------
def atomic(k: Builder) -> None:
    """All threads of all CTAs add to four words; a word of one's own gives what was there."""
    out = k.pointer("out")
    hw.atom_add_u32(at(out, k.thread % 4, 4), (k.thread + hw.block_index() * 1000).to(U32))
    mine = hw.block_index() * 128 + k.thread + 4
    old = hw.atom_add_u32(at(out, mine, 4), k.thread.to(U32))
    again = hw.atom_add_u32(at(out, mine, 4), 5)
    write(out, mine + 256, again - old)


def reduce(k: Builder) -> None:
    out, x = k.pointer("out"), k.pointer("x")
    value = k.registers(F32, 1, "value")
    hw.load_global(value, at(x, hw.block_index() * 128 + k.thread, 4), True)
    hw.red_add_f32(at(out, k.thread % 8, 4), value[0])


def count(k: Builder) -> None:
    """Both CTAs' threads add their numbers to eight words."""
    out = k.pointer("out")
    hw.red_add_u32(at(out, k.thread % 8, 4), (k.thread + hw.block_index()).to(U32))


def release(k: Builder) -> None:
    """One warpgroup's threads each write data and release a flag; after a barrier another's acquire and read them."""
    out = k.pointer("out")
    with k.when(k.thread < 128):
        write(out, k.thread, (k.thread * 11).to(U32))
        hw.fence_acq_rel()
        hw.store_strong(at(out, k.thread + 128, 4), (k.thread + 77).to(U32), "release", "gpu")
    hw.sync_threads()
    with k.when(k.thread >= 128):
        other = 255 - k.thread
        flag = load_strong(at(out, other + 128, 4), "acquire", "gpu")
        write(out, k.thread + 128, flag + read_word(out, other))


def wait(k: Builder) -> None:
    """CTA 1 writes data and raises a flag, for which a thread of CTA 0 waits; CTA 0 lowers it and reads them."""
    out = k.pointer("out")
    with k.when(hw.block_index() == 1):
        write(out, k.thread, (k.thread * 11).to(U32))
        hw.sync_threads()
        with k.when(k.thread == 0):
            hw.store_strong(at(out, k.thread + 256, 4), Constant(U32, 5), "release", "gpu")
    with k.when(hw.block_index() == 0):
        with k.when(k.thread == 0):
            hw.spin_until_equal(at(out, k.thread + 256, 4), Constant(U32, 5))
            hw.store_strong(at(out, k.thread + 256, 4), Constant(U32, 0), "release", "gpu")
        hw.sync_threads()
        write(out, k.thread + 128, read_word(out, 127 - k.thread) + 1)


def reached(k: Builder) -> None:
    """Each CTA adds one to a word and waits until both have, then for what is there already."""
    out = k.pointer("out")
    with k.when(k.thread == 0):
        hw.atom_add_u32(out + 16, 1)
        found = hw.spin_until_at_least(out + 16, Constant(U32, 2), Constant(U32, 1 << 30))
        write(out, hw.block_index(), found)
        write(out, hw.block_index() + 2, hw.spin_until_at_least(out + 16, Constant(U32, 1), Constant(U32, 1)))


_poison = poisoned((4 + 512,), np.uint32)
_sums = np.array([(4 * np.arange(32) + i).sum() * 2 + 32 * 1000 for i in range(4)], np.uint32)
_own = np.tile(THREAD + 5, 2)
_x = integers("reduce", (2, 128), np.float32, 1000)
_start = np.arange(8, dtype=np.float32)
CASES += [
    Case("atom_add_u32", atomic,
         np.concatenate([_poison[:4] + _sums, _poison[4:260] + _own, np.tile(THREAD, 2)]), grid=2),
    Case("red_add_u32", count, np.array([2 * sum(range(i, 128, 8)) + 16 for i in range(8)], np.uint32),
         initial=np.zeros(8, np.uint32), grid=2),
    Case("red_add_f32", reduce, _start + _x.reshape(-1, 8).sum(0), {"x": _x}, initial=_start, grid=2),
    Case("spin_until_equal", wait, np.concatenate([THREAD * 11, THREAD[::-1] * 11 + 1, [0]]).astype(np.uint32),
         initial=np.zeros(257, np.uint32), grid=2),
    Case("spin_until_at_least", reached, np.array([2, 2, 2, 2, 2], np.uint32), initial=np.zeros(5, np.uint32), grid=2),
    Case("acquire_release", release,
         np.concatenate([THREAD * 11, THREAD + 77, (THREAD[::-1] + 77) + THREAD[::-1] * 11]), threads=256),
]  # fmt: skip


# -- pipelines: numbered tiles through more turns than stages -------------------------------------------------
STAGES, TURNS = 3, 8
TILES = (np.arange(TURNS * 128).reshape(TURNS, 128) + 1).astype(np.float32)
_tiles_read = np.ascontiguousarray(TILES[:, ::-1]).view(np.uint32)


def consume(k: Builder, out: Value, buffer: SharedBuffer, pipe: PipelineTmaAsync, tokens: bool) -> None:
    """A warpgroup writes what it finds in each stage to the turn's row of `out`."""
    read = pipe.consumer_start_state()
    with k.range(TURNS, name="turn") as turn:
        token = pipe.consumer_test_wait(read) if tokens else None
        pipe.consumer_wait(read, token)
        write(out, turn * 128 + k.thread % 128, taken(k, buffer[read.index]))
        hw.fence_proxy_async()  # TMA may write the stage next
        hw.sync_warp()  # one lane arrives for all that have read
        pipe.consumer_release(read)
        read.advance()


def pipeline_async(tokens: bool, consumers: int) -> Case:
    """Warps store, warps load; two consumer warpgroups both see every tile."""

    def record(k: Builder) -> None:
        out, buffer = k.pointer("out"), k.shared(512, stages=STAGES)
        pipe = PipelineAsync(STAGES)
        init_barriers(pipe)
        with k.warpgroup(0):
            state = pipe.producer_start_state()
            with k.range(TURNS, name="turn") as turn:
                pipe.producer_acquire(state)
                put(k, buffer[state.index], (turn * 1000 + k.thread).to(U32))
                pipe.producer_commit(state)
                state.advance()
            pipe.producer_tail(state)
        with k.warpgroups(1, 1 + consumers) as warpgroup:
            consume(k, out + (warpgroup * (TURNS * 512)).to(U64), buffer, pipe, tokens)

    expected = np.stack([THREAD[::-1] + 1000 * turn for turn in range(TURNS)])
    name = f"pipeline_async{'_tokens' * tokens}_consumers{consumers}"
    return Case(name, record, np.tile(expected, (consumers, 1)).astype(np.uint32), threads=128 + 128 * consumers)


def pipeline_tma(tokens: bool, cluster: int) -> Case:
    """One elected thread loads; in a cluster each CTA brings its part of every tile to all."""

    def record(k: Builder) -> None:
        out, source = k.pointer("out"), k.tensor_map("source")
        buffer = k.shared(512, stages=STAGES, alignment=128)
        pipe = PipelineTmaAsync(STAGES, transaction_bytes=512, peers=Peers(cluster), scope="cluster")
        init_barriers(pipe, prefetch=[source])
        part = 128 // cluster
        with k.warpgroup(0), k.warp(1), k.when(hw.elect_one()):
            state = pipe.producer_start_state()
            with k.range(TURNS, name="turn") as turn:
                pipe.producer_acquire(state)
                stage = buffer[state.index]
                if cluster == 1:
                    hw.tma_load(source, 0, turn, 0, stage, pipe.full_barrier(state), EVICT_NORMAL)
                else:
                    first = hw.cluster_rank() * part
                    target, mask = stage.at((first * 4).to(U32)), (1 << cluster) - 1
                    hw.tma_load_multicast(source, first, turn, 0, target, pipe.full_barrier(state), mask, EVICT_NORMAL)
                state.advance()
            pipe.producer_tail(state)
        with k.warpgroup(1):
            consume(k, out + (hw.block_index() * (TURNS * 512)).to(U64), buffer, pipe, tokens)

    maps = {"source": Map("x", FP32, (128, TURNS, 1), (128, 0), (128 // cluster, 1, 1), 0)}
    expected = np.tile(_tiles_read, (cluster, 1))
    name = f"pipeline_tma{'_tokens' * tokens}_cluster{cluster}"
    return Case(name, record, expected, {"x": TILES}, maps, threads=256, cluster=cluster, grid=cluster)


CASES += [pipeline_async(*how) for how in product((False, True), (1, 2))]
CASES += [pipeline_tma(*how) for how in product((False, True), (1, 2, 4))]
