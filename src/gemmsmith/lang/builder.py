"""The builder: ordinary Python runs once and records a kernel's statements.

Python `for` and `if` unroll and choose while the kernel is built; `k.range`, `k.unroll` and `k.when` stay in it.
The current builder is a context variable, so that instructions and collectives need no handle.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType

from gemmsmith.core.chip import HOPPER, Chip
from gemmsmith.core.errors import KernelError
from gemmsmith.core.tile import Tile
from gemmsmith.lang import statements as st
from gemmsmith.lang.instruction import Instruction, Result
from gemmsmith.lang.kernel import Kernel, Scratch
from gemmsmith.lang.recording import RECORDING, recorder
from gemmsmith.lang.shared import SharedBuffer
from gemmsmith.lang.source import print_kernel
from gemmsmith.lang.types import I32, PRED, TENSOR_MAP, U32, U64, Type
from gemmsmith.lang.values import (
    Bind,
    Builtin,
    Constant,
    LateConstant,
    LoopIndex,
    Parameter,
    RegisterRows,
    Registers,
    Value,
    ValueLike,
    Variable,
    as_value,
    operation,
)
from gemmsmith.lang.verify import verify

_PACKAGE = str(Path(__file__).parents[1])
# Frames in these are mechanics: a statement's line is the design's (or the user's) that called them.
_MECHANICS = tuple(
    str(Path(_PACKAGE) / part)
    for part in ("lang", "hw", "collective", "schedule", "epilogue", "kernels/ladder/product.py")
)
_STDLIB = str(Path(sys.modules["contextlib"].__file__ or "").parent)

NAMED_BARRIERS = 16
"""Named barriers of a CTA (PTX ISA, bar)."""


def current() -> Builder:
    """The builder being recorded into; KernelError outside of one."""
    builder: Builder = recorder()
    return builder


class Builder:
    """Records one kernel for a `chip`. `threads` a CTA, `cluster` (x, y, z) in CTAs; the compiler leaves registers for
    `resident` CTAs of an SM."""

    def __init__(
        self, name: str, *, threads: int, cluster: tuple[int, int, int] = (1, 1, 1), resident: int = 1,
        chip: Chip = HOPPER,
    ) -> None:  # fmt: skip
        if threads % 32 or not 32 <= threads <= 1024:
            raise KernelError(f"threads: got {threads}; use a multiple of 32 up to 1024")
        self.name, self.threads, self.cluster, self.resident = name, threads, cluster, resident
        self.chip = chip
        self.parameters: list[Parameter] = []
        self.buffers: list[SharedBuffer] = []
        self.late: list[LateConstant] = []
        self.memory: list[Scratch] = []
        self.functions: dict[str, st.Function] = {}
        self._next_barrier = 1  # 0 is that of __syncthreads
        self.grid: Bind = lambda _: 1
        """The clusters that have work, of the problem the kernel is launched for."""
        self.persistent = True
        """Whether fewer clusters may do all of it, as many as are resident at once."""
        self.header: list[str] = []
        self.body = st.Block()
        self._blocks = [self.body]
        self._roles: list[st.Role] = []
        self.thread, self.warpgroup_index = Builtin(I32, "thread"), Builtin(I32, "warpgroup")
        self.lane: Value = Builtin(I32, "lane")
        self.warp_index: Value = Builtin(I32, "warp")
        self.smem, self.smem_chunk = Builtin(U32, "smem"), Builtin(U32, "smem_chunk")

    def __enter__(self) -> Builder:
        self._token = RECORDING.set(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        RECORDING.reset(self._token)
        if isinstance(error, KernelError) and not getattr(error, "located", False):
            lines = [(t.tb_frame.f_code.co_filename, t.tb_lineno) for t in _frames(trace)]
            own = [st.Where(*line) for line in lines if not line[0].startswith((*_MECHANICS, _STDLIB, "<"))]
            error.args = (f"{own[-1] if own else st.Where(*lines[-1])}: {error}",)
            error.located = True  # type: ignore[attr-defined]

    def finish(self) -> Kernel:
        """The kernel, verified. KernelError names the line of what is wrong."""
        kernel = Kernel(
            self.name, self.threads, self.cluster, self.parameters, self.buffers, self.late, self.body, self.header,
            print_kernel, self.memory, list(self.functions.values()), self.grid, self.resident, self.chip,
            self.persistent,
        )  # fmt: skip
        verify(kernel)
        return kernel

    # -- recording ---------------------------------------------------------------------------------
    def emit(self, statement: st.Statement) -> None:
        statement.where = _where()
        self._blocks[-1].statements.append(statement)

    def bind(self, value: Value) -> Value:
        self.emit(st.Bind(value))
        return value

    def execute(self, instruction: Instruction) -> Value:
        if instruction.result is None:
            self.emit(st.Execute(instruction))
            return None  # type: ignore[return-value]
        return self.bind(Result(instruction, instruction.result))

    def assign(self, variable: Variable, value: Value) -> None:
        self.emit(st.Assign(variable, value))

    def assign_register(self, registers: Registers, index: Value, value: Value) -> None:
        self.emit(st.AssignRegister(registers, index, value))

    def call(
        self, name: str, compute: Callable[..., Sequence[Value]], *arguments: Value, takes: Sequence[str] = ()
    ) -> list[Value]:
        """What `compute` gives of `arguments`, as a device function `name`, which is recorded at its first call and
        printed once. `takes`: its parameters' names. KernelError where it does anything but compute values."""
        if name not in self.functions:
            parameters: list[Value] = [Parameter(a.type, x) for a, x in zip(arguments, takes, strict=True)]
            function = st.Function(name, parameters)
            with self._nested(function.body):
                function.results = list(compute(*parameters))
            if not all(isinstance(s, (st.Bind, st.Call)) for s in function.body.statements):
                raise KernelError(f"function {name}: it must only compute values")
            self.functions[name] = function  # behind those that it calls
        function = self.functions[name]
        call = st.Call(function, list(arguments), [Value(r.type, r.name) for r in function.results])
        self.emit(call)
        return call.results

    def comment(self, text: str) -> None:
        self.emit(st.Comment(text))

    # -- arguments and storage -----------------------------------------------------------------------
    def parameter(self, name: str, type: Type = I32, bind: Bind | None = None) -> Parameter:
        """An argument given at launch, such as a size or a stride; `bind` computes it from the problem at hand."""
        self.parameters.append(Parameter(type, name, bind))
        return self.parameters[-1]

    def tensor_map(self, name: str, bind: Bind | None = None) -> Parameter:
        return self.parameter(name, TENSOR_MAP, bind)

    def pointer(self, name: str, bind: Bind | None = None) -> Parameter:
        """A global address in bytes, as u64."""
        return self.parameter(name, U64, bind)

    def scratch(self, name: str, nbytes: Bind, *, zeroed: bool = False) -> Parameter:
        """The address of global memory of the launch's own, as u64; `nbytes` computes how many bytes. `zeroed`: zero
        before the kernel, which leaves it so."""
        self.memory.append(Scratch(self.pointer(name), nbytes, zeroed))
        return self.memory[-1].parameter

    def shared(
        self, what: Tile | int, *, stages: int = 1, alignment: int | None = None, name: str = "buffer",
        partial_writes: bool = False, offset: int | None = None,
    ) -> SharedBuffer:  # fmt: skip
        """`stages` slots of shared memory, each one tile, or that many bytes. `partial_writes`: copies may leave some
        of it as it was, and reading that is no mistake, for its results are never used. `offset`: where it lies, over
        other buffers; behind all of them, if not given."""
        tile = what if isinstance(what, Tile) else None
        nbytes = what.bytes if isinstance(what, Tile) else what
        align = alignment or (tile.alignment if tile else 16)
        nbytes = -(-nbytes // align) * align if stages > 1 else nbytes
        end = max((b.offset + b.bytes for b in self.buffers), default=0) if offset is None else offset
        buffer = SharedBuffer(name, -(-end // align) * align, nbytes, stages, tile, partial_writes)
        self.buffers.append(buffer)
        return buffer

    def named_barriers(self, count: int) -> int:
        """The first of `count` named barriers of the CTA that nothing else uses. KernelError behind the last, 15."""
        first, self._next_barrier = self._next_barrier, self._next_barrier + count
        if self._next_barrier > NAMED_BARRIERS:
            raise KernelError(
                f"named barriers: {self._next_barrier - 1} are more than the {NAMED_BARRIERS - 1} of a CTA"
            )
        return first

    def late_constant(self, name: str) -> LateConstant:
        """A u32 that code recorded later decides; it must be set when the building ends."""
        self.late.append(LateConstant(U32, name))
        return self.late[-1]

    def var(self, type: Type, initial: ValueLike, name: str) -> Variable:
        """A variable: the one thing that is assigned to."""
        variable = Variable(type, name)
        self.emit(st.Declare(variable, as_value(initial, type)))
        return variable

    def registers(self, type: Type, count: int, name: str) -> Registers:
        """An uninitialized array in registers."""
        array = Registers(type, count, name)
        self.emit(st.DeclareRegisters(array))
        return array

    def register_rows(self, type: Type, rows: int, count: int, name: str) -> RegisterRows:
        """`rows` register arrays of `count`; one row is one array."""
        array = RegisterRows(type, rows, count, name)
        self.emit(st.DeclareRegisters(array))
        return array

    # -- control -----------------------------------------------------------------------------------
    @contextmanager
    def _nested(self, block: st.Block) -> Iterator[None]:
        self._blocks.append(block)
        try:
            yield
        finally:
            self._blocks.pop()

    @contextmanager
    def _loop(
        self, start: ValueLike, stop: ValueLike | None, step: ValueLike, name: str, unrolled: bool
    ) -> Iterator[LoopIndex]:
        if stop is None:
            start, stop = 0, start
        loop = st.Loop(LoopIndex(name, unrolled), as_value(start, I32), as_value(stop, I32), as_value(step, I32))
        if unrolled and not all(isinstance(x, Constant) for x in (loop.start, loop.stop, loop.step)):
            raise KernelError("k.unroll needs bounds known at build time")
        self.emit(loop)
        with self._nested(loop.body):
            yield loop.index

    def range(
        self, start: ValueLike, stop: ValueLike | None = None, step: ValueLike = 1, *, name: str = "i"
    ) -> AbstractContextManager[LoopIndex]:
        """A loop that stays a loop; its bounds and its step, which is positive, are the same for every thread of the
        role."""
        return self._loop(start, stop, step, name, unrolled=False)

    @contextmanager
    def unroll(self, start: int, stop: int | None = None, step: int = 1, *, name: str = "i") -> Iterator[Value]:
        """A loop with build-time bounds that the compiler unrolls: its index may index registers. Of a single step only
        the body is left, and the index is a number."""
        steps = range(start) if stop is None else range(start, stop, step)
        if len(steps) == 1:
            yield Constant(I32, steps[0])
            return
        with self._loop(start, stop, step, name, unrolled=True) as index:
            yield index

    @contextmanager
    def thread_numbered(self, lane: Value, warp_index: Value) -> Iterator[None]:
        """Inside, `lane` and `warp_index` are these values: copies of the builder's own, which the compiler does not
        recognize as such (hw.opaque)."""
        numbers = self.lane, self.warp_index
        self.lane, self.warp_index = lane, warp_index
        try:
            yield
        finally:
            self.lane, self.warp_index = numbers

    @contextmanager
    def when(self, condition: ValueLike) -> Iterator[None]:
        """Only the threads for which `condition` holds."""
        branch = st.If(as_value(condition, PRED))
        self.emit(branch)
        with self._nested(branch.then):
            yield

    @contextmanager
    def otherwise(self) -> Iterator[None]:
        """The threads the `k.when` just before left out."""
        last = self._blocks[-1].statements[-1] if self._blocks[-1].statements else None
        if not isinstance(last, st.If) or last.otherwise:
            raise KernelError("k.otherwise must follow a k.when")
        last.otherwise = st.Block()
        with self._nested(last.otherwise):
            yield

    def select(self, condition: Value, then: ValueLike, otherwise: ValueLike) -> Value:
        """condition ? then : otherwise, both evaluated."""
        like = then if isinstance(then, Value) else otherwise
        type = like.type if isinstance(like, Value) else I32
        return operation("select", type, as_value(condition, PRED), as_value(then, type), as_value(otherwise, type))

    def minimum(self, a: Value, b: ValueLike) -> Value:
        return operation("min", a.type, a, as_value(b, a.type))

    def maximum(self, a: Value, b: ValueLike) -> Value:
        return operation("max", a.type, a, as_value(b, a.type))

    # -- roles ---------------------------------------------------------------------------------------
    @contextmanager
    def _role(self, role: st.Role) -> Iterator[Value]:
        limit = self.threads // 128 if role.unit == "warpgroup" else 4
        if role.first + role.count > limit:
            raise KernelError(
                f"{role.unit}s {role.first}..{role.first + role.count - 1}: there are {limit} "
                + ("in the kernel" if role.unit == "warpgroup" else "in a warpgroup")
            )
        if any(r.unit == role.unit for r in self._roles):
            raise KernelError(f"a {role.unit} role inside a {role.unit} role")
        for sibling in reversed(self._blocks[-1].statements):  # roles in a row print as one if/else chain
            if not isinstance(sibling, st.Role) or sibling.unit != role.unit:
                break
            if max(sibling.first, role.first) < min(sibling.first + sibling.count, role.first + role.count):
                raise KernelError(f"{role.unit} {role.first} already has a role here: put a barrier between the two")
        self.emit(role)
        self._roles.append(role)
        try:
            with self._nested(role.body):
                index = self.warpgroup_index if role.unit == "warpgroup" else self.warp_index % 4
                name = f"{role.name or 'own'}_{role.unit}"
                yield (index - role.first).named(name) if role.count > 1 else Constant(I32, 0)
        finally:
            self._roles.pop()

    def warpgroup(self, index: int, name: str = "") -> AbstractContextManager[Value]:
        """What one warpgroup (128 threads) does; timelines call it `name`."""
        return self._role(st.Role("warpgroup", index, 1, name))

    def warpgroups(self, first: int, stop: int, name: str = "") -> AbstractContextManager[Value]:
        """What warpgroups first..stop-1 do, each on its own; gives the index within the role."""
        return self._role(st.Role("warpgroup", first, stop - first, name))

    def warp(self, index: int, name: str = "") -> AbstractContextManager[Value]:
        """What one warp of the surrounding warpgroup role does."""
        return self._role(st.Role("warp", index, 1, name))

    @property
    def role_key(self) -> tuple[tuple[str, int], ...]:
        """Which role is being recorded, as (unit, first) from the outside in."""
        return tuple((role.unit, role.first) for role in self._roles)

    @property
    def role_warps(self) -> int:
        """How many warps execute what is recorded now."""
        units = {role.unit: role.count for role in self._roles}
        return units.get("warp", 4 * units.get("warpgroup", 0)) or self.threads // 32


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _where() -> st.Where:
    frame = sys._getframe(2)
    fallback = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_MECHANICS) and not file.startswith(_STDLIB):
            return st.Where(file, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return st.Where(fallback.f_code.co_filename, fallback.f_lineno)
