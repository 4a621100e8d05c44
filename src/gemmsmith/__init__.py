"""gemmsmith forges GEMM kernels for NVIDIA Hopper GPUs: D = A @ B, readable, and executable without a GPU."""

from gemmsmith.api import gemm, plan, simulate
from gemmsmith.arrays import Spec
from gemmsmith.core.config import Config
from gemmsmith.core.errors import (
    ArgumentError,
    CompileError,
    ConfigError,
    DeviceError,
    GemmsmithError,
    HazardError,
    KernelError,
)
from gemmsmith.plans import Plan, Simulation

__version__ = "0.1.0"

__all__ = [
    "ArgumentError", "CompileError", "Config", "ConfigError", "DeviceError", "GemmsmithError", "HazardError",
    "KernelError", "Plan", "Simulation", "Spec", "gemm", "plan", "simulate",
]  # fmt: skip
