"""The builder: ordinary Python runs once and records the statements of a kernel.

Python `for` and `if` execute at build time; `k.range`, `k.unroll` and `k.when` become loops and branches of the kernel.
The active builder is a context variable, so that instructions and collectives need no handle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Token
from dataclasses import fields
from types import TracebackType

from gemmsmith.core.chip import HOPPER, Chip
from gemmsmith.core.errors import KernelError
from gemmsmith.core.scalars import round_up
from gemmsmith.core.tile import Tile
from gemmsmith.lang import statements as st
from gemmsmith.lang.current_builder import ACTIVE_BUILDER
from gemmsmith.lang.instruction import Instruction, Result
from gemmsmith.lang.kernel import NAMED_BARRIERS_PER_CTA, Kernel, ScratchBuffer, verify
from gemmsmith.lang.location import Recorder, SourceLocation, error_location
from gemmsmith.lang.shared import SharedBuffer, lay_out
from gemmsmith.lang.source import print_kernel
from gemmsmith.lang.types import I32, PRED, TENSOR_MAP, U32, U64, ScalarType
from gemmsmith.lang.values import (
    ArgumentFn,
    Builtin,
    Constant,
    LoopIndex,
    Parameter,
    RegisterArray,
    RegisterArray2D,
    Value,
    ValueLike,
    Variable,
    as_value,
    operation,
)


class Builder:
    """Records one kernel.

    Args:
        name: Name of the kernel.
        threads: Threads per CTA.
        cluster: CTAs per cluster in (x, y, z).
        min_ctas_per_sm: Minimum CTAs per SM, which limits the registers per thread.
        chip: Target architecture.

    Attributes:
        thread: The index of the thread in its CTA (i32).
        lane: The index of the thread in its warp, 0 to 31 (i32).
        warp_index: The index of the warp in its CTA (i32).
        warpgroup_index: The index of the warpgroup in its CTA (i32).
        work_clusters: Function of the problem that is launched: the number of clusters with work. By default one
            cluster is launched, whatever the problem.
        persistent: True if a cluster loops over the grid's work, so that the resident clusters alone may do all of it.
        max_clusters: The most clusters of a persistent kernel's grid; None: as many as are resident.
        header: Lines of the comment at the top of the printed file.
    """

    def __init__(
        self, name: str, *, threads: int, cluster: tuple[int, int, int] = (1, 1, 1), min_ctas_per_sm: int = 1,
        chip: Chip = HOPPER,
    ) -> None:  # fmt: skip
        if threads % 32 or not 32 <= threads <= 1024:
            raise KernelError(f"threads: got {threads}; use a multiple of 32 up to 1024")
        self.name, self.threads, self.cluster, self.min_ctas_per_sm = name, threads, cluster, min_ctas_per_sm
        self.chip = chip
        self.parameters: list[Parameter] = []
        self.buffers: list[SharedBuffer] = []
        self.scratch_buffers: list[ScratchBuffer] = []
        self.functions: list[st.Function] = []
        self.printer = print_kernel
        self._next_barrier = 1  # __syncthreads uses barrier 0
        self.work_clusters: ArgumentFn = lambda _: 1
        self.persistent = False
        self.max_clusters: int | None = None
        self.header: list[str] = []
        self.body = st.Block()
        self._blocks = [self.body]
        self._roles: list[st.Role] = []
        self._recorder = Recorder()
        self._ended: dict[object, tuple[SourceLocation, str]] = {}
        """What was defined in blocks that have ended: where, and the kind of the block."""
        self._constant_branch = st.Block(), 0, False
        """The last branch on a condition that is known: its block, the statements up to its end, the condition."""
        self.thread, self.warpgroup_index = Builtin(I32, "thread"), Builtin(I32, "warpgroup")
        self.lane: Value = Builtin(I32, "lane")
        self.warp_index: Value = Builtin(I32, "warp")
        self.smem = Builtin(U32, "smem")
        self._tokens: list[Token[Builder | None]] = []

    def __enter__(self) -> Builder:
        self._tokens.append(ACTIVE_BUILDER.set(self))
        self._recorder.begin()
        return self

    def __exit__(self, error_type: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the recording; a KernelError gets the source line at which it was raised."""
        ACTIVE_BUILDER.reset(self._tokens.pop())
        self._recorder.end()
        if isinstance(error, KernelError) and not getattr(error, "has_location", False):
            error.args = (f"{error_location(trace)}: {error}",)
            error.has_location = True  # type: ignore[attr-defined]

    def finish(self) -> Kernel:
        """Return the verified kernel, with shared memory laid out.

        Raises KernelError or ConfigError if it cannot run.
        """
        lay_out(self.buffers)
        kernel = Kernel(**{x.name: getattr(self, x.name) for x in fields(Kernel)})  # what was recorded, by these names
        verify(kernel)
        return kernel

    # -- recording ---------------------------------------------------------------------------------
    def emit(self, statement: st.Statement) -> None:
        """Append a statement to the current block, with the source line that the recorder finds for it.

        Raises KernelError if it uses what was defined in a block that has ended, such as a loop.
        """
        for x in (*st.uses(statement), *st.storage(statement)):
            if x in self._ended:
                location, block = self._ended[x]
                name = getattr(x, "name", None) or "a value"
                raise KernelError(
                    f"{name} was defined inside a {block} that has ended, at {location} ({location.call.text}); "
                    f"to carry a value out, declare a k.var before the {block}"
                )
        statement.location = self._recorder.locate()
        self._blocks[-1].statements.append(statement)

    def define(self, value: Value) -> Value:
        """Emit the definition of `value` and return it."""
        self.emit(st.Define(value))
        return value

    def issue(self, instruction: Instruction) -> Value:
        """Emit an instruction and return its result, or None if it has none."""
        if instruction.result is None:
            self.emit(st.IssueInstruction(instruction))
            return None  # type: ignore[return-value]
        return self.define(Result(instruction, instruction.result))

    def assign(self, variable: Variable, value: Value) -> None:
        """Emit an assignment to a variable."""
        self.emit(st.Assign(variable, value))

    def assign_register(self, registers: RegisterArray, index: Value, value: Value) -> None:
        """Emit an assignment to a register of an array."""
        self.emit(st.AssignRegister(registers, index, value))

    def call(
        self, name: str, compute: Callable[..., Sequence[Value]], *arguments: Value, parameter_names: Sequence[str] = ()
    ) -> list[Value]:
        """Call the `__device__` function `name`, which is recorded at its first call by running `compute(*parameters)`.

        Args:
            name: The function's name, which identifies it.
            compute: Records the function's body and returns its results.
            arguments: The arguments of this call.
            parameter_names: The names of the parameters.

        Returns:
            The results of this call.

        Raises:
            KernelError: If the function has side effects.
        """
        function = next((x for x in self.functions if x.name == name), None)
        if function is None:
            parameters: list[Value] = [Parameter(a.type, x) for a, x in zip(arguments, parameter_names, strict=True)]
            function = st.Function(name, parameters)
            with self._nested(function.body, "device function"):
                function.results = list(compute(*parameters))
            if not all(isinstance(s, (st.Define, st.Call)) for s in function.body.statements):
                raise KernelError(f"device function {name} must not have side effects")
            self.functions.append(function)  # after the functions that it calls
        call = st.Call(function, list(arguments), [Value(r.type, r.name) for r in function.results])
        self.emit(call)
        return call.results

    def comment(self, text: str) -> None:
        """Emit a comment of the generated code."""
        self.emit(st.Comment(text))

    # -- arguments and storage -----------------------------------------------------------------------
    def parameter(self, name: str, scalar_type: ScalarType = I32, compute: ArgumentFn | None = None) -> Parameter:
        """Declare a kernel parameter, such as a size or a stride.

        `compute`: computes its argument from the problem that is launched; without it the launch must give the
        argument.
        """
        self.parameters.append(Parameter(scalar_type, name, compute))
        return self.parameters[-1]

    def tensor_map(self, name: str, compute: ArgumentFn | None = None) -> Parameter:
        """Declare a parameter that is a tensor map (CUtensorMap). `compute`: as in `parameter`."""
        return self.parameter(name, TENSOR_MAP, compute)

    def pointer(self, name: str, compute: ArgumentFn | None = None) -> Parameter:
        """Declare a parameter that is a global address (u64, in bytes). `compute`: as in `parameter`."""
        return self.parameter(name, U64, compute)

    def scratch(self, name: str, nbytes: ArgumentFn, *, zero_initialized: bool = False) -> Parameter:
        """Declare a buffer in global memory that a launch allocates, and return its address (u64).

        `nbytes`: computes its size from the problem that is launched. `zero_initialized`: it is zero before the kernel,
        which must set it to zero again.
        """
        self.scratch_buffers.append(ScratchBuffer(self.pointer(name), nbytes, zero_initialized))
        return self.scratch_buffers[-1].parameter

    def shared(
        self, slot: Tile | int, *, stages: int = 1, alignment: int | None = None, name: str = "buffer",
        allow_uninitialized_reads: bool = False, over: Sequence[SharedBuffer] = (),
    ) -> SharedBuffer:  # fmt: skip
        """Allocate a shared-memory buffer of `stages` slots.

        Args:
            slot: The tile, or the number of bytes, of one slot.
            stages: Number of slots.
            alignment: Alignment of each slot in bytes; by default that of the tile, or 16.
            name: Name of the buffer in the generated code.
            allow_uninitialized_reads: Unwritten bytes may be read; their values are not used.
            over: Buffers, adjacent in memory, whose bytes it reuses. It lies after earlier buffers over the same ones.
        """
        tile = slot if isinstance(slot, Tile) else None
        nbytes = slot.bytes if isinstance(slot, Tile) else slot
        align = alignment or (tile.alignment if tile else 16)
        nbytes = round_up(nbytes, align) if stages > 1 else nbytes
        self.buffers.append(SharedBuffer(name, nbytes, stages, align, tile, allow_uninitialized_reads, tuple(over)))
        return self.buffers[-1]

    def named_barriers(self, count: int) -> int:
        """Reserve `count` named barriers of the CTA and return the first one's number.

        Raises KernelError if too few are left.
        """
        first, self._next_barrier = self._next_barrier, self._next_barrier + count
        if self._next_barrier > NAMED_BARRIERS_PER_CTA:
            raise KernelError(
                f"named barriers: got {self._next_barrier - 1}; use at most {NAMED_BARRIERS_PER_CTA - 1} per CTA"
            )
        return first

    def var(self, scalar_type: ScalarType, initial: ValueLike, name: str) -> Variable:
        """Declare a mutable scalar of the kernel with its initial value.

        Declared before a loop or a branch, and set inside, it carries a value out.
        """
        variable = Variable(scalar_type, name)
        self.emit(st.Declare(variable, as_value(initial, scalar_type)))
        return variable

    def registers(self, scalar_type: ScalarType, count: int, name: str) -> RegisterArray:
        """Declare an uninitialized register array of `count` registers in each thread."""
        array = RegisterArray(scalar_type, count, name)
        self.emit(st.DeclareRegisters(array))
        return array

    def registers_2d(self, scalar_type: ScalarType, rows: int, count: int, name: str) -> RegisterArray2D:
        """Declare `rows` register arrays of `count` registers each. Each row is a register array."""
        array = RegisterArray2D(scalar_type, rows, count, name)
        self.emit(st.DeclareRegisters(array))
        return array

    # -- control -----------------------------------------------------------------------------------
    @contextmanager
    def _nested(self, block: st.Block, kind: str) -> Iterator[None]:
        """Record into a block inside the current one, while the `with` statement lasts. `kind`: for messages."""
        self._blocks.append(block)
        try:
            yield
        finally:
            self._blocks.pop()
            self._ended |= {x: (s.location, kind) for s in block.statements for x in st.definitions(s)}

    @contextmanager
    def _loop(
        self, start: ValueLike, stop: ValueLike | None, step: ValueLike, name: str, unrolled: bool
    ) -> Iterator[LoopIndex]:
        """Open a loop from `start` to `stop` or, if `stop` is None, from 0 to `start`; yield its index.

        `name`: of the index. `unrolled`: the compiler unrolls it, so all bounds must be known at build time.
        """
        if stop is None:
            start, stop = 0, start
        loop = st.Loop(LoopIndex(name, unrolled), as_value(start, I32), as_value(stop, I32), as_value(step, I32))
        if unrolled and not all(isinstance(x, Constant) for x in (loop.start, loop.stop, loop.step)):
            raise KernelError("k.unroll needs bounds that are known at build time")
        self.emit(loop)
        with self._nested(loop.body, "loop"):
            yield loop.index
        self._ended[loop.index] = loop.location, "loop"

    def range(
        self, start: ValueLike, stop: ValueLike | None = None, step: ValueLike = 1, *, name: str = "i"
    ) -> AbstractContextManager[LoopIndex]:
        """Open a run-time loop (`#pragma unroll 1`) and yield its index, named `name`.

        The arguments are those of Python's range. The bounds and the step (positive) must be uniform across the threads
        of the role.
        """
        return self._loop(start, stop, step, name, unrolled=False)

    @contextmanager
    def unroll(self, start: int, stop: int | None = None, step: int = 1, *, name: str = "i") -> Iterator[Value]:
        """Open a loop that the compiler unrolls, and yield its index, which may index registers.

        The bounds are known at build time. A single iteration is emitted without a loop, and its index is a constant.
        """
        indices = range(start) if stop is None else range(start, stop, step)
        if len(indices) == 1:
            yield Constant(I32, indices[0])
            return
        with self._loop(start, stop, step, name, unrolled=True) as index:
            yield index

    @contextmanager
    def with_lane_and_warp(self, lane: Value, warp_index: Value) -> Iterator[None]:
        """Replace `self.lane` and `self.warp_index` within the block by opaque copies, which `hw.opaque` makes.

        The compiler does not move code that depends on the copies before the block.
        """
        saved = self.lane, self.warp_index
        self.lane, self.warp_index = lane, warp_index
        try:
            yield
        finally:
            self.lane, self.warp_index = saved

    @contextmanager
    def when(self, condition: ValueLike) -> Iterator[None]:
        """Open a branch for the threads for which `condition` holds.

        If the condition is known at build time, there is no branch in the kernel: what is recorded inside stands there
        without one, or is dropped.
        """
        value = as_value(condition, PRED)
        if isinstance(value, Constant):
            with nullcontext() if value.value else self._nested(st.Block(), "branch"):
                yield
            self._constant_branch = self._blocks[-1], len(self._blocks[-1].statements), bool(value.value)
            return
        branch = st.If(value)
        self.emit(branch)
        with self._nested(branch.then, "branch"):
            yield

    @contextmanager
    def otherwise(self) -> Iterator[None]:
        """Open the else branch of the immediately preceding `k.when`.

        If that one's condition was known at build time, what is recorded inside stands here, or is dropped if the
        condition held.
        """
        block, length, is_taken = self._constant_branch
        if block is self._blocks[-1] and length == len(block.statements):
            with self._nested(st.Block(), "branch") if is_taken else nullcontext():
                yield
            return
        last = self._blocks[-1].statements[-1] if self._blocks[-1].statements else None
        if not isinstance(last, st.If) or last.otherwise:
            raise KernelError("k.otherwise must follow a k.when")
        last.otherwise = st.Block()
        with self._nested(last.otherwise, "branch"):
            yield

    def select(self, condition: Value, then: ValueLike, otherwise: ValueLike) -> Value:
        """Return condition ? then : otherwise. Both values are evaluated. A Python number gets the other's type."""
        like = then if isinstance(then, Value) else otherwise
        scalar_type = like.type if isinstance(like, Value) else I32
        values = as_value(condition, PRED), as_value(then, scalar_type), as_value(otherwise, scalar_type)
        return operation("select", scalar_type, *values)

    def minimum(self, a: Value, b: ValueLike) -> Value:
        """Return min(a, b)."""
        return operation("min", a.type, a, as_value(b, a.type))

    def maximum(self, a: Value, b: ValueLike) -> Value:
        """Return max(a, b)."""
        return operation("max", a.type, a, as_value(b, a.type))

    # -- roles ---------------------------------------------------------------------------------------
    @contextmanager
    def _role(self, role: st.Role) -> Iterator[Value]:
        """Open a block that only the warps or warpgroups of a role execute; yield the index of each within the role.

        Raises KernelError if the role does not fit the kernel, is inside a role of the same unit, or overlaps the one
        before.
        """
        limit = self.threads // 128 if role.unit == "warpgroup" else 4
        if role.first + role.count > limit:
            raise KernelError(
                f"{role.unit}s {role.first}..{role.first + role.count - 1}: there are {limit} "
                + ("in the kernel" if role.unit == "warpgroup" else "in a warpgroup")
            )
        if any(r.unit == role.unit for r in self._roles):
            raise KernelError(f"a {role.unit} role inside a {role.unit} role")
        for sibling in reversed(self._blocks[-1].statements):  # consecutive roles are printed as one if/else chain
            if not isinstance(sibling, st.Role) or sibling.unit != role.unit:
                break
            if max(sibling.first, role.first) < min(sibling.first + sibling.count, role.first + role.count):
                raise KernelError(
                    f"{role.unit} {role.first} already has a role here; separate the two roles by a barrier"
                )
        self.emit(role)
        self._roles.append(role)
        try:
            with self._nested(role.body, "role"):
                index = self.warpgroup_index if role.unit == "warpgroup" else self.warp_index % 4
                name = f"{role.name}_{role.unit}" if role.name else f"{role.unit}_in_role"
                yield (index - role.first).named(name) if role.count > 1 else Constant(I32, 0)
        finally:
            self._roles.pop()

    def warpgroup(self, index: int, name: str = "") -> AbstractContextManager[Value]:
        """Open the role of the warpgroup (128 threads) `index` of the CTA. `name`: its label in timelines."""
        return self._role(st.Role("warpgroup", index, 1, name))

    def warpgroups(self, first: int, stop: int, name: str = "") -> AbstractContextManager[Value]:
        """Open the role of warpgroups first..stop-1 of the CTA, and yield the index of the warpgroup within the role.

        `name`: its label in timelines.
        """
        return self._role(st.Role("warpgroup", first, stop - first, name))

    def warp(self, index: int, name: str = "") -> AbstractContextManager[Value]:
        """Open the role of warp `index` (0 to 3) of the surrounding warpgroup role. `name`: its label in timelines."""
        return self._role(st.Role("warp", index, 1, name))

    @property
    def current_role(self) -> tuple[tuple[str, int], ...]:
        """The roles that surround the code being recorded, from the outermost on: (unit, index of the first) of each.

        The unit is "warpgroup" or "warp".
        """
        return tuple((role.unit, role.first) for role in self._roles)

    @property
    def role_warps(self) -> int:
        """Number of warps that execute the code being recorded: those of the innermost role, or all of the CTA."""
        units = {role.unit: role.count for role in self._roles}
        return units.get("warp", 4 * units.get("warpgroup", 0)) or self.threads // 32
