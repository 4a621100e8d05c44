"""Mutants of a kernel: each synchronizing statement deleted, moved one step, changed by one, narrowed in scope, or
executed by one lane alone; each arrival moved past a wait; each loop begun one late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any
from unittest import mock

from gemmsmith.backends.sim import run, simulate
from gemmsmith.core.spec import KernelSpec
from gemmsmith.hw import barrier, cluster, cp_async, matrix, mbarrier, memory, mma, register, tma, wgmma, wmma
from gemmsmith.kernels.build import build
from gemmsmith.lang import statements as st
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.location import SourceLocation
from gemmsmith.lang.types import I32, PRED
from gemmsmith.lang.values import Builtin, Constant, Operation, Parameter, Value, VariableRead

SYNCHRONIZING = (
    mbarrier.MbarrierWait, mbarrier.MbarrierArrive, mbarrier.MbarrierArriveRemote, mbarrier.MbarrierArriveExpectTx,
    mbarrier.FenceMbarrierInit, barrier.FenceProxyAsync, wgmma.WgmmaFence, wgmma.WgmmaCommit, wgmma.WgmmaWait,
    tma.BulkCommit, tma.BulkWaitRead, barrier.BarrierSync, barrier.BarrierArrive, barrier.SyncThreads,
    cluster.ClusterArriveRelaxed, cluster.ClusterWait, memory.SpinUntilEqual, memory.StoreStrong,
    cp_async.CpAsyncMbarrierArrive, cp_async.CpAsyncCommit, cp_async.CpAsyncWait,
)  # fmt: skip
ONLY_DELETED = (
    barrier.FenceAcqRel, barrier.GridDependencyWait, wgmma.FenceOperand, barrier.SyncWarp, register.SetMaxNReg,
)  # fmt: skip
"""Where these stand among their neighbors does not matter."""
ALIGNED = (
    register.SetMaxNReg, wgmma.WgmmaFence, wgmma.WgmmaCommit, wgmma.WgmmaWait, barrier.BarrierSync, barrier.SyncThreads,
    barrier.SyncWarp, cluster.ClusterArriveRelaxed, cluster.ClusterWait, matrix.StoreMatrix, matrix.LoadMatrix,
    mma.MmaSync, wmma.WmmaLoad, wmma.WmmaMma, wmma.WmmaStore,
)  # fmt: skip
"""All lanes of a warp execute them together."""
ARRIVALS = mbarrier.MbarrierArrive, mbarrier.MbarrierArriveRemote, mbarrier.MbarrierArriveExpectTx


@dataclass(frozen=True)
class Mutant:
    """What was changed (`what`, of which instruction or variable, on which kernel line) in a fresh kernel."""

    what: str
    target: str
    where: SourceLocation
    kernel: Kernel

    def __str__(self) -> str:
        return f"{self.what} {self.target} at {self.where}"


CLASSES = {
    "delete": "deleted: a wait, arrival, fence, barrier, commit, setmaxnreg",
    "move": "moved past a neighbor",
    "of": "changed by one: arrivals, bytes, stages, pending groups, threads, the first phase",
    "narrow": "narrowed to the scope .cta",
    "relax": "relaxed: a release that is none",
    "by": "executed by one lane",
    "swap": "setmaxnreg, inc and dec swapped",
    "arrive": "an arrival moved past the wait before or after it",
    "late": "a loop that begins one late",
    "other": "a proxy fence of the other memory",
}


def kind_of(what: str) -> str:
    """The class of a change."""
    first = what.split()[0]
    return first if first in CLASSES else "of"


MAX_HAZARDS = 20
"""Hazards after which an execution stops, if the first is not of the expected kind."""


def first_kinds(execute: Callable[[int, int], tuple[set[str], str]], expected: set[str], schedules: int) -> set[str]:
    """The kinds of hazard of the first schedule that has one: the first hazard's if it is expected, or those of all.

    `execute`: of a schedule's seed and of the number of hazards after which it stops, the kinds, and what the
    simulator says of other schedules (`Verdict.scope`).
    """
    for seed in range(schedules):
        kinds, scope = execute(seed, 1)
        if kinds and not kinds & expected:
            kinds, _ = execute(seed, MAX_HAZARDS)
        if kinds or scope == "every schedule":
            return kinds
    return set()


@contextmanager
def stopping_after(hazards: int) -> Iterator[None]:
    """Launches in the simulator stop after so many hazards."""
    with mock.patch.object(run, "simulate", partial(simulate, max_hazards=hazards)):
        yield


def changes_of(spec: KernelSpec) -> list[str]:
    """What the changes of a spec's kernel are, without making them."""
    build.cache_clear()
    return [what for what, *_ in _changes(build(spec))]


def mutants(spec: KernelSpec) -> Iterator[Mutant]:
    """Every mutant of the spec's kernel, each in a kernel of its own."""

    def fresh() -> Kernel:
        build.cache_clear()
        return build(spec)

    yield from mutants_of(fresh)
    build.cache_clear()


def mutants_of(make: Callable[[], Kernel]) -> Iterator[Mutant]:
    """The same of a kernel that `make` makes anew."""
    for number in count():
        kernel = make()
        change = next(islice(_changes(kernel), number, None), None)
        if change is None:
            return
        what, target, where, apply = change
        apply()
        yield Mutant(what, target, where, kernel)


Change = tuple[str, str, SourceLocation, Callable[[], None]]
"""What is changed, of which instruction or variable, in which statement, and what does it."""


def _changes(kernel: Kernel) -> Iterator[Change]:
    for block in _blocks(kernel.body):
        block.statements = [s for s in block.statements if not isinstance(s, st.Comment)]
        for position, statement in enumerate(block.statements):
            where = statement.location
            if isinstance(statement, st.IssueInstruction) and isinstance(
                statement.instruction, (*SYNCHRONIZING, *ONLY_DELETED)
            ):
                name = statement.instruction.mnemonic
                yield "delete", name, where, _deletion(block, position)
                steps = () if isinstance(statement.instruction, ONLY_DELETED) else ((-1, "earlier"), (1, "later"))
                for step, direction in steps:
                    other = position + step
                    if 0 <= other < len(block.statements) and _matters(block.statements[other]):
                        yield (
                            f"move {direction} (past {_name(block.statements[other])})",
                            name,
                            where,
                            _swap(block, position, other),
                        )
            yield from _off_by_one(statement, where)
            yield from _too_few(block, position, where)
            yield from _arrival_past_a_wait(block, position, where)
            if isinstance(statement, st.Loop) and not statement.index.unrolled:
                yield "late start of", statement.index.name, where, _begin_late(block, statement)


def _blocks(block: st.Block) -> Iterator[st.Block]:
    yield block
    for statement in block.statements:
        for child in st.children(statement):
            yield from _blocks(child)


def _matters(statement: st.Statement) -> bool:
    return isinstance(statement, (st.IssueInstruction, st.If, st.Loop))


def _name(statement: st.Statement) -> str:
    if isinstance(statement, st.IssueInstruction):
        return statement.instruction.mnemonic
    return type(statement).__name__.lower()


def _deletion(block: st.Block, position: int) -> Callable[[], None]:
    return lambda: block.statements.pop(position) and None


def _swap(block: st.Block, a: int, b: int) -> Callable[[], None]:
    def apply() -> None:
        s = block.statements
        s[a], s[b] = s[b], s[a]

    return apply


def _arrival_past_a_wait(block: st.Block, position: int, where: SourceLocation) -> Iterator[Change]:
    """An arrival, maybe that of some lanes, for the next phase before a wait for the last one, or the other way round:
    across the statements between."""
    found = [position for position, x in enumerate(block.statements) if _is_wait(x)]
    before = max((x for x in found if x < position - 1), default=None)
    after = min((x for x in found if x > position + 1), default=None)
    arrivals = _instructions(block.statements[position])
    if arrivals and all(isinstance(x, ARRIVALS) for x in arrivals):
        if before is not None:
            yield "arrive before the wait", arrivals[0].mnemonic, where, _exchange(block, before, position)
        if after is not None:
            yield "arrive after the wait", arrivals[0].mnemonic, where, _exchange(block, position, after)


def _is_wait(statement: st.Statement) -> bool:
    return isinstance(statement, st.IssueInstruction) and isinstance(statement.instruction, mbarrier.MbarrierWait)


def _instructions(statement: st.Statement) -> list[Any]:
    return [x for x, _ in st.instructions(st.Block([statement]))]


def _exchange(block: st.Block, first: int, last: int) -> Callable[[], None]:
    """Puts the last statement in front of the first one, behind the values that can be computed there."""
    values, others, later = list[st.Statement](), list[st.Statement](), set[Value]()
    for x in block.statements[first + 1 : last]:
        if isinstance(x, st.Define) and isinstance(x.value, (Operation, VariableRead)) and later.isdisjoint(st.uses(x)):
            values.append(x)
            continue
        others.append(x)
        later |= {x.value} if isinstance(x, st.Define) else set()
    moved = [*values, block.statements[last], block.statements[first], *others]
    return lambda: block.statements.__setitem__(slice(first, last + 1), moved)


def _begin_late(block: st.Block, loop: st.Loop) -> Callable[[], None]:
    start = st.Define(Operation("+", I32, (loop.start, loop.step)))
    start.location = loop.location

    def apply() -> None:
        block.statements.insert(block.statements.index(loop), start)
        loop.start = start.value

    return apply


def _too_few(block: st.Block, position: int, where: SourceLocation) -> Iterator[Change]:
    """Ordered as far as too small a scope, or not at all; executed by too few; the wrong way round."""
    statement = block.statements[position]
    if not isinstance(statement, st.IssueInstruction):
        return
    i: Any = statement.instruction
    if getattr(i, "scope", "cta") != "cta":
        relaxed = "relaxed " * (getattr(i, "order", "") == "relaxed")
        yield "narrow scope of", relaxed + i.mnemonic, where, _set(i, "scope", "cta")
    if getattr(i, "order", "relaxed") != "relaxed":
        yield "relax", i.mnemonic, where, _set(i, "order", "relaxed")
    if isinstance(i, register.SetMaxNReg):
        yield "swap inc and dec of", i.mnemonic, where, _set(i, "action", {"inc": "dec", "dec": "inc"}[i.action])
    if isinstance(i, barrier.FenceProxyAsync):
        yield "other space of", i.mnemonic, where, _set(i, "space", "global" if i.space != "global" else "shared::cta")
    if isinstance(i, ALIGNED):
        yield "by one lane", i.mnemonic, where, _alone(block, position)


def _alone(block: st.Block, position: int) -> Callable[[], None]:
    first = Operation("==", PRED, (Builtin(I32, "lane"), Constant(I32, 0)))
    statement = block.statements[position]
    alone = [st.Define(first), st.If(first, st.Block([statement]))]
    for made in alone:
        made.location = statement.location
    return lambda: block.statements.__setitem__(slice(position, position + 1), alone)


def _set(thing: object, name: str, value: object) -> Callable[[], None]:
    return lambda: setattr(thing, name, value)


def _product(x: Value) -> Any:
    """The first product with a constant in an expression, or None."""
    if not isinstance(x, Operation):
        return None
    if x.op == "*" and isinstance(x.operands[1], Constant):
        return x
    return next((y for y in map(_product, x.operands) if y is not None), None)


def _off_by_one(statement: st.Statement, where: SourceLocation) -> Iterator[Change]:
    if isinstance(statement, st.Declare) and statement.variable.name.endswith("_phase"):
        assert isinstance(statement.initial, Constant)
        flipped = Constant(statement.initial.type, 1 - statement.initial.value)
        yield "flip start of", statement.variable.name, where, _set(statement, "initial", flipped)
    if isinstance(statement, st.If) and isinstance(statement.condition, Operation) and statement.condition.op == "==":
        last = statement.condition.operands[1]
        if isinstance(last, Constant) and any(
            isinstance(s, st.Assign) and s.variable.name.endswith("_phase") for s in statement.then.statements
        ):
            condition = statement.condition
            for change in (-1, 1):
                operands = (condition.operands[0], Constant(last.type, last.value + change))
                yield f"{change:+d} stages of", "advance", where, _set(condition, "operands", operands)
    if not isinstance(statement, st.IssueInstruction):
        return
    i = statement.instruction
    if isinstance(i, mbarrier.MbarrierInit):
        for change in (-1, 1):
            assert isinstance(i.count, Constant)
            count = (i.count.value or 0) + change
            if count:
                yield f"{change:+d} arrivals of", i.mnemonic, where, _set(i, "count", Constant(i.count.type, count))
    if isinstance(i, mbarrier.MbarrierArriveExpectTx):
        for change in (-16, 16):
            nbytes: Value = Parameter(i.tx_bytes.type, f"{i.tx_bytes.name}{change:+d}")  # given beside the right one
            if isinstance(i.tx_bytes, Constant):
                nbytes = Constant(i.tx_bytes.type, i.tx_bytes.value + change)
            if (product := _product(i.tx_bytes)) is not None:
                rows, row_bytes = product.operands
                wrong = rows, Constant(row_bytes.type, row_bytes.value + change)
                yield f"{change:+d} bytes of", i.mnemonic, where, _set(product, "operands", wrong)
            else:
                yield f"{change:+d} bytes of", i.mnemonic, where, _set(i, "tx_bytes", nbytes)
    if isinstance(i, (wgmma.WgmmaWait, tma.BulkWaitRead, cp_async.CpAsyncWait)):
        yield "+1 pending of", i.mnemonic, where, _set(i, "pending", i.pending + 1)
    if isinstance(i, barrier.BarrierSync):
        yield "-32 threads of", i.mnemonic, where, _set(i, "threads", i.threads - 32)
