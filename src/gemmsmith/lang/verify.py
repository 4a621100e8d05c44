"""What is checked once a kernel is built: the chip's instructions and shared memory, registers, late constants."""

from __future__ import annotations

from gemmsmith.core.errors import ConfigError, KernelError
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.statements import Role, instructions


def verify(kernel: Kernel) -> None:
    """Raises ConfigError or KernelError for a kernel that cannot run."""
    _instructions(kernel)
    _shared(kernel)
    _registers(kernel)
    for constant in kernel.late:
        if constant.number is None:
            raise KernelError(f"{kernel.name}: nobody ever arrives on barrier {constant.name}")


def _instructions(kernel: Kernel) -> None:
    for block in (kernel.body, *(function.body for function in kernel.functions)):
        for instruction, where in instructions(block):
            if not kernel.chip.has(instruction.architecture):
                raise KernelError(
                    f"{instruction.mnemonic} at {where}: it needs {instruction.architecture}, the kernel is for "
                    f"{kernel.chip}"
                )


def _shared(kernel: Kernel) -> None:
    limit = kernel.chip.shared_bytes
    excess = kernel.shared_bytes - limit
    if excess > 0:
        parts = ", ".join(f"{b.name} {b.count} x {b.slot_bytes}" for b in kernel.buffers)
        raise ConfigError(
            f"shared memory: {kernel.shared_bytes} bytes ({parts}) exceed the {limit} of a CTA by {excess}; "
            "use fewer stages or a smaller tile"
        )


def _registers(kernel: Kernel) -> None:
    """The setmaxnreg values of all warpgroups must fit what the CTA was launched with."""
    total, where = 0, None
    roles = [s for s in kernel.body.statements if isinstance(s, Role) and s.unit == "warpgroup"]
    for role in roles:
        budget = kernel.register_cap
        for instruction, line in instructions(role.body):
            if hasattr(instruction, "register_budget"):
                budget, where = instruction.register_budget, line
        total += budget * role.count
    pool = kernel.register_cap * (kernel.threads // 128)
    if where is not None and total > pool:
        raise KernelError(
            f"registers at {where}: the warpgroups ask for {total} a thread in all, {total - pool} more than "
            f"the pool of {kernel.threads // 128} x {kernel.register_cap}"
        )
