"""cp.async: each thread copies 4, 8 or 16 bytes from global to shared memory. PTX ISA, "cp.async"."""

from __future__ import annotations

import numpy as np

from gemmsmith.core.errors import KernelError
from gemmsmith.lang.instruction import Instruction, u32, u64
from gemmsmith.machine import Access, AsyncOperation, Blocking, Machine


class CpAsync(Instruction):
    """cp.async: each thread copies from global memory (`source`) to shared memory (`destination`), asynchronously.

    It copies `source_bytes` bytes, and fills the rest of the `nbytes` (4, 8 or 16) with zeros.
    """

    destination: u32
    source: u64
    source_bytes: u32
    nbytes: int

    def check(self) -> None:
        if self.nbytes not in (4, 8, 16):
            raise KernelError(f"cp.async: got {self.nbytes} bytes; use 4, 8 or 16")

    def text(self) -> str:
        level = "cg" if self.nbytes == 16 else "ca"
        return f"cp.async.{level}.shared.global [{{destination}}], [{{source}}], {self.nbytes}, {{source_bytes}};"

    def simulate(self, m: Machine) -> None:
        """Start the copies of the active threads as one operation.

        Threads with equal `source_bytes` make one read access, since an access has one width.
        """
        active = m.active
        destination, source = m.per_thread(self.destination)[active], m.per_thread(self.source)[active]
        sizes, threads = m.per_thread(self.source_bytes)[active], np.flatnonzero(active)
        writes = Access("shared", destination, self.nbytes, threads=threads)
        reads = [
            Access("global", source[sizes == size], int(size), threads=threads[sizes == size])
            for size in np.unique(sizes)
            if size
        ]

        def perform() -> None:
            data = np.zeros((len(destination), self.nbytes), np.uint8)
            for access in reads:
                data[sizes == access.width, : access.width] = m.memory.peek(access)
            m.memory.poke(writes, data)

        m.async_operations.start(
            AsyncOperation("cp.async", "copy", perform, reads=reads, writes=[writes], group="cp.async",
                           proxy="generic", nbytes=len(destination) * self.nbytes)
        )  # fmt: skip


class CpAsyncMbarrierArrive(Instruction):
    """cp.async.mbarrier.arrive.noinc: each thread arrives at `barrier` when its earlier cp.asyncs have completed.

    The arrival counts toward the barrier's expected count (.noinc). It orders the copies only, not the thread's other
    accesses.
    """

    barrier: u32
    ptx = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{barrier}];"

    def simulate(self, m: Machine) -> None:
        """Start an operation without data, which arrives when the threads' earlier copies have completed."""
        arrive_on = m.uniform(self.barrier), int(m.active.sum())
        m.async_operations.start(
            AsyncOperation("cp.async.mbarrier.arrive", "copy", lambda: None, arrive_on=arrive_on, proxy="generic")
        )


class CpAsyncCommit(Instruction):
    """cp.async.commit_group: commits the thread's earlier cp.asyncs as one group."""

    ptx = "cp.async.commit_group;"

    def simulate(self, m: Machine) -> None:
        m.async_operations.commit("cp.async")


class CpAsyncWait(Instruction):
    """cp.async.wait_group: waits until all but the `pending` latest of the thread's cp.async-groups have completed."""

    pending: int
    ptx = "cp.async.wait_group {pending};"

    def simulate(self, m: Machine) -> Blocking:
        yield from m.async_operations.wait("cp.async", self.pending)
