"""Checks after all threads of a grid have exited."""

from __future__ import annotations

from itertools import groupby

from gemmsmith.backends.sim.memory.clocks import VectorClock
from gemmsmith.backends.sim.report.hazards import Hazards
from gemmsmith.backends.sim.state.cta import Cta
from gemmsmith.backends.sim.state.grid_state import GridState
from gemmsmith.backends.sim.state.lockstep_group import LockstepGroup


def check_grid_exit(state: GridState, groups: dict[Cta, list[LockstepGroup]]) -> None:
    """Report, for each CTA, what is wrong when its threads have exited.

    That is: accesses by other CTAs to its memory that may come later, operations that no thread has waited for,
    mbarriers in the middle of a phase, and register budgets that differ within a warpgroup.
    """
    for cta in groups:
        clock = VectorClock(state.num_agents)  # all that happens before some thread of the CTA exits
        for warp in cta.warps:
            for agent in (warp.all_lanes, *warp.subset_agents.values()):
                clock.join(agent.clock)
        _check_registers(state, cta, groups[cta])
        for event in cta.remote:
            if not event.happens_before(clock):
                message = f"CTA {cta.index} may exit before {event} completes"
                state.hazards.report("access to exited CTA", message, event.location, exited=cta.index)
        _check_operations(state, cta, clock)
        _check_mbarriers(state.hazards, cta)


def _check_registers(state: GridState, cta: Cta, groups: list[LockstepGroup]) -> None:
    """Report a warpgroup whose warps have different register budgets: setmaxnreg is for a whole warpgroup."""
    for warpgroup, members in groupby(groups, lambda group: int(group.threads[0]) // 128):
        registers = {group.registers_per_thread for group in members}
        if len(registers) > 1:
            message = (
                f"setmaxnreg executed by only some warps of warpgroup {warpgroup}, which have {sorted(registers)} "
                "registers per thread"
            )
            location = state.kernel.body.statements[0].location
            state.hazards.report("registers", message, location, exited=cta.index)


def _check_operations(state: GridState, cta: Cta, clock: VectorClock) -> None:
    """Report operations of a CTA that no thread has waited for.

    A bulk store must have read its source, the CTA's shared memory; other operations must have completed.
    """
    for in_flight in state.operations.all:
        if in_flight.cta is not cta:
            continue
        is_store = in_flight.operation.group == "bulk"
        need = in_flight.bits[0] if is_store else in_flight.bits[1]
        if clock.completed_bits & need != need:
            kind = "missing wait_group" if is_store else "access to exited CTA"
            message = f"{in_flight.operation.label} may be in flight when CTA {cta.index} exits: no thread waits for it"
            state.hazards.report(kind, message, in_flight.location, exited=cta.index)


def _check_mbarriers(hazards: Hazards, cta: Cta) -> None:
    """Report mbarriers in the middle of a phase, and phases that received data but for which no thread waited."""
    for barrier in cta.mbarriers.values():
        if barrier.pending != barrier.count or barrier.tx_count:
            message = (
                f"{barrier.name} is in the middle of phase {barrier.phase}: {barrier.pending} of {barrier.count} "
                f"arrivals and {barrier.tx_count} bytes missing"
            )
            hazards.report("barrier", message, barrier.location, barrier.buffer, exited=cta.index)
        observed = max(barrier.last_waited_phase.values(), default=-1)
        unconsumed = next((phase for phase in barrier.data_phases if phase > observed), None)
        if unconsumed is not None:
            message = f"{barrier.name}: phase {unconsumed} received data, but no thread waited for it"
            hazards.report("unconsumed phase", message, barrier.location, barrier.buffer, exited=cta.index)
