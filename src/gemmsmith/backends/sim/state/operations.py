"""Asynchronous operations in flight: TMA copies, bulk stores, wgmmas, cp.asyncs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gemmsmith.backends.sim.memory.clocks import VectorClock, Warp
from gemmsmith.backends.sim.memory.events import Event
from gemmsmith.backends.sim.memory.memory import OFFSET_MASK
from gemmsmith.backends.sim.report.hazards import Place
from gemmsmith.backends.sim.report.record import Record
from gemmsmith.backends.sim.state.cta import Cta
from gemmsmith.machine import AsyncOperation


@dataclass(eq=False)
class InFlightOperation:
    """An asynchronous operation that a CTA has issued.

    Attributes:
        clock: What happens before it.
        bits: The bits of a clock that say (sources read, results written).
        end: Time of completion in cycles.
        depends_on: Operations that complete first.
        issuer_clocks: The clock of each issuing warp, if the operation signals an mbarrier.
        copy_writes: The write events of a cp.async, by warp, until the warp has waited for them.
    """

    operation: AsyncOperation
    cta: Cta
    clock: VectorClock
    bits: tuple[int, int]
    end: int
    location: Place
    depends_on: tuple[InFlightOperation, ...] = ()
    finished: bool = False
    issuer_clocks: list[VectorClock] = field(default_factory=list)
    copy_writes: dict[Warp, Event] = field(default_factory=dict)


@dataclass(eq=False)
class Operations:
    """The asynchronous operations of a grid: `all` that were issued, and those `in_flight`.

    `on_mma_cycles` is called with the tensor-core cycles of every completed wgmma. `observer`: see GridState.
    """

    on_mma_cycles: Callable[[float], None]
    observer: Record | None = None
    all: list[InFlightOperation] = field(default_factory=list)
    in_flight: list[InFlightOperation] = field(default_factory=list)

    def next_bits(self) -> tuple[int, int]:
        """Return the completion bits (sources read, results written) of the next operation.

        Bits 0 and 1 are not an operation's: bit 0 is PREREQUISITE_GRIDS_BIT.
        """
        index = len(self.all) + 1
        return 1 << 2 * index, 2 << 2 * index

    def add(self, operation: InFlightOperation) -> None:
        self.all.append(operation)
        self.in_flight.append(operation)

    def completable(self) -> list[InFlightOperation]:
        """Return the operations that may complete next: those whose predecessors have. wgmmas complete in order."""
        # The last one that an operation depends on is asked first: it is the last to finish.
        return [x for x in self.in_flight if all(other.finished for other in reversed(x.depends_on))]

    def complete(self, in_flight: InFlightOperation) -> None:
        """Complete an operation: move its data and signal its mbarriers."""
        operation = in_flight.operation
        operation.perform()
        in_flight.finished = True
        self.in_flight.remove(in_flight)
        if self.observer is not None:
            self.observer.complete(operation)
        if operation.engine == "tensor":
            self.on_mma_cycles(operation.tensor_cycles)
        bits = in_flight.bits[0] | in_flight.bits[1]
        if operation.arrive_on:
            address, threads = operation.arrive_on
            for copy in in_flight.depends_on:
                bits |= copy.bits[0] | copy.bits[1]
            self._signal(in_flight, in_flight.cta, address, bits, at_cta_scope=True, arrivals=threads)
        for rank, address, nbytes in operation.complete_tx:
            cta = in_flight.cta.peer(rank)
            at_cta_scope = operation.proxy == "async" or cta is in_flight.cta
            self._signal(in_flight, cta, address, bits, at_cta_scope=at_cta_scope, nbytes=nbytes)

    def _signal(
        self, in_flight: InFlightOperation, cta: Cta, address: int, bits: int, *, at_cta_scope: bool, nbytes: int = 0,
        arrivals: int = 0,
    ) -> None:  # fmt: skip
        """Signal a CTA's mbarrier: `nbytes` bytes have come, or `arrivals` threads arrive.

        `address`: of the mbarrier. `bits`, `at_cta_scope`: see `Mbarrier.complete`.
        """
        operation, barrier = in_flight.operation, cta.mbarriers[address & OFFSET_MASK]
        kind, label = ("arrive", "arrival") if arrivals else ("complete_tx", f"complete_tx of {operation.label}")
        for clock in in_flight.issuer_clocks:
            barrier.check_order(clock, label, in_flight.location)
        barrier.complete(nbytes, in_flight.clock, bits, in_flight.end, at_cta_scope=at_cta_scope, arrivals=arrivals)
        if self.observer is not None:
            self.observer.signal(kind, operation, cta.index, barrier, arrivals or nbytes)
