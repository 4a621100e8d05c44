"""A pipeline of warps that store and warps that load, without TMA, for tests of the barriers and of the simulator."""

from __future__ import annotations

from gemmsmith import hw
from gemmsmith.collective.pipeline import PipelineState, PipelineTmaAsync
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.values import Value
from gemmsmith.machine import Scope


class PipelineAsync(PipelineTmaAsync):
    """A pipeline filled and read by warps, with ordinary stores or with cp.async that the producer has waited for.

    Full barrier: one arrival per producer warp. Empty barrier: one per consumer warp. If wgmma or TMA reads the stage,
    the producer calls hw.fence_proxy_async() before it commits.
    """

    def __init__(self, stages: int, name: str = "pipeline") -> None:
        super().__init__(stages, transaction_bytes=0, name=name)

    def producer_acquire(self, state: PipelineState) -> None:
        """Wait until the stage is free."""
        self.non_tma_producer_acquire(state)

    def producer_commit(self, state: PipelineState) -> None:
        """Arrive, once per warp: the executing warps' stores to the stage are done."""
        k = current_builder()
        self._producers.add_arrivals(k.role_warps)
        hw.sync_warp()
        with k.when(k.lane == 0):
            hw.mbarrier_arrive(self.full_barrier(state))

    def consumer_release(self, stage: PipelineState | Value, scope: Scope | None = None) -> None:
        """Arrive, once per warp: the executing warps have read the stage."""
        hw.sync_warp()
        super().consumer_release(stage, scope)
