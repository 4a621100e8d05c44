"""What an instruction's `simulate` may ask of the machine it runs on. The simulator implements it.

One machine is one unit: the 32 threads of a warp or the 128 of a warpgroup, in lockstep, in one CTA.
A value is uniform (a Python number) or an array over the unit's threads. Methods that return a generator
may block: an instruction runs them with `yield from`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from gemmsmith.lang.values import Registers, Value

Space = Literal["shared", "global"]
Group = Literal["wgmma", "bulk", "cp.async"]
Scope = Literal["cta", "cluster", "gpu"]
Order = Literal["weak", "relaxed", "acquire", "release", "acq_rel"]
Blocking = Generator[Any, None, Any]


@dataclass
class Access:
    """Bytes an asynchronous operation touches: `width` bytes from each of `addresses`.

    `rank` is the CTA of the cluster whose shared memory it is; None is the unit's own. `threads`: each address is of
    the thread at that position in the unit; None: they are an engine's. `first` and `last` of the addresses are 0 where
    there are none.
    """

    space: Space
    addresses: np.ndarray
    width: int
    rank: int | None = None
    threads: np.ndarray | None = None
    first: int = field(init=False)
    last: int = field(init=False)

    def __post_init__(self) -> None:
        none = not len(self.addresses)
        self.first = 0 if none else int(np.minimum.reduce(self.addresses))
        self.last = 0 if none else int(np.maximum.reduce(self.addresses))


@dataclass
class AsyncOperation:
    """Work that goes on after its instruction: a TMA copy, one wgmma, a cp.async.

    It completes at some later time: then `perform` moves the data and `completes` tells the mbarriers,
    as (rank, address, bytes) each. `arrives`, (address, threads), is an arrival of the threads at their CTA's mbarrier
    that comes when all that they have copied by cp.async has landed, and makes that known. One that belongs to a
    `group` is waited for by that group instead. `owns` are register arrays nobody may touch meanwhile. `proxy` is
    through which it sees shared memory.
    """

    what: str
    engine: Literal["tma", "tensor", "copy"]
    perform: Callable[[], None]
    reads: list[Access] = field(default_factory=list)
    writes: list[Access] = field(default_factory=list)
    completes: list[tuple[int | None, int, int]] = field(default_factory=list)
    arrives: tuple[int, int] | None = None
    group: Group | None = None
    owns: list[Registers] = field(default_factory=list)
    proxy: Literal["async", "generic"] = "async"
    work: float = 0
    """Bytes moved (tma, copy) or tensor-core cycles (tensor)."""


class Machine(Protocol):
    """See the module."""

    threads: np.ndarray  # (T,) thread index in the CTA
    active: np.ndarray  # (T,) whether the thread executes this instruction
    block: int  # blockIdx.x
    grid: int  # gridDim.x
    rank: int  # CTA rank in the cluster
    cluster_size: int  # CTAs in the cluster
    elected: int  # the lane that elect.sync chooses
    seed: int  # of what the hardware leaves open

    # -- values ------------------------------------------------------------------------------------
    def value(self, x: Value) -> Any:
        """What it holds: a Python number where uniform, else an array (T,); a TensorMap for such a parameter."""

    def column(self, x: Value) -> np.ndarray:
        """The same as an array (T,), int64 or float32 or bool, which is not to be written to."""

    def uniform(self, x: Value) -> Any:
        """The number that all active threads hold; a hazard where they differ."""

    def registers(self, x: Registers, write: bool = False) -> np.ndarray:
        """(T, count) live view; a hazard where an asynchronous operation owns it."""

    def fragment(self, x: Registers) -> np.ndarray:
        """(T, count) live view, unchecked: for an asynchronous operation that owns it."""

    # -- memory, ordinary accesses (generic proxy) by the active threads -----------------------------
    def load(
        self, space: Space, address: Any, nbytes: int, *, rank: Any = None, order: Order = "weak",
        scope: Scope = "gpu", mask: Any = None,
    ) -> np.ndarray:  # fmt: skip
        """(T, nbytes) uint8, zeros for inactive threads; `order` "acquire" synchronizes with a release, as far as
        `scope`, which ordinary accesses do not have.

        `rank` (number or array) names another CTA's shared memory; `mask` (T,) narrows the active threads.
        """

    def store(
        self, space: Space, address: Any, data: np.ndarray, *, rank: Any = None, order: Order = "weak",
        scope: Scope = "gpu", mask: Any = None,
    ) -> None:  # fmt: skip
        """Stores (T, nbytes) uint8 rows, likewise."""

    def atomic(
        self, space: Space, address: np.ndarray, dtype: Any, update: Callable[[Any, Any], Any], operand: np.ndarray, *,
        order: Order = "relaxed", scope: Scope = "gpu", returns: bool = True,
    ) -> np.ndarray:  # fmt: skip
        """old = memory; memory = update(old, operand), thread after thread; gives (T,) old values, which tell what
        others did unless the instruction does not return them."""

    def peek(self, access: Access) -> np.ndarray:
        """The bytes now, (len(addresses), width) uint8: for `perform` of asynchronous operations, unchecked."""

    def poke(self, access: Access, data: np.ndarray) -> None:
        """Sets the bytes, likewise."""

    # -- mbarriers: every active thread arrives, at its own `address`; waits are uniform -----------------
    def mbarrier_init(self, address: Any, count: int) -> None: ...
    def mbarrier_arrive(
        self, address: Any, *, count: int = 1, expect_tx: Any = 0, rank: Any = None, scope: Scope = "cta"
    ) -> None:
        """Releases what came before, as far as `scope`; `rank` names another CTA's barrier."""

    def mbarrier_expect_tx(self, address: Any, nbytes: Any) -> None:
        """Raises the pending bytes without an arrival."""

    def mbarrier_test(self, address: Any, parity: Any, scope: Scope = "cta") -> bool:
        """Whether the phase of that parity has completed (acquires where it has, as far as `scope`). Never blocks."""

    def mbarrier_wait(self, address: Any, parity: Any, scope: Scope = "cta") -> Blocking: ...

    def wait_word(
        self, address: Any, ready: Callable[[int], bool], what: str, order: Literal["acquire", "relaxed"],
        scope: Scope = "gpu", reads: int | None = None,
    ) -> Blocking:  # fmt: skip
        """Until a word of global memory, which others change, is `ready`, `what` it is not yet, or has been read
        `reads` times; gives it."""

    # -- other synchronization ---------------------------------------------------------------------
    def barrier_sync(self, identifier: Any, threads: int) -> Blocking:
        """bar.sync: a named barrier of the CTA; 0 with all threads is __syncthreads."""

    def barrier_arrive(self, identifier: Any, threads: int) -> None: ...
    def warp_sync(self) -> None:
        """__syncwarp: orders the ordinary accesses of a warp's lanes among themselves."""

    def cluster_arrive(self, *, relaxed: bool = False) -> None: ...
    def cluster_wait(self) -> Blocking: ...

    def converged(self, what: str) -> None:
        """Where all lanes of a warp must execute an instruction together (.aligned, or a full mask): a hazard where
        some do not."""

    def fence(self, kind: Literal["proxy.async", "mbarrier_init", "wgmma", "acq_rel"], scope: Scope = "gpu") -> None:
        """proxy.async: my earlier ordinary accesses become visible to the async proxy.
        mbarrier_init: my mbarrier inits become visible to the cluster and to the async proxy.
        wgmma: my register accesses are ordered before the wgmmas that follow.
        acq_rel: a memory fence, as far as `scope`."""

    def compiler_fence(self, registers: Registers) -> None:
        """The compiler moves no access of the registers from below to above this."""

    def grid_dependency_wait(self) -> None:
        """The grids that this one depends on have ended, and their writes are visible."""

    def set_register_budget(self, registers: int, action: Literal["inc", "dec"]) -> Blocking:
        """setmaxnreg of a warpgroup: blocks until the pool has them."""

    # -- asynchronous operations -----------------------------------------------------------------------
    def start(self, operation: AsyncOperation) -> None: ...
    def commit_group(self, group: Group) -> None: ...
    def wait_group(self, group: Group, pending: int, *, read: bool = False) -> Blocking:
        """Until at most `pending` groups are open; `read`: only that their sources have been read."""

    def report(self, kind: str, message: str) -> None:
        """A hazard the instruction itself sees (a bad descriptor, a misaligned address)."""
