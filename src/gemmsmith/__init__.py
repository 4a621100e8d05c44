"""gemmsmith forges GEMM kernels for NVIDIA Hopper GPUs: D = epilogue(A @ B), readable, and executable without a GPU."""

from gemmsmith.api import free_memory, gemm, grouped_gemm, plan, simulate, tune
from gemmsmith.arrays import Spec
from gemmsmith.core import fork as _fork  # noqa: F401 registers what it does
from gemmsmith.core.config import Config
from gemmsmith.core.design import Design, register_design
from gemmsmith.core.errors import (
    ArgumentError,
    CompileError,
    ConfigError,
    DeviceError,
    EpilogueError,
    GemmsmithError,
    HazardError,
    KernelError,
    RetraceWarning,
)
from gemmsmith.core.grouping import Grouping
from gemmsmith.graph.frontend.interleave import deinterleave, interleave
from gemmsmith.graph.frontend.values import top_k_softmax
from gemmsmith.host.launch_kernel import launch
from gemmsmith.host.packing import pack
from gemmsmith.host.plans import Plan, Simulation
from gemmsmith.host.quantization import dequantize, quantize

__version__ = "0.1.0"

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
    "Plan",
    "RetraceWarning",
    "Simulation",
    "Spec",
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
    "top_k_softmax",
    "tune",
]  # fmt: skip
