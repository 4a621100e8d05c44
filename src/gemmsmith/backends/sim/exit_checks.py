"""Checks after all threads of a grid have exited."""

from __future__ import annotations

from itertools import groupby

from gemmsmith.backends.sim.memory.clocks import VectorClock
from gemmsmith.backends.sim.report.hazards import Hazards
from gemmsmith.backends.sim.state.cta import Cta
from gemmsmith.backends.sim.state.grid_state import GridState
from gemmsmith.backends.sim.state.lockstep_group import LockstepGroup


def check_grid_exit(state: GridState, groups: dict[Cta, list[LockstepGroup]]) -> None:
    """Report operations in flight, incomplete mbarriers and unequal register budgets, CTA by CTA."""
    for cta in groups:
        clock = VectorClock(state.num_agents)
        for warp in cta.warps:
            for agent in (warp.all_lanes, *warp.subset_agents.values()):
                clock.join(agent.clock)
        _check_registers(state, groups[cta])
        for event in cta.remote:
            if not event.happens_before(clock):
                message = f"CTA {cta.index} may exit before {event} completes"
                state.hazards.report("access to exited CTA", message, event.location)
        _check_operations(state, cta, clock)
        _check_mbarriers(state.hazards, cta)


def _check_registers(state: GridState, groups: list[LockstepGroup]) -> None:
    """Check that all warps of a warpgroup have the same register budget."""
    for warpgroup, members in groupby(groups, lambda group: int(group.threads[0]) // 128):
        registers = {group.registers_per_thread for group in members}
        if len(registers) > 1:
            message = (
                f"setmaxnreg executed by only some warps of warpgroup {warpgroup}, which have {sorted(registers)} "
                "registers per thread"
            )
            state.hazards.report("registers", message, state.kernel.body.statements[0].location)


def _check_operations(state: GridState, cta: Cta, clock: VectorClock) -> None:
    """Check that bulk stores have read their sources, and that other operations have completed."""
    for in_flight in state.operations.all:
        if in_flight.cta is not cta:
            continue
        is_store = in_flight.operation.group == "bulk"
        need = in_flight.bits[0] if is_store else in_flight.bits[1]
        if clock.completed_bits & need != need:
            kind = "missing wait_group" if is_store else "access to exited CTA"
            message = f"{in_flight.operation.label} may be in flight when CTA {cta.index} exits: no thread waits for it"
            state.hazards.report(kind, message, in_flight.location)


def _check_mbarriers(hazards: Hazards, cta: Cta) -> None:
    """Check that each mbarrier is between two phases, and that some thread waited for every phase with data."""
    for barrier in cta.mbarriers.values():
        if barrier.pending != barrier.count or barrier.tx_count:
            message = (
                f"{barrier.name} is in the middle of phase {barrier.phase}: {barrier.pending} of {barrier.count} "
                f"arrivals and {barrier.tx_count} bytes missing"
            )
            hazards.report("barrier", message, barrier.location, barrier.buffer)
        observed = max(barrier.last_waited_phase.values(), default=-1)
        unconsumed = next((phase for phase in barrier.data_phases if phase > observed), None)
        if unconsumed is not None:
            message = f"{barrier.name}: phase {unconsumed} received data, but no thread waited for it"
            hazards.report("unconsumed phase", message, barrier.location, barrier.buffer)
