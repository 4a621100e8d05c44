"""The exceptions of this library. Each message names the argument, the value passed, and a value that works."""

from __future__ import annotations

from typing import Any


class GemmsmithError(Exception):
    """Base class of all errors that this library raises."""


class ArgumentError(GemmsmithError, ValueError):
    """A call's argument cannot be used: wrong shape, dtype, device, layout or overlap."""


class EpilogueError(ArgumentError):
    """An epilogue cannot be fused; the message quotes the user's line and names an alternative."""


class ConfigError(GemmsmithError, ValueError):
    """A config does not fit the problem or the chip; the message names the resource and the excess."""


class KernelError(GemmsmithError):
    """A kernel description is invalid; the message names the kernel's source line."""


class CompileError(GemmsmithError):
    """NVRTC or ptxas failed; the message has the compiler's log."""


class DeviceError(GemmsmithError, RuntimeError):
    """No usable GPU: none is present, there is no driver, or the kernel was built for another chip."""


class MissingPackageError(GemmsmithError, ImportError):
    """An optional package is not installed; the message has pip's command."""


class HazardError(GemmsmithError):
    """The simulator found races, deadlocks or misuses, listed in `hazards`."""

    def __init__(self, hazards: list[Any]) -> None:
        self.hazards = hazards
        super().__init__("\n".join(str(h) for h in hazards))


class RetraceWarning(UserWarning):
    """An epilogue is traced again in each call, which takes some tenths of a millisecond; the message says why."""


ARGUMENTS = (
    "scale_a", "scale_b", "epilogue", "operands", "out", "out_dtype", "accumulate", "precision", "fast_math",
    "deterministic", "config", "batch_invariant", "backend",
)  # fmt: skip
"""Argument names of `gemm`; any other name is an epilogue operand."""


def did_you_mean(name: str) -> str:
    """Return "; did you mean ...?" if an argument of `gemm` has a similar name, else ""."""
    from difflib import get_close_matches

    near = get_close_matches(name, ARGUMENTS, 1, 0.65)
    return f"; did you mean {near[0]}?" if near and name not in ARGUMENTS else ""
