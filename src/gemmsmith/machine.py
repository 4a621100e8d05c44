"""The interface between the `simulate` methods of instructions and the simulator, which implements it.

One machine is one unit: the 32 threads of a warp or the 128 threads of a warpgroup, in lockstep, in one CTA. T is the
number of its threads. A value is uniform (a Python scalar) or an array (T,) over the unit's threads. Methods that
return a generator may block: an instruction calls them with `yield from`.

In the methods, `rank` is the cluster rank of the CTA whose shared memory is accessed (None: the unit's own CTA), and
`scope` and `order` are those of the PTX memory model.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from gemmsmith.lang.values import RegisterArray, Value

Space = Literal["shared", "global"]
AsyncGroupKind = Literal["wgmma", "bulk", "cp.async"]
Proxy = Literal["async", "generic"]
Scope = Literal["cta", "cluster", "gpu"]
FenceKind = Literal["proxy.async.shared::cta", "proxy.async.global", "mbarrier_init", "wgmma", "acq_rel"]
MemoryOrder = Literal["weak", "relaxed", "acquire", "release", "acq_rel"]
Blocking = Generator[Any, None, Any]
"""Execution that may block: yields what its threads wait for, and returns an instruction's result."""


CLUSTER_RANK_SHIFT = 24
"""First bit of the CTA's cluster rank in a shared::cluster address, as on hardware."""


class MbarrierTx(NamedTuple):
    """The complete_tx of an asynchronous operation on one mbarrier."""

    rank: int | None
    """Cluster rank of the CTA that holds the mbarrier, None for the issuing CTA."""
    address: int
    nbytes: int


@dataclass
class Access:
    """Bytes accessed by an asynchronous operation: `width` bytes at each of `addresses`.

    Attributes:
        space: "shared" or "global" memory.
        addresses: Addresses of the accessed pieces.
        width: Bytes of each piece.
        rank: Cluster rank of the CTA whose shared memory is accessed; None: the issuing CTA.
        threads: Index in the unit of the thread that accesses each address; None: a copy engine does.
        first: Lowest address; 0 if there are none.
        last: Highest address; 0 if there are none.
        bits: The bits that are set in any address, to check alignment.
    """

    space: Space
    addresses: np.ndarray
    width: int
    rank: int | None = None
    threads: np.ndarray | None = None
    first: int = field(init=False)
    last: int = field(init=False)
    bits: int = field(init=False)

    def __post_init__(self) -> None:
        """Compute what follows from the addresses."""
        x = self.addresses
        self.first = self.last = self.bits = 0
        if len(x):
            self.first, self.last = int(np.minimum.reduce(x)), int(np.maximum.reduce(x))
            self.bits = int(np.bitwise_or.reduce(x))


@dataclass
class AsyncOperation:
    """An operation that completes after its instruction: a TMA copy, one wgmma, a cp.async.

    Attributes:
        label: What it is, in words, for reports and the timeline.
        engine: What executes it: TMA, a tensor core, or the copies of cp.async.
        perform: Moves the data (or multiplies), on completion.
        reads: Memory that it reads.
        writes: Memory that it writes.
        complete_tx: The mbarriers that receive a complete_tx on completion.
        arrive_on: (address, threads): so many threads arrive at this mbarrier when their prior cp.asyncs have
            completed; None: no arrival.
        group: The kind of group by which it is waited for; None: it is waited for by mbarriers.
        register_operands: Registers that it uses until completion.
        proxy: The proxy of its memory accesses.
    """

    label: str
    engine: Literal["tma", "tensor", "copy"]
    perform: Callable[[], None]
    reads: list[Access] = field(default_factory=list)
    writes: list[Access] = field(default_factory=list)
    complete_tx: list[MbarrierTx] = field(default_factory=list)
    arrive_on: tuple[int, int] | None = None
    group: AsyncGroupKind | None = None
    register_operands: list[RegisterArray] = field(default_factory=list)
    proxy: Proxy = "async"
    coordinates: tuple[int, ...] = ()
    """Coordinates of a TMA box."""
    nbytes: int = 0
    """Bytes moved, of the engines tma and copy."""
    tensor_cycles: float = 0
    """Cycles of the tensor core, of the engine tensor."""


class Registers(Protocol):
    """The register arrays of the unit, and its register budget."""

    def view(self, x: RegisterArray, write: bool = False) -> np.ndarray:
        """Return a live view (T, count) of an array of `count` registers, which can be written to if `write`.

        Reports a hazard if an asynchronous operation is using the registers.
        """

    def view_unchecked(self, x: RegisterArray) -> np.ndarray:
        """Return a live view (T, count) without checks, for the asynchronous operation that uses the registers."""

    def fence_operand(self, x: RegisterArray) -> None:
        """Execute a compiler barrier: no later access to the registers is moved above it."""

    def set_budget(self, registers: int, action: Literal["inc", "dec"]) -> Blocking:
        """Execute setmaxnreg of a warpgroup: set its registers per thread to `registers`.

        With "inc" it blocks until the CTA's pool has the registers, which "dec" returns to it.
        """


class Memory(Protocol):
    """Shared and global memory: ordinary accesses (generic proxy) by the active threads."""

    def load(
        self, space: Space, address: Any, nbytes: int, *, rank: Any = None, order: MemoryOrder = "weak",
        scope: Scope = "gpu", mask: Any = None,
    ) -> np.ndarray:  # fmt: skip
        """Load `nbytes` bytes at each thread's address; return them as uint8 (T, nbytes), zero for inactive threads.

        With `order` "acquire" it synchronizes with a release at `scope`; weak accesses have no scope. `rank` is a
        scalar or an array (T,). `mask` (T,) restricts the active threads; None: no restriction.
        """

    def store(
        self, space: Space, address: Any, data: np.ndarray, *, rank: Any = None, order: MemoryOrder = "weak",
        scope: Scope = "gpu", mask: Any = None,
    ) -> None:  # fmt: skip
        """Store (T, nbytes) bytes (uint8). The arguments are those of `load`."""

    def atomic(
        self, address: np.ndarray, dtype: Any, update: Callable[[Any, Any], Any], operand: np.ndarray, *,
        order: MemoryOrder = "relaxed", scope: Scope = "gpu", returns: bool = True, rounds: bool = False,
    ) -> np.ndarray:  # fmt: skip
        """Replace the value at each thread's address by update(value, operand), in thread order; return the old values.

        Args:
            address: Addresses in global memory (T,).
            dtype: numpy dtype of the values.
            update: Returns the new value.
            operand: The operand of each thread (T,).
            order: Memory order.
            scope: Memory scope.
            returns: Whether the instruction returns the old values (atom) or not (red).
            rounds: Whether the update rounds, so that the final value depends on the order of the updates.
        """

    def spin_wait(
        self, address: Any, ready: Callable[[int], bool], description: str, order: Literal["acquire", "relaxed"],
        scope: Scope = "gpu", max_polls: int | None = None,
    ) -> Blocking:  # fmt: skip
        """Poll a 32-bit word of global memory until `ready(word)`, at most `max_polls` times, and return it.

        `max_polls` None: without a limit. `description` names the condition in reports of deadlocks.
        """

    def peek(self, access: Access) -> np.ndarray:
        """Return the current bytes (len(addresses), width) as uint8, unchecked: for `AsyncOperation.perform`."""

    def poke(self, access: Access, data: np.ndarray) -> None:
        """Write bytes (len(addresses), width), unchecked: for `AsyncOperation.perform`."""


class Mbarriers(Protocol):
    """The mbarriers. Every active thread arrives, at its own `address`; waits are uniform."""

    def init(self, address: Any, count: int) -> None:
        """Initialize an mbarrier with an expected arrival count."""

    def arrive(self, address: Any, *, expect_tx: Any = 0, rank: Any = None, scope: Scope = "cta") -> None:
        """Arrive with release semantics at `scope`. `rank`: the CTA of the cluster that holds the barrier."""

    def expect_tx(self, address: Any, nbytes: Any) -> None:
        """Add to the pending bytes of the current phase without an arrival."""

    def test(self, address: Any, parity: Any, scope: Scope = "cta") -> bool:
        """Return whether the phase of that parity has completed; if so, acquires at `scope`. Never blocks."""

    def wait(self, address: Any, parity: Any, scope: Scope = "cta") -> Blocking:
        """Wait until the phase of that parity has completed; acquires at `scope`."""


class Barriers(Protocol):
    """The barriers of the warp, of the CTA and of the cluster."""

    def sync(self, identifier: Any, threads: int) -> Blocking:
        """Execute bar.sync on a named barrier of the CTA. Barrier 0 with all threads is __syncthreads."""

    def arrive(self, identifier: Any, threads: int) -> None:
        """Execute bar.arrive on a named barrier of the CTA."""

    def warp_sync(self) -> None:
        """Execute __syncwarp, which orders the ordinary accesses of the lanes of each warp."""

    def cluster_arrive(self, *, relaxed: bool = False) -> None:
        """Arrive at the cluster barrier, with release semantics unless `relaxed`."""

    def cluster_wait(self) -> Blocking:
        """Wait until all threads of the cluster have arrived at the cluster barrier; acquires."""


class AsyncOperations(Protocol):
    """Asynchronous operations, and the groups by which they are waited for."""

    def start(self, operation: AsyncOperation) -> None:
        """Start an asynchronous operation."""

    def commit(self, kind: AsyncGroupKind) -> None:
        """Commit the unit's uncommitted operations of that kind as one group."""

    def wait(self, kind: AsyncGroupKind, pending: int, *, read: bool = False) -> Blocking:
        """Wait until at most `pending` of the unit's latest groups of that kind are incomplete.

        `read`: wait only until the others have read their sources (cp.async.bulk.wait_group.read).
        """


class Machine(Protocol):
    """The machine that an instruction runs on: one unit of T threads in lockstep, and its parts.

    Attributes:
        threads: (T,), the threads' indices in the CTA.
        active: (T,), whether each thread executes this instruction.
        block_index: blockIdx.x.
        grid_size: gridDim.x.
        rank: The CTA's rank in the cluster.
        cluster_size: CTAs in the cluster.
        elected: The lane that elect.sync chooses.
        seed: Selects among behaviors that the ISA leaves unspecified.
        registers: The threads' registers.
        memory: Global and shared memory.
        mbarriers: The CTAs' mbarriers.
        barriers: The barriers of the CTA and of the cluster.
        async_operations: Operations in flight: TMA, wgmma, cp.async.
    """

    threads: np.ndarray
    active: np.ndarray
    block_index: int
    grid_size: int
    rank: int
    cluster_size: int
    elected: int
    seed: int
    registers: Registers
    memory: Memory
    mbarriers: Mbarriers
    barriers: Barriers
    async_operations: AsyncOperations

    def value(self, x: Value) -> Any:
        """Return the value: a Python scalar if uniform, else an array (T,); a TensorMap for a tensor-map parameter."""

    def per_thread(self, x: Value) -> np.ndarray:
        """Return the value per thread as a read-only array (T,) of int64, float32 or bool."""

    def uniform(self, x: Value) -> Any:
        """Return the value that all active threads share. Reports a hazard if they differ."""

    def require_converged(self, label: str) -> None:
        """Report a hazard unless all lanes of each warp are active.

        `.aligned` instructions and full-mask shuffles, such as `label`, require it.
        """

    def multiply(self, label: str, cycles: int) -> None:
        """Take the time of an instruction of the tensor cores, such as `label`: `cycles` if each warp has one alone."""

    def fence(self, kind: FenceKind, scope: Scope = "gpu") -> None:
        """Execute a fence in every active thread.

        proxy.async.shared::cta: prior ordinary accesses of the threads to shared memory come before later ones of the
        async proxy.
        proxy.async.global: the same of global memory, for all accesses that are ordered before the fence.
        mbarrier_init: mbarrier inits of the threads become visible to the cluster and to the async proxy.
        wgmma: register accesses of the threads are ordered before subsequent wgmmas.
        acq_rel: a memory fence at `scope`.
        """

    def grid_dependency_wait(self) -> None:
        """Wait until the prerequisite grids have completed and their writes are visible."""

    def report(self, kind: str, message: str) -> None:
        """Report a hazard that the instruction itself detects (a bad descriptor, a misaligned address)."""
