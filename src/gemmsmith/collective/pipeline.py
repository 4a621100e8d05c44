"""Pipelines: rings of shared memory stages that producers fill and consumers release, synchronized by mbarriers.

Every stage has two barriers: the full barrier completes a phase when the stage's data has arrived, the empty barrier
when all consumers have released the stage. A user of a pipeline advances a PipelineState over the stages; its phase
flips when the index wraps, so that the k-th use of a stage waits for the parity of its k-th completion. A wait for
parity 1 on a fresh barrier returns at once: a producer starts with phase 1, since the stages start empty.

Arrival counts are derived from the recorded roles: one arriving lane per warp and barrier. Semantics as in CUTLASS 3.x,
include/cutlass/pipeline/sm90_pipeline.hpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

from gemmsmith import hw
from gemmsmith.core.errors import KernelError
from gemmsmith.core.mma import THREADS_PER_WARPGROUP
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import I32, U32
from gemmsmith.lang.values import Constant, Value, ValueLike, Variable
from gemmsmith.machine import Scope

MBARRIER_BYTES = 8


class PipelineState:
    """The index of the next stage and the parity of its phase.

    `advance()` is `if (++index == N) index = 0, phase ^= 1`. `name` is the prefix of the variables' names in the
    printed CUDA.
    """

    def __init__(self, stages: int, phase: int = 0, name: str = "state", index: ValueLike = 0) -> None:
        k = current_builder()
        self.stages = stages
        self._index, self._phase = k.var(I32, index, f"{name}_stage"), k.var(U32, phase, f"{name}_phase")

    @property
    def index(self) -> Value:
        """The index of the stage."""
        return self._index.get()

    @property
    def phase(self) -> Value:
        """The parity to wait for."""
        return self._phase.get()

    def advance(self) -> None:
        """Advance to the next stage."""
        k = current_builder()
        self._index.set(self.index + 1)
        with k.when(self.index == self.stages):
            self._index.set(0)
            self._phase.set(self.phase ^ 1)

    def skip(self, count: Value) -> None:
        """Advance by `count` stages."""
        next_index = (self.index + count).named("unwrapped_stage")
        self._phase.set(self.phase ^ (next_index // self.stages % 2).to(U32))
        self._index.set(next_index % self.stages)


def stage_index(stage: PipelineState | Value) -> Value:
    """Return the index of a stage, which is given as an index or as a state that is at the stage."""
    return stage.index if isinstance(stage, PipelineState) else stage


@dataclass(frozen=True)
class Peers:
    """The CTAs of a cluster that this one exchanges multicasts with, itself included.

    In a cluster of rows and columns they are the CTAs of its row and of its column. `rank(i)` is the cluster rank of
    the i-th. Stages are released to these only: the loads of the other CTAs do not depend on one another's releases, so
    one CTA could arrive twice in the same phase of another's barrier. (CUTLASS: is_same_row_or_col of
    PipelineTmaAsync.)
    """

    count: int = 1
    rank: Callable[[Value], Value] = lambda i: i


NO_PEERS = Peers()


class HasBarriers(Protocol):
    """An object with mbarriers that `init_barriers` initializes."""

    def init(self) -> None:
        """Initialize the barriers. One thread executes it, before the roles."""


class _ArrivalCount:
    """The number of arrivals that complete a phase of the mbarriers `name`, with which they are initialized.

    It is the sum over the warp roles that arrive. The prologue initializes the barriers before the roles are recorded,
    so `count` is a constant whose value is set while they are. An arrival that is recorded twice in a role, such as in
    two branches, counts once.
    """

    def __init__(self, name: str) -> None:
        self.count = Constant(U32, None)  # set when the roles are recorded
        self.count.name_hint = self.name = name
        self.roles: dict[object, int] = {}

    def add_arrivals(self, arrivals: int, by: str = "") -> None:
        """Count `arrivals` per phase of the warp role that is being recorded, unless they are counted already.

        `by` tells apart several arrivals of one role in the same phase, such as "threads, scales".
        """
        role = current_builder().current_role, by
        if self.roles.setdefault(role, arrivals) != arrivals:
            raise KernelError(f"{self.name}: one role arrives {self.roles[role]} and {arrivals} times a phase")
        self.count.value = sum(self.roles.values())


class PipelineTmaAsync:
    """A pipeline filled by TMA and read by warps; each CTA of a cluster may multicast into the others' stages.

    A phase of a full barrier completes after one arrival, by which the producer announces the bytes that its CTA
    expects (peers' multicasts included), and after those bytes. A phase of an empty barrier completes after one arrival
    of each consumer warp of each peer: a stage is free only if all CTAs to which the next multicast writes have read
    it.
    """

    def __init__(
        self, stages: int, *, transaction_bytes: ValueLike, peers: Peers = NO_PEERS, consumer_groups: int = 1,
        scope: Scope = "cta", acquire_scope: Scope | None = None, name: str = "pipeline",
    ) -> None:  # fmt: skip
        """Allocate the barriers.

        Args:
            stages: Stages of the ring.
            transaction_bytes: Bytes that complete a stage.
            peers: CTAs that this one exchanges multicasts with.
            consumer_groups: Consumer warpgroups that take stages in turn (pingpong: all, else 1); each stage is read
                by 1 / `consumer_groups` of the consumer warpgroups.
            scope: Memory scope of the consumers' release. "cta" suffices if wgmma that was waited for has read the
                stage, but not if ld has (see MbarrierArriveCluster).
            acquire_scope: Memory scope of the producers' wait, if some releases have a wider scope; None: `scope`.
            name: Prefix of the barriers' and the states' names in the printed CUDA.
        """
        k = current_builder()
        self.stages, self.name, self.scope, self.acquire_scope = stages, name, scope, acquire_scope or scope
        self.transaction_bytes, self.peers, self.consumer_groups = transaction_bytes, peers, consumer_groups
        self._full, self._empty = (
            k.shared(MBARRIER_BYTES, stages=stages, alignment=MBARRIER_BYTES, name=f"{name} {which} barrier")
            for which in ("full", "empty")
        )
        self._producers, self._consumers = _ArrivalCount(f"{name} full"), _ArrivalCount(f"{name} empty")

    def init(self) -> None:
        """Initialize the barriers. One thread executes it."""
        with current_builder().unroll(self.stages, name="stage") as stage:
            hw.mbarrier_init(self._full[stage], self._producers.count)
            hw.mbarrier_init(self._empty[stage], self._consumers.count)

    def producer_start_state(self, index: ValueLike = 0) -> PipelineState:
        """Return the producer's state at stage `index` (< stages); the prologue has filled the stages before it."""
        return PipelineState(self.stages, phase=1, name=f"{self.name}_write", index=index)

    def consumer_start_state(self) -> PipelineState:
        """Return the consumers' state at the first stage."""
        return PipelineState(self.stages, phase=0, name=f"{self.name}_read")

    def full_barrier(self, stage: PipelineState | Value) -> SharedView:
        """Return the full barrier of a stage, on which its TMA copies complete."""
        return self._full[stage_index(stage)]

    # -- producer --------------------------------------------------------------------------------------
    def producer_acquire(self, state: PipelineState, transaction_bytes: ValueLike | None = None) -> None:
        """Wait until the stage of `state` is free, and announce on its full barrier the bytes that will arrive.

        One thread executes it. `transaction_bytes`: of this stage, instead of the pipeline's.
        """
        self._acquire(state)
        self._producers.add_arrivals(1)
        self.producer_expect_bytes(state.index, transaction_bytes)

    def non_tma_producer_acquire(self, state: PipelineState) -> None:
        """Wait until the stage of `state` is free, in a warp that writes to it besides the producer."""
        self._acquire(state)

    def _acquire(self, state: PipelineState) -> None:
        hw.mbarrier_wait(self._empty[state.index], state.phase, self.acquire_scope)

    def non_tma_producer_commit(
        self, state: PipelineState, lanes: int, *, cp_async: bool, st_shared: bool, of: str = "operand"
    ) -> None:
        """Arrive, in each of `lanes` threads, for what they have written into the stage.

        Args:
            state: A state at the stage.
            lanes: Threads that execute it.
            cp_async: They have written by cp.async; they arrive when these copies are complete.
            st_shared: They have written by st.shared. With both they arrive twice.
            of: What they have written, "operand" or "scales": a role arrives once per phase for each.
        """
        self._producers.add_arrivals((cp_async + st_shared) * lanes, by=f"threads, {of}")
        if cp_async:
            hw.cp_async_arrive(self._full[state.index])
        if st_shared:
            hw.mbarrier_arrive(self._full[state.index])

    def producer_expect_bytes(self, stage: Value, transaction_bytes: ValueLike | None = None) -> None:
        """Arrive on the full barrier of a stage, and announce the bytes that complete its phase.

        The prologue calls it for the stages that it fills in place of the producer; these need no wait, being fresh.
        """
        nbytes = self.transaction_bytes if transaction_bytes is None else transaction_bytes
        hw.mbarrier_arrive_expect_tx(self._full[stage], nbytes)

    def producer_tail(self, state: PipelineState) -> None:
        """Wait until consumers have released every stage, after the last load.

        A CTA must not exit before its peers' last arrivals on its barriers. `state`: that of the producer.
        """
        with current_builder().range(self.stages, name="stage"):
            self._acquire(state)
            state.advance()

    # -- consumer --------------------------------------------------------------------------------------
    def consumer_test_wait(self, state: PipelineState) -> Value:
        """Return a token for `consumer_wait`: whether the stage is already full. Does not block."""
        return hw.mbarrier_test_wait(self._full[state.index], state.phase).named("is_full")

    def consumer_wait(self, state: PipelineState, token: Value | None = None) -> None:
        """Wait until the stage is full, unless `token`, of `consumer_test_wait`, says that it is."""
        with nullcontext() if token is None else current_builder().when(~token):
            hw.mbarrier_wait(self._full[state.index], state.phase)

    def consumer_release(self, stage: PipelineState | Value, scope: Scope | None = None) -> None:
        """Arrive, once per warp, on the empty barrier of each CTA whose TMA writes into this stage.

        Threads that have read the stage by ld execute `hw.fence_proxy_async()` before; wgmma needs no fence.

        `scope`: memory scope; None: the pipeline's.
        """
        self._consumers.add_arrivals(current_builder().role_warps // self.consumer_groups * self.peers.count)
        _arrive_per_warp(self._empty[stage_index(stage)], self.peers, scope or self.scope)


class LaggedRelease:
    """Releases each stage one k-tile late, since one wgmma group stays in flight (CUTLASS: smem_pipe_release)."""

    def __init__(self, pipeline: PipelineTmaAsync) -> None:
        self.pipeline, self._release_stage = pipeline, current_builder().var(I32, 0, f"{pipeline.name}_release_stage")

    def release_previous(self, k_tile: Value, read_state: PipelineState) -> None:
        """Release the previous k-tile's stage, after the wait for all wgmma groups except the current one."""
        with current_builder().when(k_tile > 0):
            self.pipeline.consumer_release(self._release_stage.get())
        self._release_stage.set(read_state.index)

    def release_last(self, k_tiles: Value) -> None:
        """Release the last stage of a tile of `k_tiles` k-tiles, after the wait for its last wgmma group.

        It is released with the scope of the producers' wait, since the consumers may have written to it: they zero what
        follows the end of a group along K (RaggedK).
        """
        with current_builder().when(k_tiles > 0):
            self.pipeline.consumer_release(self._release_stage.get(), self.pipeline.acquire_scope)


class StagesReleasedBarrier:
    """A barrier on which the epilogues of a cluster's CTAs arrive after their last access to reused mainloop stages.

    A phase completes after one arrival per consumer warp of each CTA. The accesses may be by ld and st, so arrivals and
    waits have cluster scope if there are peers. (CUTLASS: ReuseSmem of the epilogue.)
    """

    def __init__(self, name: str, peers: Peers = NO_PEERS) -> None:
        self.peers = peers
        self.scope: Scope = "cluster" if peers.count > 1 else "cta"
        self._released = current_builder().shared(MBARRIER_BYTES, alignment=MBARRIER_BYTES, name=name)
        self._consumers = _ArrivalCount(name)

    def init(self) -> None:
        hw.mbarrier_init(self._released[0], self._consumers.count)

    def wait(self, phase: Variable) -> None:
        """Wait for the next completion; `phase`, the parity to wait for, is initially 0 and flips on each wait.

        Between two waits the waiting thread must do something for which the consumers wait. Otherwise they could
        complete two phases, and the parity would be that of the wrong one.
        """
        hw.mbarrier_wait(self._released[0], phase.get(), self.scope)
        phase.set(phase.get() ^ 1)

    def consumer_release(self) -> None:
        self._consumers.add_arrivals(current_builder().role_warps * self.peers.count)
        _arrive_per_warp(self._released[0], self.peers, self.scope)


def init_barriers(
    *pipelines: HasBarriers, prefetch: Sequence[Value] = (), after_init: Callable[[], None] | None = None
) -> None:
    """Initialize the pipelines' barriers and make them visible to the whole cluster. Call it before the roles.

    One thread initializes all barriers: the lanes of a warp would serialize, at 45 cycles each.

    Args:
        *pipelines: The objects whose barriers are initialized.
        prefetch: Tensor maps that another warp meanwhile prefetches into the descriptor cache.
        after_init: Issues the first loads. It runs in the initializing thread, before the cluster barrier, whose
            relaxed arrive does not wait for these loads.
    """
    k = current_builder()
    steps = ["prefetch tensor maps"] * bool(prefetch) + ["initialize barriers"] * bool(pipelines)
    steps += ["load the first k-tiles"] * bool(after_init)
    k.comment(f"prologue: {', '.join(steps)}" if steps else "prologue")
    with k.when(k.thread == 32):
        for tensor_map in prefetch:
            hw.prefetch_tensor_map(tensor_map)
    with k.when(k.warp_index == 0), k.when(hw.elect_one()):
        for pipeline in pipelines:
            pipeline.init()
        hw.fence_mbarrier_init()
        if after_init:
            after_init()
    if pipelines:
        k.comment("wait until the barriers are initialized")
    if k.cluster == (1, 1, 1):
        hw.sync_threads()
    else:
        hw.cluster_arrive_relaxed()
        hw.cluster_wait()


def _arrive_per_warp(barrier: SharedView, peers: Peers, scope: Scope) -> None:
    """Arrive, once per warp, on `barrier` in the shared memory of each peer. Lane i arrives on that of peer i."""
    k = current_builder()
    if peers.count == 1:
        with k.when(k.lane == 0):
            hw.mbarrier_arrive(barrier)
    else:
        with k.when(k.lane < peers.count):
            hw.mbarrier_arrive_remote(barrier, peers.rank(k.lane).to(U32), scope)


class OrderedSequenceBarrier:
    """Lets `groups` warpgroups take turns, in a ring: each waits until the one before has arrived.

    `group` is the number of this warpgroup. Every warpgroup has a named barrier, which completes when the warpgroup
    itself waits and the one before it has arrived. (CUTLASS: OrderedSequenceBarrier, of the consumer warpgroups.)
    """

    def __init__(self, groups: int, group: Value) -> None:
        self._groups, self._group, self._threads = groups, group, 2 * THREADS_PER_WARPGROUP
        self._first_barrier = current_builder().named_barriers(groups)

    def prime(self) -> None:
        """Let the first warpgroup pass its first wait: the last one arrives for it."""
        with current_builder().when(self._group == self._groups - 1):
            hw.barrier_arrive(self._first_barrier, self._threads)

    def wait(self) -> None:
        """Wait until the warpgroup before this one has arrived."""
        current_builder().comment(
            "wait until the warpgroup before has done its mainloop, so that they do not compete for the tensor cores"
        )
        hw.barrier_sync(self._group + self._first_barrier, self._threads)

    def arrive(self) -> None:
        """Let the warpgroup after this one pass."""
        hw.barrier_arrive((self._group + 1) % self._groups + self._first_barrier, self._threads)
