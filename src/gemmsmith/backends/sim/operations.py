"""Asynchronous operations under way: TMA copies, bulk stores, wgmmas, cp.asyncs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gemmsmith.backends.sim.clocks import Clock, Warp
from gemmsmith.backends.sim.cta import Cta
from gemmsmith.backends.sim.events import Event
from gemmsmith.backends.sim.memory import OFFSET_MASK
from gemmsmith.lang.machine import AsyncOperation
from gemmsmith.lang.statements import Where


@dataclass(eq=False)
class Running:
    """An operation that a CTA has started. `bits`: (sources read, results there).

    `writes` are the events of a cp.async, by the warp that must still wait for its own.
    """

    operation: AsyncOperation
    cta: Cta
    clock: Clock
    bits: tuple[int, int]
    end: int
    where: Where
    after: tuple[Running, ...] = ()
    finished: bool = False
    writes: dict[Warp, Event] = field(default_factory=dict)


@dataclass(eq=False)
class Operations:
    """The operations of a grid: `all` that were started, and those that are `running`.

    `worked` is told the tensor-core cycles of every wgmma that is done.
    """

    worked: Callable[[float], None]
    all: list[Running] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)

    def next_bits(self) -> tuple[int, int]:
        """The bits of the next operation to start; those of number 0 are not an operation's."""
        number = len(self.all) + 1
        return 1 << 2 * number, 2 << 2 * number

    def add(self, running: Running) -> None:
        self.all.append(running)
        self.running.append(running)

    def completable(self) -> list[Running]:
        """Those that may end next: wgmmas end in order."""
        return [r for r in self.running if not r.after or all(before.finished for before in r.after)]

    def complete(self, running: Running) -> None:
        """An operation ends: its data moves, and its mbarriers are told."""
        operation = running.operation
        operation.perform()
        running.finished = True
        self.running.remove(running)
        if operation.engine == "tensor":
            self.worked(operation.work)
        bits = running.bits[0] | running.bits[1]
        if operation.arrives:
            address, threads = operation.arrives
            for copy in running.after:
                bits |= copy.bits[0] | copy.bits[1]
            running.cta.mbarriers[address & OFFSET_MASK].complete(
                0, running.clock, bits, running.end, near=True, arrivals=threads
            )
        for rank, address, nbytes in operation.completes:
            cta = running.cta.peer(rank)
            near = operation.proxy == "async" or cta is running.cta
            cta.mbarriers[address & OFFSET_MASK].complete(nbytes, running.clock, bits, running.end, near=near)
