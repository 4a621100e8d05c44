"""The exceptions of this library. Each message names the argument, what was given, and what would work."""

from __future__ import annotations

from typing import Any


class GemmsmithError(Exception):
    """Base of every error raised on purpose by this library."""


class ArgumentError(GemmsmithError, ValueError):
    """A call's argument cannot be used: wrong shape, dtype, device, layout or overlap."""


class EpilogueError(ArgumentError):
    """An epilogue cannot become part of the kernel; the message quotes the user's line and says what would work."""


class ConfigError(GemmsmithError, ValueError):
    """A config does not fit the problem or the chip; the message says which resource and by how much."""


class KernelError(GemmsmithError):
    """A kernel description is wrong; the message names the kernel's line."""


class CompileError(GemmsmithError):
    """NVRTC or ptxas refused the generated source; the message holds the compiler's log."""


class DeviceError(GemmsmithError, RuntimeError):
    """No usable GPU: none present, no driver, or not the chip that a kernel is made for."""


class HazardError(GemmsmithError):
    """The simulator found a race, a deadlock or a misuse; `hazards` lists them."""

    def __init__(self, hazards: list[Any]) -> None:
        self.hazards = hazards
        super().__init__("\n".join(str(h) for h in hazards))


class RetraceWarning(UserWarning):
    """An epilogue is traced again at each call, which takes some tenths of a millisecond; the message says why."""


ARGUMENTS = (
    "scale_a", "scale_b", "epilogue", "operands", "out", "out_dtype", "accumulate", "precision", "exact", "atomic",
    "config", "batch_invariant", "backend",
)  # fmt: skip
"""The names of `gemm`'s own arguments; any other name is an operand's."""


def meant(name: str) -> str:
    """The end of an error message about an operand that the epilogue does not read: the argument with a similar name,
    or an empty string."""
    from difflib import get_close_matches

    near = get_close_matches(name, ARGUMENTS, 1, 0.65)
    return f"; did you mean {near[0]}?" if near and name not in ARGUMENTS else ""
