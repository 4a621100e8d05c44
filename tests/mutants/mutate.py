"""Mutants of a kernel: each synchronising statement deleted, moved one step, or changed by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gemmsmith.core.spec import KernelSpec
from gemmsmith.designs.build import build
from gemmsmith.hw import barrier, cluster, fence, mbarrier, memory, tma, wgmma
from gemmsmith.lang import statements as st
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.values import Constant, LateConstant, Operation, Parameter, Value

SYNCHRONISING = (
    mbarrier.MbarrierWait, mbarrier.MbarrierArrive, mbarrier.MbarrierArriveCluster, mbarrier.MbarrierArriveExpectTx,
    mbarrier.FenceMbarrierInit, fence.FenceProxyAsync, wgmma.WgmmaFence, wgmma.WgmmaCommit, wgmma.WgmmaWait,
    tma.BulkCommit, tma.BulkWaitRead, barrier.BarrierSync, barrier.BarrierArrive, barrier.SyncThreads,
    cluster.ClusterArriveRelaxed, cluster.ClusterWait, memory.WaitAcquire, memory.StoreRelease,
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """What was changed (`what`, of which instruction or variable, on which kernel line) in a fresh kernel."""

    what: str
    target: str
    where: str
    kernel: Kernel

    def __str__(self) -> str:
        return f"{self.what} {self.target} at {self.where}"


def mutants(spec: KernelSpec) -> Iterator[Mutant]:
    """Every mutant of the spec's kernel, each in a kernel of its own."""
    number = 0
    while True:
        build.cache_clear()
        kernel = build(spec)
        changes = list(_changes(kernel))
        if number >= len(changes):
            build.cache_clear()
            return
        what, target, where, apply = changes[number]
        apply()
        yield Mutant(what, target, where, kernel)
        number += 1


Change = tuple[str, str, str, Callable[[], None]]


def _changes(kernel: Kernel) -> Iterator[Change]:
    for block in _blocks(kernel.body):
        for position, statement in enumerate(block.statements):
            where = str(statement.where)
            if isinstance(statement, st.Execute) and isinstance(statement.instruction, SYNCHRONISING):
                name = statement.instruction.mnemonic
                yield "delete", name, where, _deletion(block, position)
                for step, direction in ((-1, "earlier"), (1, "later")):
                    other = position + step
                    if 0 <= other < len(block.statements) and _matters(block.statements[other]):
                        yield (
                            f"move {direction} (past {_name(block.statements[other])})",
                            name,
                            where,
                            _swap(block, position, other),
                        )
            yield from _off_by_one(statement, where)


def _blocks(block: st.Block) -> Iterator[st.Block]:
    yield block
    for statement in block.statements:
        for child in st.children(statement):
            yield from _blocks(child)


def _matters(statement: st.Statement) -> bool:
    return isinstance(statement, (st.Execute, st.If, st.Loop))


def _name(statement: st.Statement) -> str:
    if isinstance(statement, st.Execute):
        return statement.instruction.mnemonic
    return type(statement).__name__.lower()


def _deletion(block: st.Block, position: int) -> Callable[[], None]:
    return lambda: block.statements.pop(position) and None


def _swap(block: st.Block, a: int, b: int) -> Callable[[], None]:
    def apply() -> None:
        s = block.statements
        s[a], s[b] = s[b], s[a]

    return apply


def _set(thing: object, name: str, value: object) -> Callable[[], None]:
    return lambda: setattr(thing, name, value)


def _off_by_one(statement: st.Statement, where: str) -> Iterator[Change]:
    if isinstance(statement, st.Declare) and statement.variable.name.endswith("_phase"):
        assert isinstance(statement.initial, Constant)
        flipped = Constant(statement.initial.type, 1 - statement.initial.number)
        yield "flip start of", statement.variable.name, where, _set(statement, "initial", flipped)
    if isinstance(statement, st.If) and isinstance(statement.condition, Operation) and statement.condition.op == "==":
        last = statement.condition.operands[1]
        if isinstance(last, Constant) and any(
            isinstance(s, st.Assign) and s.variable.name.endswith("_phase") for s in statement.then.statements
        ):
            condition = statement.condition
            for change in (-1, 1):
                operands = (condition.operands[0], Constant(last.type, last.number + change))
                yield f"{change:+d} stages of", "advance", where, _set(condition, "operands", operands)
    if not isinstance(statement, st.Execute):
        return
    i = statement.instruction
    if isinstance(i, mbarrier.MbarrierInit):
        for change in (-1, 1):
            assert isinstance(i.count, (Constant, LateConstant))
            count = (i.count.number or 0) + change
            if count:
                yield f"{change:+d} arrivals of", i.mnemonic, where, _set(i, "count", Constant(i.count.type, count))
    if isinstance(i, mbarrier.MbarrierArriveExpectTx):
        for change in (-16, 16):
            nbytes: Value = Parameter(i.tx_bytes.type, f"{i.tx_bytes.name}{change:+d}")  # given beside the right one
            if isinstance(i.tx_bytes, Constant):
                nbytes = Constant(i.tx_bytes.type, i.tx_bytes.number + change)
            yield f"{change:+d} bytes of", i.mnemonic, where, _set(i, "tx_bytes", nbytes)
    if isinstance(i, (wgmma.WgmmaWait, tma.BulkWaitRead)):
        yield "+1 pending of", i.mnemonic, where, _set(i, "pending", i.pending + 1)
    if isinstance(i, barrier.BarrierSync):
        yield "-32 threads of", i.mnemonic, where, _set(i, "threads", i.threads - 32)
