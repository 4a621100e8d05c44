"""cp.async: each thread copies 4, 8 or 16 bytes from global to shared memory. PTX ISA, "cp.async"."""

from __future__ import annotations

import numpy as np

from gemmsmith.core.errors import KernelError
from gemmsmith.lang.instruction import Instruction, u32, u64
from gemmsmith.lang.machine import Access, AsyncOperation, Blocking, Machine


class CpAsync(Instruction):
    """Copies `source_bytes` (at most `nbytes`) and fills the rest with zeros."""

    destination: u32
    source: u64
    source_bytes: u32
    nbytes: int

    def check(self) -> None:
        if self.nbytes not in (4, 8, 16):
            raise KernelError(f"cp.async moves 4, 8 or 16 bytes, not {self.nbytes}")

    def text(self) -> str:
        level = "cg" if self.nbytes == 16 else "ca"
        return f"cp.async.{level}.shared.global [{{destination}}], [{{source}}], {self.nbytes}, {{source_bytes}};"

    def simulate(self, m: Machine) -> None:
        active = m.active
        to, source = m.column(self.destination)[active], m.column(self.source)[active]
        sizes, threads = m.column(self.source_bytes)[active], np.flatnonzero(active)
        writes = Access("shared", to, self.nbytes, threads=threads)
        reads = [
            Access("global", source[sizes == size], int(size), threads=threads[sizes == size])
            for size in np.unique(sizes)
            if size
        ]

        def perform() -> None:
            data = np.zeros((len(to), self.nbytes), np.uint8)
            for access in reads:
                data[sizes == access.width, : access.width] = m.peek(access)
            m.poke(writes, data)

        m.start(
            AsyncOperation("cp.async", "copy", perform, reads=reads, writes=[writes], group="cp.async",
                           proxy="generic", work=len(to) * self.nbytes)
        )  # fmt: skip


class CpAsyncMbarrierArrive(Instruction):
    """One arrival of each executing thread, of those that the barrier counts, once all its copies so far have landed.
    It releases them, and nothing else that the thread has done."""

    barrier: u32
    ptx = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{barrier}];"

    def simulate(self, m: Machine) -> None:
        arrives = m.uniform(self.barrier), int(m.active.sum())
        m.start(AsyncOperation("cp.async.mbarrier.arrive", "copy", lambda: None, arrives=arrives, proxy="generic"))


class CpAsyncCommit(Instruction):
    """Closes this thread's group of copies."""

    ptx = "cp.async.commit_group;"

    def simulate(self, m: Machine) -> None:
        m.commit_group("cp.async")


class CpAsyncWait(Instruction):
    """Until at most `pending` of this thread's groups are open."""

    pending: int
    ptx = "cp.async.wait_group {pending};"

    def simulate(self, m: Machine) -> Blocking:
        yield from m.wait_group("cp.async", self.pending)
