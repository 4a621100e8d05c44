"""Checks of a recorded kernel: instructions, shared memory, deferred constants."""

from __future__ import annotations

from gemmsmith.core.errors import ConfigError, KernelError
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.statements import instructions


def verify(kernel: Kernel) -> None:
    """Check a kernel. Raises ConfigError or KernelError if it cannot run."""
    _check_instructions(kernel)
    _check_shared_memory(kernel)
    for constant in kernel.deferred_constants:
        if constant.value is None:
            raise KernelError(
                f"{kernel.name}: no thread arrives at barrier {constant.name}; its arrival count is undefined"
            )


def _check_instructions(kernel: Kernel) -> None:
    for block in (kernel.body, *(function.body for function in kernel.functions)):
        for instruction, location in instructions(block):
            if not kernel.chip.supports(instruction.required_arch):
                raise KernelError(
                    f"{instruction.mnemonic} at {location}: it requires {instruction.required_arch}, the kernel is for "
                    f"{kernel.chip}"
                )
            instruction.check_kernel(kernel, location)


def _check_shared_memory(kernel: Kernel) -> None:
    limit = kernel.chip.max_shared_bytes_per_cta
    excess = kernel.shared_bytes - limit
    if excess > 0:
        buffers = ", ".join(f"{b.name} {b.count} x {b.slot_bytes}" for b in kernel.buffers)
        raise ConfigError(
            f"shared memory: {kernel.shared_bytes} bytes ({buffers}) exceed the {limit} available per CTA by {excess}; "
            "use fewer stages or a smaller tile"
        )
