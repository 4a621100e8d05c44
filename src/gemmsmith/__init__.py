"""gemmsmith forges GEMM kernels for NVIDIA Hopper GPUs: D = epilogue(A @ B), readable, and executable without a GPU."""

# ruff: noqa: F403, F405
from typing import TYPE_CHECKING, Any

from gemmsmith.core import fork as _fork  # noqa: F401 registers what it does
from gemmsmith.core.version import __version__ as __version__

if TYPE_CHECKING:
    from gemmsmith.api import *

__all__ = [
    "ArgumentError",
    "CompileError",
    "Config",
    "ConfigError",
    "Design",
    "DeviceError",
    "EpilogueError",
    "GemmsmithError",
    "Grouping",
    "HazardError",
    "KernelError",
    "MissingPackageError",
    "Plan",
    "RetraceWarning",
    "Simulation",
    "Spec",
    "autotune",
    "deinterleave",
    "dequantize",
    "free_memory",
    "gemm",
    "grouped_gemm",
    "interleave",
    "launch",
    "pack",
    "plan",
    "quantize",
    "register_design",
    "simulate",
    "simulate_launch",
    "top_k_softmax",
    "tune",
]  # fmt: skip


def _get_public_name(name: str) -> Any:
    """Return a public name. The first one imports the library, which the command's --version does not wait for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gemmsmith import api

    globals().update({x: getattr(api, x) for x in __all__})
    return globals()[name]


def __dir__() -> list[str]:
    """Return the public names, whether they were imported or not."""
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # to type checkers, no other name exists
    __getattr__ = _get_public_name
