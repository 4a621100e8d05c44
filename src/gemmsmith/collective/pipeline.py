"""Pipelines: stages of shared memory handed from producers to consumers and back through mbarriers.

Every stage has two barriers. `full` completes a phase when the stage's data is there, `empty` when all consumers
are done with it. A pipeline's user walks the stages with a PipelineState; its phase flips when the index wraps, so
that the k-th use of a stage waits for the parity of its k-th completion. Waiting for parity 1 on a fresh barrier
passes at once: a producer starts with phase 1, for the buffers start empty.

Arrival counts are computed from the roles that really arrive, never given by hand: a warp that arrives does so with
one lane for each barrier it tells. Semantics as in CUTLASS 3.x, include/cutlass/pipeline/sm90_pipeline.hpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from gemmsmith import hw
from gemmsmith.core.errors import KernelError
from gemmsmith.lang.builder import current
from gemmsmith.lang.machine import Scope
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import I32, PRED, U32
from gemmsmith.lang.values import Value, ValueLike, Variable

MBARRIER_BYTES = 8


class PipelineState:
    """Which stage comes next, and the parity of its phase. `advance()` is `if (++index == N) index = 0, phase ^= 1`."""

    def __init__(self, stages: int, phase: int = 0, name: str = "state", index: ValueLike = 0) -> None:
        k = current()
        self.stages = stages
        self._index, self._phase = k.var(I32, index, f"{name}_stage"), k.var(U32, phase, f"{name}_phase")

    @property
    def index(self) -> Value:
        return self._index.get()

    @property
    def phase(self) -> Value:
        return self._phase.get()

    def advance(self) -> None:
        k = current()
        self._index.set(self.index + 1)
        with k.when(self.index == self.stages):
            self._index.set(0)
            self._phase.set(self.phase ^ 1)

    def skip(self, count: Value) -> None:
        """`count` times `advance()`."""
        total = self.index + count
        self._phase.set(self.phase ^ (total // self.stages % 2).to(U32))
        self._index.set(total % self.stages)


class Initialized(Protocol):
    """Anything with barriers of its own."""

    def init(self) -> None: ...


class _Arrivals:
    """How many arrivals complete a phase: the sum over the roles that arrive, each counted once."""

    def __init__(self, name: str) -> None:
        self.count = current().late_constant(name)
        self.roles: dict[object, int] = {}

    def expect(self, arrivals: int) -> None:
        """The role being recorded arrives that many times a phase."""
        role = current().role_key
        if self.roles.setdefault(role, arrivals) != arrivals:
            raise KernelError(f"{self.count.name}: one role arrives {self.roles[role]} and {arrivals} times a phase")
        self.count.number = sum(self.roles.values())


class _Pipeline:
    """Two barriers a stage, and what all pipelines share. `scope`: as far as stages are handed back."""

    def __init__(self, stages: int, name: str = "pipeline", cluster_size: int = 1, scope: Scope = "cta") -> None:
        k = current()
        self.stages, self.name, self.cluster_size, self.scope = stages, name, cluster_size, scope
        self._full = k.shared(MBARRIER_BYTES, stages=stages, alignment=MBARRIER_BYTES, name=f"{name} full")
        self._empty = k.shared(MBARRIER_BYTES, stages=stages, alignment=MBARRIER_BYTES, name=f"{name} empty")
        self._producers, self._consumers = _Arrivals(f"{name} full"), _Arrivals(f"{name} empty")

    def init(self) -> None:
        """Recorded in one thread, before the roles; `start` does it."""
        with current().unroll(self.stages, name="stage") as stage:
            hw.mbarrier_init(self._full[stage], self._producers.count)
            hw.mbarrier_init(self._empty[stage], self._consumers.count)

    def producer_start_state(self, index: ValueLike = 0) -> PipelineState:
        """Before the first stage, or behind the first `index` ones, fewer than all."""
        return PipelineState(self.stages, phase=1, name="write", index=index)

    def consumer_start_state(self) -> PipelineState:
        return PipelineState(self.stages, phase=0, name="read")

    def barrier(self, stage: PipelineState | Value) -> SharedView:
        """The full barrier of the stage: what a TMA copy completes on."""
        return self._full[stage.index if isinstance(stage, PipelineState) else stage]

    # -- producer --------------------------------------------------------------------------------------
    def producer_test_acquire(self, state: PipelineState) -> Value:
        """A token: whether the stage is free already."""
        return hw.mbarrier_test_wait(self._empty[state.index], state.phase, self.scope)

    def _acquire(self, state: PipelineState, token: Value | None) -> None:
        _wait(self._empty[state.index], state.phase, token, self.scope)

    def producer_tail(self, state: PipelineState) -> None:
        """Until consumers have released every stage: no CTA may exit while a peer still arrives on its barriers."""
        with current().range(self.stages, name="stage"):
            self._acquire(state, None)
            state.advance()

    # -- consumer --------------------------------------------------------------------------------------
    def consumer_test_wait(self, state: PipelineState) -> Value:
        """A token: whether the stage is full already."""
        return hw.mbarrier_test_wait(self._full[state.index], state.phase)

    def consumer_wait(self, state: PipelineState, token: Value | None = None) -> None:
        """Until the stage's data is there."""
        _wait(self._full[state.index], state.phase, token)


class PipelineTmaAsync(_Pipeline):
    """TMA produces, warps consume; in a cluster, TMA of every CTA may multicast into every other's stages.

    full: 1 arrival (the producer's, with the bytes its own CTA expects, peers' multicasts included) + those bytes.
    empty: one arrival of each consumer warp of each CTA of the cluster, for a slot is free only when all CTAs that
    the next multicast writes to have read it.
    """

    def __init__(
        self, stages: int, *, transaction_bytes: ValueLike, cluster_size: int = 1, first_rank: Value | int = 0,
        readers: int = 1, scope: Scope = "cta", name: str = "pipeline",
    ) -> None:  # fmt: skip
        """`cluster_size` CTAs from `first_rank` on share copies. Of the consuming warpgroups one in `readers` reads
        each stage. `scope`, as far as stages are handed back: "cta" suffices where wgmma that was waited for has read
        them, not where ld has (see MbarrierArriveCluster)."""
        super().__init__(stages, name, cluster_size, scope)
        self.transaction_bytes, self.first_rank, self.readers = transaction_bytes, first_rank, readers

    def producer_acquire(self, state: PipelineState, token: Value | None = None) -> None:
        """In one thread: until the stage is free; then its bytes are expected."""
        self._acquire(state, token)
        self._producers.expect(1)
        hw.mbarrier_arrive_expect_tx(self._full[state.index], self.transaction_bytes)

    def beside_acquire(self, state: PipelineState) -> None:
        """In a warp that brings more into the stages than the producer: until the stage is free."""
        self._acquire(state, None)

    def beside_commit(self, state: PipelineState, lanes: int, copied: bool, stored: bool) -> None:
        """What so many lanes have `copied` by cp.async, or `stored`, is a part of the stage: each arrives."""
        self._producers.expect((copied + stored) * lanes)
        if copied:
            hw.cp_async_arrive(self._full[state.index])
        if stored:
            hw.mbarrier_arrive(self._full[state.index])

    def producer_begin(self, stage: Value) -> None:
        """In `start`, in place of the producer, which skips the stage: the bytes of a fresh stage are expected."""
        hw.mbarrier_arrive_expect_tx(self._full[stage], self.transaction_bytes)

    def producer_commit(self, state: PipelineState) -> None:
        """Nothing: the copy engine completes the barrier."""

    def consumer_release(self, stage: PipelineState | Value) -> None:
        """Each warp tells every CTA whose TMA writes into this slot that it has read it."""
        empty = self._empty[stage.index if isinstance(stage, PipelineState) else stage]
        self._consumers.expect(current().role_warps // self.readers * self.cluster_size)
        _tell(empty, self.cluster_size, self.first_rank, self.scope)


class PipelineAsync(_Pipeline):
    """Warps produce with ordinary stores (or cp.async they have waited for), warps consume.

    full: one arrival of each producer warp. empty: one of each consumer warp. Where wgmma or TMA will read what was
    stored, the producer calls hw.fence_proxy_async() before it commits.
    """

    def producer_acquire(self, state: PipelineState, token: Value | None = None) -> None:
        self._acquire(state, token)

    def producer_commit(self, state: PipelineState) -> None:
        """The executing warps' stores are in the stage."""
        k = current()
        self._producers.expect(k.role_warps)
        hw.sync_warp()
        with k.when(k.lane == 0):
            hw.mbarrier_arrive(self._full[state.index])

    def consumer_release(self, state: PipelineState) -> None:
        """The executing warps are done with the stage."""
        k = current()
        self._consumers.expect(k.role_warps)
        hw.sync_warp()
        with k.when(k.lane == 0):
            hw.mbarrier_arrive(self._empty[state.index])


class PipelineTransactionAsync(PipelineAsync):
    """Producers expect bytes and arrive in two separate steps: several may bring parts of one stage.

    full: one arrival of each producer warp + all the bytes they expect. empty: as PipelineAsync.
    """

    def producer_expect(self, state: PipelineState, nbytes: ValueLike) -> None:
        """In one lane of a warp, before its producer_commit: that many bytes will come."""
        hw.mbarrier_expect_tx(self._full[state.index], nbytes)


class LateRelease:
    """Hands each stage back one k-tile late, since one group of wgmma stays in flight (CUTLASS: smem_pipe_release)."""

    def __init__(self, pipeline: PipelineTmaAsync) -> None:
        self.pipeline, self._last = pipeline, current().var(I32, 0, "last_stage")

    def previous(self, k_tile: Value, now: PipelineState) -> None:
        """Behind the wait for all groups but that of `now`, the stage of k-tile number `k_tile`."""
        with current().when(k_tile > 0):
            self.pipeline.consumer_release(self._last.get())
        self._last.set(now.index)

    def last(self, k_tiles: Value) -> None:
        """Behind the wait for the last group of a tile of so many k-tiles."""
        with current().when(k_tiles > 0):
            self.pipeline.consumer_release(self._last.get())


class ReleaseBarrier:
    """Consumers of every CTA of a cluster are done with something as a whole, which ld and st may have accessed: one
    arrival of each of their warps."""

    def __init__(self, name: str, cluster_size: int, first_rank: Value | int) -> None:
        self.cluster_size, self.first_rank = cluster_size, first_rank
        self.scope: Scope = "cluster" if cluster_size > 1 else "cta"
        self._done = current().shared(MBARRIER_BYTES, alignment=MBARRIER_BYTES, name=name)
        self._consumers = _Arrivals(name)

    def init(self) -> None:
        """Recorded in one thread, before the roles; `start` does it."""
        hw.mbarrier_init(self._done[0], self._consumers.count)

    def wait(self, phase: Variable) -> None:
        """Until they are done once more: in order of the variable, which starts with 0. Who waits has done something
        since the last time that they must wait for, or they could be done twice before it looks."""
        hw.mbarrier_wait(self._done[0], phase.get(), self.scope)
        phase.set(phase.get() ^ 1)

    def consumer_release(self) -> None:
        """Each warp tells every CTA."""
        self._consumers.expect(current().role_warps * self.cluster_size)
        _tell(self._done[0], self.cluster_size, self.first_rank, self.scope)


def start(*pipelines: Initialized, prefetch: Sequence[Value] = (), then: Callable[[], None] = lambda: None) -> None:
    """Initializes the pipelines' barriers and makes them known to the whole cluster; recorded before the roles.

    One thread inits all barriers: lanes would take 45 cycles each, one after the other. `then` is what it does next,
    before any other thread knows of them: nobody waits for it, as the cluster's arrival releases nothing. The tensor
    maps of `prefetch` are brought into the descriptor cache meanwhile, by another warp.
    """
    k = current()
    k.comment("prologue: barriers")
    with k.when(k.thread == 32):
        for tensor_map in prefetch:
            hw.prefetch_tensor_map(tensor_map)
    with k.when(k.warp_index == 0), k.when(hw.elect_one()):
        for pipeline in pipelines:
            pipeline.init()
        hw.fence_mbarrier_init()
        then()
    if k.cluster == (1, 1, 1):
        hw.sync_threads()
    else:
        hw.cluster_arrive_relaxed()
        hw.cluster_wait()


def _tell(barrier: SharedView, cluster_size: int, first_rank: Value | int, scope: Scope) -> None:
    """A warp arrives at a barrier of each of `cluster_size` CTAs from `first_rank` on, with a lane each."""
    k = current()
    if cluster_size == 1:
        with k.when(k.lane == 0):
            hw.mbarrier_arrive(barrier)
    else:
        with k.when(k.lane < cluster_size):
            hw.mbarrier_arrive_cluster(barrier, (k.lane + first_rank).to(U32), scope)


def _wait(barrier: SharedView, parity: Value, token: Value | None, scope: Scope = "cta") -> None:
    if token is None:
        hw.mbarrier_wait(barrier, parity, scope)
    else:
        assert token.type == PRED
        with current().when(~token):
            hw.mbarrier_wait(barrier, parity, scope)
