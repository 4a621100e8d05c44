"""What is checked once a kernel is built: shared memory, register budgets, late constants."""

from __future__ import annotations

from gemmsmith.core.errors import ConfigError, KernelError
from gemmsmith.core.spec import SHARED_LIMIT
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.statements import Execute, Role, walk


def verify(kernel: Kernel) -> None:
    """Raises ConfigError or KernelError for a kernel that cannot run."""
    _shared(kernel)
    _registers(kernel)
    for constant in kernel.late:
        if constant.number is None:
            raise KernelError(f"{kernel.name}: nobody ever arrives on barrier {constant.name}")


def _shared(kernel: Kernel) -> None:
    excess = kernel.shared_bytes - SHARED_LIMIT
    if excess > 0:
        parts = ", ".join(f"{b.name} {b.count} x {b.slot_bytes}" for b in kernel.buffers)
        raise ConfigError(
            f"shared memory: {kernel.shared_bytes} bytes ({parts}) exceed the {SHARED_LIMIT} of a CTA by {excess}; "
            "use fewer stages or a smaller tile"
        )


def _registers(kernel: Kernel) -> None:
    """The setmaxnreg values of all warpgroups must fit what the CTA was launched with."""
    total, where = 0, None
    roles = [s for s in kernel.body.statements if isinstance(s, Role) and s.unit == "warpgroup"]
    for role in roles:
        budget = kernel.register_cap
        for statement in walk(role.body):
            if isinstance(statement, Execute) and hasattr(statement.instruction, "register_budget"):
                budget, where = statement.instruction.register_budget, statement.where
        total += budget * role.count
    pool = kernel.register_cap * (kernel.threads // 128)
    if where is not None and total > pool:
        raise KernelError(
            f"registers at {where}: the warpgroups ask for {total} a thread in all, {total - pool} more than "
            f"the pool of {kernel.threads // 128} x {kernel.register_cap}"
        )
