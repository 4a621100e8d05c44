"""A recorded kernel, which the backends print and compile, or simulate, and its checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gemmsmith.core.chip import REGISTERS_PER_SM, Chip
from gemmsmith.core.errors import ConfigError, KernelError
from gemmsmith.core.frozen import cached_property
from gemmsmith.core.scalars import round_up
from gemmsmith.lang.shared import SharedBuffer
from gemmsmith.lang.statements import Block, Function, instructions
from gemmsmith.lang.types import U64
from gemmsmith.lang.values import ArgumentFn, Constant, Parameter

NAMED_BARRIERS_PER_CTA = 16
"""Named barriers per CTA (PTX ISA, "bar")."""
SCRATCH_ALIGNMENT_BYTES = 256
"""Alignment of each scratch buffer; chosen, that of cudaMalloc (CUDA C++ Programming Guide)."""


def align_scratch(nbytes: int) -> int:
    """Round a size up to the alignment of scratch buffers."""
    return round_up(nbytes, SCRATCH_ALIGNMENT_BYTES)


def max_registers_per_thread(threads: int) -> int:
    """Return the maximum registers per thread under `__launch_bounds__(threads, 1)`.

    It is 65536 (registers per SM) / threads, rounded down to a multiple of 8, and at most 255.
    """
    return min(REGISTERS_PER_SM // threads // 8 * 8, 255)


@dataclass(frozen=True)
class ScratchBuffer:
    """A buffer in global memory that each launch allocates. See `Builder.scratch`.

    `parameter`: the kernel parameter that is its address. `nbytes`: computes its size from the problem that is
    launched.
    """

    parameter: Parameter
    nbytes: ArgumentFn
    zero_initialized: bool


@dataclass(eq=False)
class Kernel:
    """A recorded kernel.

    Attributes:
        threads: Threads per CTA.
        cluster: CTAs per cluster in (x, y, z).
        buffers: Buffers of shared memory.
        header: Comment at the top of the printed file.
        scratch_buffers: Buffers in global memory that each launch allocates.
        functions: Device functions.
        work_clusters: Computes the number of clusters with work from the problem that is launched.
        min_ctas_per_sm: Minimum CTAs per SM, for the launch bounds.
        chip: Target architecture.
        persistent: A cluster loops over work, so that fewer clusters than have work may do all of it.
        max_clusters: The most clusters of a persistent kernel's grid; None: as many as are resident.
    """

    name: str
    threads: int
    cluster: tuple[int, int, int]
    parameters: list[Parameter]
    buffers: list[SharedBuffer]
    body: Block
    header: list[str]
    printer: Callable[[Kernel, bool], tuple[str, dict[int, int]]]
    """`print_kernel`, passed as a value to avoid an import cycle."""
    scratch_buffers: list[ScratchBuffer]
    functions: list[Function]
    work_clusters: ArgumentFn
    min_ctas_per_sm: int
    chip: Chip
    persistent: bool
    max_clusters: int | None

    def arguments(self, bound: Any, workspace: Any = 0, zeroed_base: Any = 0) -> dict[str, Any]:
        """Return the kernel's arguments by name for the problem `bound`, but for parameters without a `compute`.

        Scratch buffers lie one after the other from `workspace` on, or from `zeroed_base` on if they are
        zero-initialized; both are addresses or Pointers.
        """
        arguments = {p.name: p.compute(bound) for p in self.parameters if p.name and p.compute}
        free = {False: workspace, True: zeroed_base}
        for s in self.scratch_buffers:
            arguments[s.parameter.name or ""] = free[s.zero_initialized]
            free[s.zero_initialized] += align_scratch(s.nbytes(bound))
        return arguments

    def scratch_bytes(self, bound: Any, *, zero_initialized: bool = False) -> int:
        """Return the bytes of all ordinary, or of all zero-initialized, scratch buffers for the problem `bound`."""
        return sum(
            align_scratch(s.nbytes(bound)) for s in self.scratch_buffers if s.zero_initialized == zero_initialized
        )

    @cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per CTA, in bytes."""
        return max((b.offset + b.bytes for b in self.buffers), default=0)

    @property
    def max_registers_per_thread(self) -> int:
        """Maximum registers per thread under the kernel's `__launch_bounds__`."""
        return max_registers_per_thread(self.threads * self.min_ctas_per_sm)

    @cached_property
    def parameter_kinds(self) -> tuple[str, ...]:
        """The kind of each parameter for the launcher: "pointer" (u64) or the name of the type."""
        return tuple("pointer" if p.type == U64 else p.type.name for p in self.parameters)

    @cached_property
    def source(self) -> str:
        """The kernel as one self-contained CUDA C++ file."""
        return self._printed[0]

    @property
    def cuda_lines(self) -> dict[int, int]:
        """The line of `source` that each statement is printed at, by the statement's number (SourceLocation.number)."""
        return self._printed[1]

    @cached_property
    def _printed(self) -> tuple[str, dict[int, int]]:
        return self.printer(self, False)

    @property
    def source_with_line_directives(self) -> str:
        """The source with a `#line` directive before each line of the body that names the Python line."""
        return self.printer(self, True)[0]


def verify(kernel: Kernel) -> None:
    """Check a kernel. Raises ConfigError for too much shared memory, KernelError for what else cannot run."""
    _check_instructions(kernel)
    _check_shared_memory(kernel)


def _check_instructions(kernel: Kernel) -> None:
    """Raise KernelError for an instruction that the chip or the kernel cannot have.

    Also for a barrier whose arrival count is still None: no thread arrives at it.
    """
    for block in (kernel.body, *(function.body for function in kernel.functions)):
        for instruction, location in instructions(block):
            if not kernel.chip.supports(instruction.required_arch):
                raise KernelError(
                    f"{instruction.mnemonic} at {location}: it requires {instruction.required_arch}, the kernel is for "
                    f"{kernel.chip}"
                )
            for x in instruction.operands.values():
                if isinstance(x, Constant) and x.value is None:
                    raise KernelError(
                        f"{kernel.name}: no thread arrives at barrier {x.name_hint}; its arrival count is undefined"
                    )
            instruction.check_kernel(kernel, location)


def _check_shared_memory(kernel: Kernel) -> None:
    """Raise ConfigError if the kernel needs more shared memory than a CTA of the chip may have."""
    limit = kernel.chip.max_shared_bytes_per_cta
    excess = kernel.shared_bytes - limit
    if excess > 0:
        buffers = ", ".join(f"{b.name} {b.count} x {b.slot_bytes}" for b in kernel.buffers)
        raise ConfigError(
            f"shared memory: {kernel.shared_bytes} bytes ({buffers}) exceed the {limit} available per CTA by {excess}; "
            "use fewer stages or a smaller tile"
        )
