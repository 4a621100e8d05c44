"""What must hold once all threads of a grid have ended."""

from __future__ import annotations

from gemmsmith.backends.sim.clocks import Clock
from gemmsmith.backends.sim.cta import Cta
from gemmsmith.backends.sim.hazards import Hazards
from gemmsmith.backends.sim.state import State
from gemmsmith.backends.sim.unit import Unit


def check_end(state: State, units: dict[Cta, list[Unit]]) -> None:
    """Reports what does not hold, CTA by CTA."""
    for cta in units:
        known = Clock(state.agents)
        for warp in cta.warps:
            for agent in (warp.all, *warp.sets.values()):
                known.join(agent.clock)
        _check_registers(state, units[cta])
        for event in cta.remote:
            if not event.known(known):
                message = f"CTA {cta.index} may have ended before {event} reached it"
                state.hazards.report("exited CTA", message, event.where)
        _check_operations(state, cta, known)
        _check_mbarriers(state.hazards, cta)


def _check_registers(state: State, units: list[Unit]) -> None:
    """setmaxnreg is for all warps of a warpgroup."""
    budgets: dict[int, set[int]] = {}
    for unit in units:
        budgets.setdefault(int(unit.threads[0]) // 128, set()).add(unit.budget)
    for warpgroup, found in budgets.items():
        if len(found) > 1:
            message = f"setmaxnreg by some warps of warpgroup {warpgroup}, which have {sorted(found)} registers"
            state.hazards.report("registers", message, state.kernel.body.statements[0].where)


def _check_operations(state: State, cta: Cta, known: Clock) -> None:
    """Of bulk stores the sources must have been read, of others the results must be there."""
    for running in state.operations.all:
        if running.cta is not cta:
            continue
        stores = running.operation.group == "bulk"
        need = running.bits[0] if stores else running.bits[1]
        if known.done & need != need:
            kind = "group" if stores else "exited CTA"
            message = f"{running.operation.what} may be under way when CTA {cta.index} ends: nobody waits for it"
            state.hazards.report(kind, message, running.where)


def _check_mbarriers(hazards: Hazards, cta: Cta) -> None:
    for barrier in cta.mbarriers.values():
        if barrier.pending != barrier.count or barrier.tx:
            message = (
                f"{barrier.name} ends in the middle of phase {barrier.phase}: {barrier.pending} of {barrier.count} "
                f"arrivals and {barrier.tx} bytes missing"
            )
            hazards.report("barrier", message, barrier.where, barrier.buffer)
        seen = max(barrier.observed.values(), default=-1)
        unread = next((phase for phase in barrier.filled if phase > seen), None)
        if unread is not None:
            message = f"{barrier.name}: nobody waited for phase {unread}, which brought data"
            hazards.report("unread phase", message, barrier.where, barrier.buffer)
