"""A unit: the threads of a warp or a warpgroup in lockstep. It is the Machine that instructions execute on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemmsmith.backends.sim.barriers import Mbarrier, ThreadBarrier
from gemmsmith.backends.sim.clocks import Clock, Warp
from gemmsmith.backends.sim.memory import OFFSET_MASK, RANK_SHIFT, SHARED_BASE, gather, scatter
from gemmsmith.backends.sim.shadow import Event
from gemmsmith.backends.sim.state import Cta, Running, State
from gemmsmith.backends.sim.timeline import Span
from gemmsmith.lang.machine import Access, AsyncOperation, Blocking
from gemmsmith.lang.statements import Where
from gemmsmith.lang.types import F32, PRED
from gemmsmith.lang.values import Builtin, Constant, LateConstant, Parameter, Registers, Value

ENGINE_ROWS = {"tma": "TMA", "tensor": "tensor core", "copy": "copy"}


@dataclass
class Wait:
    """Why a unit is blocked: until `ready()`; `describe()` says for what."""

    ready: Callable[[], bool]
    describe: Callable[[], str]


@dataclass(frozen=True)
class Part:
    """The active lanes of one warp: all (not partial) or some; `rows` are their positions in the unit."""

    warp: Warp
    partial: bool
    rows: np.ndarray


class Unit:
    """See the module. `time` is in cycles of the cost model."""

    def __init__(self, state: State, cta: Cta, first: int, count: int, name: str) -> None:
        self.state, self.cta, self.name = state, cta, name
        self.threads = np.arange(first, first + count)
        self.warps = cta.warps[first // 32 : (first + count) // 32]
        self.block, self.grid, self.rank = cta.index, state.grid, cta.rank
        self.cluster_size = len(cta.cluster)
        self.time, self.busy_since, self.where = 0, 0, Where("?", 0)
        self.environment: dict[Value, Any] = {}
        self.arrays: dict[Registers, np.ndarray] = {}
        self.owned: dict[Registers, Running] = {}
        self.dirty: set[Registers] = set()
        self.open: dict[object, list[Running]] = {}
        self.groups: dict[object, list[list[Running]]] = {}
        self.last_tensor: Running | None = None
        self.budget = state.kernel.register_cap
        self.cluster_generation: int | None = None
        self.generator: Any = None
        self.builtins: dict[str | None, Any] = {
            "thread": self.threads,
            "lane": self.threads % 32,
            "warp": first // 32 if count == 32 else self.threads // 32,
            "warpgroup": first // 128,
            "smem": SHARED_BASE + (cta.rank << RANK_SHIFT),
            "smem_chunk": SHARED_BASE // 16,
        }
        self.set_active(np.ones(count, bool))

    def set_active(self, active: np.ndarray) -> None:
        """Narrows or restores the threads that execute."""
        self.active = active
        self.parts = self._parts(active)

    def _parts(self, active: np.ndarray) -> list[Part]:
        parts = []
        for i, lanes in enumerate(active.reshape(-1, 32)):
            if lanes.any():
                parts.append(Part(self.warps[i], not lanes.all(), 32 * i + np.flatnonzero(lanes)))
        return parts

    def hazard(self, kind: str, message: str, other: object = None) -> None:
        self.state.hazards.report(kind, f"{message} [{self.name}]", self.where, other)

    def report(self, kind: str, message: str) -> None:
        self.hazard(kind, message)

    # -- values ------------------------------------------------------------------------------------
    def value(self, x: Value) -> Any:
        if isinstance(x, (Constant, LateConstant)):
            return x.number
        if isinstance(x, Builtin):
            return self.builtins[x.name]
        if isinstance(x, Parameter):
            return self.state.arguments[x.name or ""]
        return self.environment[x]

    def column(self, x: Value) -> np.ndarray:
        kind = np.float32 if x.type == F32 else bool if x.type == PRED else np.int64
        return np.broadcast_to(np.asarray(self.value(x), kind), len(self.threads))

    def uniform(self, x: Value) -> Any:
        held = self.value(x)
        if not isinstance(held, np.ndarray):
            return held
        chosen = held[self.active]
        if (chosen != chosen[0]).any():
            self.hazard("uniformity", "an operand that all threads must agree on differs between them")
        return chosen[0].item()

    def registers(self, x: Registers, write: bool = False) -> np.ndarray:
        if x in self.owned:
            self.hazard("accumulator", f"{x.name} touched while {self.owned[x].operation.what} owns it")
        self.dirty.add(x)
        return self.arrays[x]

    def fragment(self, x: Registers) -> np.ndarray:
        return self.arrays[x]

    # -- ordinary accesses -----------------------------------------------------------------------------
    def load(
        self, space: str, address: Any, nbytes: int, *, rank: Any = None, order: str = "weak", mask: Any = None
    ) -> np.ndarray:
        result = np.zeros((len(self.threads), nbytes), np.uint8)
        self.time += self.state.chip.memory_instruction
        for part, rows, cta, addresses in self._accesses(address, rank, mask):
            if order == "acquire":
                for x in addresses:
                    if int(x) in self.state.releases:
                        part.warp.acquire(part.partial, self.state.releases[int(x)])
            else:
                self._touch(part, cta, space, addresses, nbytes, write=False)
            result[rows] = self._gather(space, cta, addresses, nbytes)
        return result

    def store(
        self, space: str, address: Any, data: np.ndarray, *, rank: Any = None, order: str = "weak", mask: Any = None
    ) -> None:
        self.time += self.state.chip.memory_instruction
        for part, rows, cta, addresses in self._accesses(address, rank, mask):
            if order == "release":
                clock = part.warp.release(part.partial)
                for x in addresses:
                    self.state.releases.setdefault(int(x), Clock(self.state.agents)).join(clock)
            else:
                self._touch(part, cta, space, addresses, data.shape[1], write=True)
            target, offsets = self._raw(space, cta, addresses, data.shape[1])
            if target is not None:
                scatter(target, offsets, data[rows])

    def atomic(
        self, space: str, address: Any, dtype: Any, update: Callable[[Any, Any], Any], operand: np.ndarray
    ) -> np.ndarray:
        old = np.zeros(len(self.threads), np.dtype(dtype))
        self.time += self.state.chip.memory_instruction
        size = old.itemsize
        for _, rows, cta, addresses in self._accesses(address, None, None):
            for row, place in zip(rows, addresses, strict=True):
                target, offsets = self._raw(space, cta, np.array([place]), size)
                if target is None:
                    continue
                old[row] = target[offsets[0] : offsets[0] + size].view(dtype)[0]
                new = np.asarray(update(old[row], np.dtype(dtype).type(operand[row])), dtype).reshape(1)
                target[offsets[0] : offsets[0] + size] = new.view(np.uint8)
        return old if old.dtype == np.float32 else old.astype(np.int64)

    def peek(self, access: Access) -> np.ndarray:
        cta = self.cta if access.rank is None else self.cta.cluster[access.rank]
        return self._gather(access.space, cta, access.addresses, access.width)

    def poke(self, access: Access, data: np.ndarray) -> None:
        cta = self.cta if access.rank is None else self.cta.cluster[access.rank]
        target, offsets = self._raw(access.space, cta, access.addresses, access.width)
        if target is not None:
            scatter(target, offsets, data)

    def _accesses(self, address: Any, rank: Any, mask: Any) -> Any:
        """(part, rows, CTA, addresses) of the active threads, by warp and target CTA."""
        addresses = np.broadcast_to(np.asarray(address, np.int64), len(self.threads))
        for part in self.parts if mask is None else self._parts(np.asarray(mask)):
            if rank is None:
                yield part, part.rows, self.cta, addresses[part.rows]
                continue
            ranks = np.broadcast_to(np.asarray(rank), len(self.threads))[part.rows]
            for r in np.unique(ranks):
                rows = part.rows[ranks == r]
                yield part, rows, self.cta.cluster[int(r)], addresses[rows]

    def _raw(self, space: str, cta: Cta, addresses: np.ndarray, width: int) -> tuple[np.ndarray | None, np.ndarray]:
        """The bytes of a memory and offsets into them; None (and a hazard) where an access is outside."""
        if not len(addresses) or not width:
            return None, addresses
        if space == "shared":
            data, offsets, name = cta.shared, addresses & OFFSET_MASK, "shared memory"
        else:
            buffer = self.state.memory.find(int(addresses[0]))
            if buffer is None:
                self.hazard("out of bounds", f"global address {int(addresses[0]):#x} is in no buffer")
                return None, addresses
            data, offsets, name = buffer.data, addresses - buffer.address, buffer.name
        low, high = int(offsets.min()), int(offsets.max()) + width
        if low < (SHARED_BASE if space == "shared" else 0) or high > len(data):
            self.hazard("out of bounds", f"bytes {low}..{high} of {name}, which has {len(data)}")
            return None, offsets
        return data, offsets

    def _gather(self, space: str, cta: Cta, addresses: np.ndarray, width: int) -> np.ndarray:
        data, offsets = self._raw(space, cta, addresses, width)
        return np.zeros((len(addresses), width), np.uint8) if data is None else gather(data, offsets, width)

    def _touch(self, part: Part, cta: Cta, space: Any, addresses: np.ndarray, width: int, write: bool) -> None:
        agent, clock = part.warp.enter(part.partial)
        event = Event(agent, int(clock.vector[0, agent]), 0, "write" if write else "read", self.name, self.where)
        self._shadow(Access(space, addresses, width), cta, write, event, clock, is_async=False)

    def _shadow(self, access: Access, cta: Cta, write: bool, event: Event, clock: Clock, is_async: bool) -> None:
        if not len(access.addresses) or not access.width:
            return
        data, offsets = self._raw(access.space, cta, access.addresses, access.width)
        if data is None:
            return
        if access.space == "shared":
            shadow, name = cta.shadow, self.state.place(int(access.addresses[0]))[0]
        else:
            buffer = self.state.memory.find(int(access.addresses[0]))
            assert buffer is not None
            if write and not buffer.writable:
                self.hazard("out of bounds", f"write to {buffer.name}, which is an input")
            if not buffer.writable:
                return
            shadow, name = self.state.global_shadow(buffer), buffer.name
        number = self.state.events.add(event)
        shadow.access(offsets, access.width, write, number, clock, is_async and access.space == "shared", name)

    # -- mbarriers -------------------------------------------------------------------------------------
    def mbarrier(self, cta: Cta, address: int, clock: Clock, remote: bool) -> Mbarrier:
        """The mbarrier at an address, which `clock` must know to be initialised."""
        found = cta.mbarriers.get(address & OFFSET_MASK)
        name = self.state.place(address)[0]
        if found is None:
            raise self.state.stop("barrier", f"{name} is used but was never initialised [{self.name}]", self.where)
        agent, count = found.initialiser
        if clock.vector[0, agent] < count:
            self.hazard("barrier", f"{name} is used before its init is known: a barrier of all threads must follow it")
        elif remote and (found.fence is None or clock.vector[0, agent] < found.fence[1]):
            self.hazard("barrier", f"the init of {name} is not fenced for the cluster and the async proxy")
        return found

    def mbarrier_init(self, address: Any, count: int) -> None:
        part = self.parts[0]
        agent, clock = part.warp.enter(part.partial)
        offset = int(address) & OFFSET_MASK
        name = self.state.place(int(address))[0]
        if offset in self.cta.mbarriers:
            self.hazard("barrier", f"{name} is initialised twice")
        if count < 1:
            raise self.state.stop("barrier", f"{name} is initialised for {count} arrivals", self.where)
        self.cta.mbarriers[offset] = Mbarrier(name, count, (agent, int(clock.vector[0, agent])), self.state.agents)

    def mbarrier_arrive(self, address: Any, *, count: int = 1, expect_tx: Any = 0, rank: Any = None) -> None:
        self.time += self.state.chip.instruction
        for part in self.parts:
            lanes = len(part.rows)
            addresses = np.broadcast_to(np.asarray(address), len(self.threads))[part.rows]
            ranks = np.broadcast_to(np.asarray(-1 if rank is None else rank), len(self.threads))[part.rows]
            bytes_ = np.broadcast_to(np.asarray(expect_tx), len(self.threads))[part.rows]
            agent, clock = part.warp.enter(part.partial)
            event = Event(agent, int(clock.vector[0, agent]), 0, "arrive", self.name, self.where)
            released = part.warp.release(part.partial)
            for where in sorted({(int(r), int(a)) for r, a in zip(ranks, addresses, strict=True)}):
                cta = self.cta if where[0] < 0 else self.cta.cluster[where[0]]
                chosen = (ranks == where[0]) & (addresses == where[1])
                arrivals = lanes if chosen.all() else int(chosen.sum())
                barrier = self.mbarrier(cta, where[1], clock, remote=cta is not self.cta)
                if cta is not self.cta:
                    cta.remote.append(event)
                if not barrier.arrive(arrivals * count, int(bytes_[chosen].sum()), released, self.time):
                    raise self.state.stop(
                        "over-arrival",
                        f"{barrier.name} phase {barrier.phase} takes {barrier.count} arrivals, "
                        f"{barrier.count - barrier.pending} came [{self.name}]", self.where,
                    )  # fmt: skip

    def mbarrier_expect_tx(self, address: Any, nbytes: Any) -> None:
        barrier = self.mbarrier(self.cta, int(address), self.parts[0].warp.clock, remote=False)
        lanes = sum(len(part.rows) for part in self.parts)
        barrier.tx += int(nbytes) * lanes if np.ndim(nbytes) == 0 else int(np.asarray(nbytes)[self.active].sum())

    def mbarrier_test(self, address: Any, parity: Any) -> bool:
        barrier, phase = self._awaited(int(address), int(parity))
        if not barrier.done(int(parity)):
            return False
        self._observe(barrier, phase)
        return True

    def mbarrier_wait(self, address: Any, parity: Any) -> Blocking:
        parity = int(parity)
        barrier, phase = self._awaited(int(address), parity)
        if not barrier.done(parity):
            yield Wait(
                lambda: barrier.done(parity),
                lambda: (
                    f"{barrier.name} phase {phase} (parity {parity}): {barrier.pending} of {barrier.count} arrivals "
                    f"and {barrier.tx} bytes are missing in phase {barrier.phase}"
                ),
            )
            self._awaited(int(address), parity)
        began = self.time
        self._observe(barrier, phase)
        self.waited(began, barrier.name)

    def _awaited(self, address: int, parity: int) -> tuple[Mbarrier, int]:
        part = self.parts[0]
        barrier = self.mbarrier(self.cta, address, part.warp.enter(part.partial)[1], remote=False)
        phase = barrier.awaited(self, parity)
        if barrier.phase - phase >= 2:
            self.hazard(
                "phase aliasing",
                f"a wait for phase {phase} of {barrier.name} while phase {barrier.phase} runs: parity {parity} "
                "does not tell them apart",
            )
        return barrier, phase

    def _observe(self, barrier: Mbarrier, phase: int) -> None:
        barrier.observed[self] = phase
        for part in self.parts:
            part.warp.acquire(part.partial, barrier.completed)
        self.time = max(self.time, barrier.completed_at) + self.state.chip.barrier

    def waited(self, began: int, what: str) -> None:
        """The unit stood still from `began` until now; before that it was busy."""
        add = self.state.timeline.add
        add(Span(self.block, self.name, "busy", self.busy_since, began, "instructions"))
        add(Span(self.block, self.name, "wait", began, self.time, f"wait for {what}"))
        self.busy_since = self.time

    # -- barriers of threads -----------------------------------------------------------------------------
    def barrier_sync(self, identifier: Any, threads: int) -> Blocking:
        barrier = self._arrive_at(int(identifier), threads)
        yield from self._wait_for(barrier, barrier.generation - (barrier.arrived == 0), "barrier")

    def barrier_arrive(self, identifier: Any, threads: int) -> None:
        self._arrive_at(int(identifier), threads)

    def _arrive_at(self, identifier: int, threads: int) -> ThreadBarrier:
        barrier = self.cta.named.setdefault(identifier, ThreadBarrier(f"named barrier {identifier}", threads))
        if barrier.expected != threads and barrier.arrived:
            self.hazard("barrier", f"{barrier.name} with {threads} threads where others said {barrier.expected}")
        barrier.expected = threads
        self._arrive(barrier)
        return barrier

    def _arrive(self, barrier: ThreadBarrier) -> None:
        if any(part.partial for part in self.parts):
            self.hazard("barrier", f"{barrier.name} reached by a part of a warp")
        clock = Clock(self.state.agents)
        for part in self.parts:
            part.warp.sync()
            clock.join(part.warp.release(partial=False))
        self.time += self.state.chip.instruction
        barrier.arrive(int(self.active.sum()), clock, self.time)

    def _wait_for(self, barrier: ThreadBarrier, generation: int, what: str) -> Blocking:
        if barrier.generation <= generation:
            yield Wait(
                lambda: barrier.generation > generation,
                lambda: f"{barrier.name}: {barrier.arrived} of {barrier.expected} threads have arrived",
            )
        began = self.time
        self.time = max(self.time, barrier.opened_at) + self.state.chip.barrier
        assert barrier.opened is not None
        for part in self.parts:
            part.warp.acquire(False, barrier.opened)
            part.warp.sync()
        self.waited(began, what)

    def warp_sync(self) -> None:
        for part in self.parts:
            if part.partial:
                self.hazard("barrier", "__syncwarp of all lanes reached by some")
            else:
                part.warp.sync()

    def cluster_arrive(self, release: bool = True) -> None:
        number = self.block // self.cluster_size
        barrier = self.state.cluster_barriers.setdefault(
            number, ThreadBarrier("cluster barrier", self.cluster_size * self.state.kernel.threads)
        )
        if self.cluster_generation is not None:
            self.hazard("barrier", "barrier.cluster.arrive twice without a wait")
        self.cluster_generation = barrier.generation
        self._arrive(barrier)

    def cluster_wait(self) -> Blocking:
        if self.cluster_generation is None:
            self.hazard("barrier", "barrier.cluster.wait without an arrive")
            return
        barrier = self.state.cluster_barriers[self.block // self.cluster_size]
        generation, self.cluster_generation = self.cluster_generation, None
        yield from self._wait_for(barrier, generation, "cluster")

    def fence(self, kind: str) -> None:
        self.time += self.state.chip.instruction
        if kind == "wgmma":
            self.dirty.clear()
            return
        for part in self.parts:
            if kind == "proxy.async":
                part.warp.fence_proxy(part.partial)
            elif kind == "mbarrier_init":
                agent, clock = part.warp.enter(part.partial)
                for barrier in self.cta.mbarriers.values():
                    if barrier.initialiser[0] == agent and barrier.fence is None:
                        barrier.fence = (agent, int(clock.vector[0, agent]))

    def set_register_budget(self, registers: int) -> Blocking:
        warps, change = len(self.warps), registers - self.budget
        self.budget = registers
        if change > 0 and self.cta.free_registers < change * warps:
            yield Wait(
                lambda: self.cta.free_registers >= change * warps,
                lambda: f"{change} more registers a thread: the pool has {self.cta.free_registers // warps}",
            )
        self.cta.free_registers -= change * warps

    # -- asynchronous operations -------------------------------------------------------------------------
    def start(self, operation: AsyncOperation) -> None:
        state, first = self.state, self.parts[0]
        threads = int(self.active.sum())
        if operation.engine == "tma" and threads != 1:
            self.hazard("duplicate issue", f"{operation.what} by {threads} threads, each of which copies")
        if operation.engine == "tensor" and threads != 128:
            raise state.stop("barrier", f"{operation.what} by {threads} threads; a warpgroup's 128 must", self.where)
        clock = first.warp.enter(first.partial)[1].copy()
        for part in self.parts[1:]:
            other = part.warp.enter(part.partial)[1]
            clock.vector, clock.done = np.minimum(clock.vector, other.vector), clock.done & other.done
        bits = 1 << 2 * state.started, 2 << 2 * state.started
        state.started += 1
        running = Running(operation, self, clock, bits, self._schedule(operation), self.where)
        for accesses, write, bit in ((operation.reads, False, bits[0]), (operation.writes, True, bits[1])):
            for access in accesses:
                cta = self.cta if access.rank is None else self.cta.cluster[access.rank]
                what = f"{'write' if write else 'read'} of {operation.what}"
                event = Event(-1, 0, bit, what, self.name, self.where)
                self._shadow(access, cta, write, event, clock, operation.proxy == "async")
                if cta is not self.cta:
                    cta.remote.append(event)
        if operation.engine == "tensor":
            self._own(running)
        state.running.append(running)
        state.all_operations.append(running)
        if operation.group:
            self.open.setdefault(self._group(operation.group), []).append(running)

    def _own(self, running: Running) -> None:
        for registers in running.operation.owns:
            if registers in self.dirty:
                self.hazard(
                    "accumulator", f"{registers.name} was accessed and no wgmma.fence orders that before the wgmma"
                )
            self.owned[registers] = running
        running.after, self.last_tensor = self.last_tensor, running

    def _schedule(self, operation: AsyncOperation) -> int:
        """When the operation ends; its engine is taken until then, or until its data is on the way."""
        chip, engines = self.state.chip, self.cta.engines
        self.time += chip.instruction
        row = "TMA store" if operation.group == "bulk" else ENGINE_ROWS[operation.engine]
        begin = max(self.time, engines.get(row, 0))
        if operation.engine == "tensor":
            duration, latency = int(operation.work), 0
        else:
            duration = int(operation.work / chip.tma_bytes_per_cycle)
            latency = chip.store_latency if operation.group == "bulk" else chip.tma_latency
        engines[row] = begin + duration
        kind = "mma" if operation.engine == "tensor" else "store" if operation.group == "bulk" else "load"
        seen = operation.completes[0][1] if operation.completes else None
        if seen is None and operation.engine == "tensor":
            seen = int(operation.reads[-1].addresses[0])
        stage = self.state.place(seen)[1] if seen is not None else None
        self.state.timeline.add(
            Span(self.block, row, kind, begin + latency, begin + latency + duration, operation.what, stage)
        )
        return begin + duration + latency

    def _group(self, group: str) -> object:
        return (group, int(self.parts[0].rows[0])) if group == "bulk" else group

    def commit_group(self, group: str) -> None:
        key = self._group(group)
        self.groups.setdefault(key, []).append(self.open.pop(key, []))

    def wait_group(self, group: str, pending: int, *, read: bool = False) -> Blocking:
        groups = self.groups.setdefault(self._group(group), [])
        waited = groups[: max(0, len(groups) - pending)]
        operations = [running for members in waited for running in members]
        if not all(running.finished for running in operations):
            yield Wait(
                lambda: all(running.finished for running in operations),
                lambda: f"{sum(not r.finished for r in operations)} operations of {group} groups",
            )
        began = self.time
        bits = 0
        for running in operations:
            bits |= running.bits[0] if read else running.bits[0] | running.bits[1]
            self.time = max(self.time, running.end)
            for registers in running.operation.owns:
                if self.owned.get(registers) is running:
                    del self.owned[registers]
        for part in self.parts:
            part.warp.enter(part.partial)[1].done |= bits
        if not read:
            del groups[: len(waited)]
        self.time += self.state.chip.instruction
        self.waited(began, f"{group} group")
