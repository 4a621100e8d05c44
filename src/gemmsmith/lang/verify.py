"""Checks of a recorded kernel: supported instructions, shared memory, registers, deferred constants."""

from __future__ import annotations

from gemmsmith.core.errors import ConfigError, KernelError
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.statements import Role, instructions


def verify(kernel: Kernel) -> None:
    """Check a kernel. Raises ConfigError or KernelError if it cannot run."""
    _check_instructions(kernel)
    _check_shared_memory(kernel)
    _check_register_budgets(kernel)
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


def _check_shared_memory(kernel: Kernel) -> None:
    limit = kernel.chip.max_shared_bytes_per_cta
    excess = kernel.shared_bytes - limit
    if excess > 0:
        buffers = ", ".join(f"{b.name} {b.count} x {b.slot_bytes}" for b in kernel.buffers)
        raise ConfigError(
            f"shared memory: {kernel.shared_bytes} bytes ({buffers}) exceed the {limit} available per CTA by {excess}; "
            "use fewer stages or a smaller tile"
        )


def _check_register_budgets(kernel: Kernel) -> None:
    """Check that the setmaxnreg values of all warpgroups fit the registers that the CTA was launched with."""
    total, location = 0, None
    roles = [s for s in kernel.body.statements if isinstance(s, Role) and s.unit == "warpgroup"]
    for role in roles:
        budget = kernel.max_registers_per_thread
        for instruction, source in instructions(role.body):
            if hasattr(instruction, "register_budget"):
                budget, location = instruction.register_budget, source
        total += budget * role.count
    pool = kernel.max_registers_per_thread * (kernel.threads // 128)
    if location is not None and total > pool:
        raise KernelError(
            f"setmaxnreg at {location}: the warpgroups request {total} registers per thread in total, {total - pool} "
            f"more than the pool of {kernel.threads // 128} x {kernel.max_registers_per_thread}"
        )
