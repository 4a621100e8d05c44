"""Pipelines: states that walk the stages, how barriers are initialized, and stages that are handed back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.backends.sim.tiny import kinds, run
from tests.conformance.case import at, load_shared_word, slot, words, write
from tests.pipelines import PipelineAsync

from gemmsmith import hw
from gemmsmith.collective.pipeline import (
    LaggedRelease,
    Peers,
    PipelineState,
    PipelineTmaAsync,
    StagesReleasedBarrier,
    init_barriers,
)
from gemmsmith.core.errors import KernelError
from gemmsmith.hw.mbarrier import MbarrierInit
from gemmsmith.hw.tma import EVICT_NORMAL
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.statements import instructions
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Value


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_a_state_walks_the_stages_and_flips_its_phase(stages: int) -> None:
    """Step by step, and so many steps at once."""

    def record(k: Builder, out: Value) -> None:
        one = PipelineState(stages, phase=1)
        for step in range(12):
            many = PipelineState(stages, phase=1)
            many.skip(k.lane * 0 + step)
            with k.when(k.lane == 0):
                write(out, k.lane + step, one.index.to(U32), one.phase, many.index.to(U32), many.phase)
            one.advance()

    found = np.full((16, 4), 9, np.uint32)
    assert run(record, threads=32, out=found).hazards == []
    step = np.arange(12)
    index, phase = step % stages, 1 - step // stages % 2
    np.testing.assert_array_equal(found[:12], np.stack([index, phase, index, phase], 1))


def test_a_producer_starts_behind_what_is_there_already() -> None:
    def record(k: Builder, out: Value) -> None:
        pipe = PipelineAsync(3)
        init_barriers(pipe)
        states = pipe.producer_start_state(2), pipe.producer_start_state(), pipe.consumer_start_state()
        for row, state in enumerate(states):
            with k.when(k.lane == 0):
                write(out, k.lane + row, state.index.to(U32), state.phase)
        pipe.producer_commit(states[1])
        pipe.consumer_release(states[2])

    found = np.full((3, 2), 9, np.uint32)
    assert run(record, threads=32, out=found).hazards == []
    assert found.tolist() == [[2, 1], [0, 1], [0, 0]]


def handed_on(
    stages: int, count: int, release: Callable[[PipelineAsync, PipelineState], None], out: np.ndarray, seed: int
) -> set[str]:
    """A warp hands `count` numbers to another warp through `stages` stages; kinds of hazards."""

    def record(k: Builder, out: Value) -> None:
        pipe, slots = PipelineAsync(stages, "p"), k.shared(128, stages=stages)
        init_barriers(pipe)
        with k.warpgroup(0), k.warp(0):
            state = pipe.producer_start_state()
            with k.range(count, name="i") as i:
                pipe.producer_acquire(state)
                hw.store_shared(words((i * 32 + k.lane).to(U32)), slot(slots[state.index], k.lane, 4))
                pipe.producer_commit(state)
                state.advance()
        with k.warpgroup(1), k.warp(0):
            state = pipe.consumer_start_state()
            with k.range(count, name="i") as i:
                pipe.consumer_wait(state)
                word = load_shared_word(slot(slots[state.index], 31 - k.lane, 4))
                release(pipe, state)
                hw.store_global(words(word), at(out, i * 32 + k.lane, 4), True)
                state.advance()

    return kinds(run(record, threads=256, out=out, seed=seed))


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_handed_on_is_what_comes(stages: int, seed: int) -> None:
    found = np.full((7, 32), 9999, np.uint32)
    assert handed_on(stages, 7, lambda pipe, state: pipe.consumer_release(state), found, seed) == set()
    np.testing.assert_array_equal(found, np.arange(7 * 32).reshape(7, 32)[:, ::-1])


def test_a_role_arrives_equally_often_everywhere() -> None:
    with Builder("k", threads=256, cluster=(2, 1, 1)) as k:
        pipe = PipelineTmaAsync(2, transaction_bytes=128, peers=Peers(2), name="p")
        init_barriers(pipe)
        with k.warpgroups(0, 2):
            pipe.consumer_release(pipe.consumer_start_state())
            pipe.consumer_groups = 2
            with pytest.raises(KernelError, match="^p empty: one role arrives 16 and 8 times a phase"):
                pipe.consumer_release(pipe.consumer_start_state())


def test_warpgroups_that_take_turns_arrive_once_for_all() -> None:
    with Builder("k", threads=384) as k:
        pipe = PipelineTmaAsync(2, transaction_bytes=128, consumer_groups=2)
        init_barriers(pipe)
        with k.warpgroup(0), k.warp(0):
            pipe.producer_acquire(pipe.producer_start_state())
        with k.warpgroups(1, 3):
            pipe.consumer_release(pipe.consumer_start_state())
        assert [x.count.value for x, _ in instructions(k.finish().body) if isinstance(x, MbarrierInit)] == [1, 4]


@pytest.mark.parametrize("cluster", [1, 2])
def test_the_prologue_ends_with_a_barrier_of_all_who_arrive(cluster: int) -> None:
    with Builder("k", threads=64, cluster=(cluster, 1, 1)) as k:
        pipe, box = PipelineAsync(2, "p"), k.tensor_map("map")
        init_barriers(pipe, prefetch=[box], after_init=lambda: hw.fence_acq_rel())
        pipe.producer_commit(pipe.producer_start_state())
        pipe.consumer_release(pipe.consumer_start_state())
        source = k.finish().source
    body = source[source.index('extern "C"') :]
    steps = ["prefetch_tensor_map(&map)", "mbarrier_init(", "fence_mbarrier_init()", "fence_acq_rel("]
    steps += ["cluster_arrive_relaxed()", "cluster_wait()"] if cluster > 1 else ["__syncthreads()"]
    places = [body.index(step) for step in steps]
    assert places == sorted(places)
    assert body.count(" mbarrier_init(") == 2  # full and empty, in a loop over the stages
    assert ("__syncthreads()" in body) == (cluster == 1)


@pytest.mark.parametrize("late", [True, False])
def test_a_late_release_hands_back_every_stage_once(late: bool) -> None:
    """Without the last one the producer waits for ever."""
    count, stages = 5, 2

    def record(k: Builder, out: Value) -> None:
        box, slots = k.tensor_map("map"), k.shared(512, stages=stages, alignment=128)
        pipe = PipelineTmaAsync(stages, transaction_bytes=512)
        init_barriers(pipe)
        with k.warpgroup(0), k.warp(0):
            state = pipe.producer_start_state()
            with k.when(k.lane == 0), k.range(count, name="i"):
                pipe.producer_acquire(state)
                hw.tma_load(box, 0, 0, 0, slots[state.index], pipe.full_barrier(state), EVICT_NORMAL)
                state.advance()
            with k.when(k.lane == 0):
                pipe.producer_tail(state)
        with k.warpgroup(1):
            state, release = pipe.consumer_start_state(), LaggedRelease(pipe)
            with k.range(count, name="i") as i:
                pipe.consumer_wait(state)
                load_shared_word(slot(slots[state.index], k.thread % 128, 4))
                hw.fence_proxy_async()
                hw.sync_warp()  # all lanes have read
                release.release_previous(i, state)
                state.advance()
            if late:
                release.release_last(k.lane * 0 + count)

    found = kinds(run(record, threads=256))
    assert found == set() if late else "deadlock" in found


@pytest.mark.parametrize("seed", range(3))
def test_a_release_barrier_is_waited_for_once_in_each_round(seed: int) -> None:
    """One warp writes what two warpgroups read, round after round, when all of them are done with the last."""
    rounds = 4

    def record(k: Builder, out: Value) -> None:
        done, ready, place = StagesReleasedBarrier("done"), PipelineAsync(1, "ready"), k.shared(4)
        init_barriers(done, ready)
        with k.warpgroup(0), k.warp(0):
            phase, state = k.var(U32, 0, "phase"), ready.producer_start_state()
            with k.range(rounds, name="round") as round:
                with k.when(round > 0):
                    done.wait(phase)
                with k.when(k.lane == 0):
                    hw.store_shared(words((round + 7).to(U32)), place[0].address)
                ready.producer_commit(state)
                state.advance()
        with k.warpgroups(1, 3) as group:
            state = ready.consumer_start_state()
            with k.range(rounds, name="round") as round:
                ready.consumer_wait(state)
                word = load_shared_word(place[0].address)
                hw.store_global(words(word), at(out, (round * 2 + group) * 128 + k.thread % 128, 4), True)
                hw.sync_warp()
                ready.consumer_release(state)
                done.consumer_release()
                state.advance()

    found = np.full((rounds, 256), 9, np.uint32)
    assert run(record, threads=384, out=found, seed=seed).hazards == []
    np.testing.assert_array_equal(found, np.repeat(np.arange(rounds)[:, None] + 7, 256, 1))
