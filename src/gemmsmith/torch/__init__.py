"""gemmsmith for PyTorch: GEMMs with fused epilogues that are differentiable and can be compiled."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gemmsmith.torch.api import gemm
from gemmsmith.torch.define_op import decompositions
from gemmsmith.torch.grouped import grouped_gemm
from gemmsmith.torch.loss import FusedLinearCrossEntropy
from gemmsmith.torch.mlp.gemm_then_linear import gemm_then_linear
from gemmsmith.torch.mlp.layers import FusedLinear, FusedMLP
from gemmsmith.torch.moe.layer import FusedMoE
from gemmsmith.torch.moe.transformers import register_experts
from gemmsmith.torch.operators import export_operators
from gemmsmith.torch.tune import autotune, warmup

if TYPE_CHECKING:
    from gemmsmith.torch.compiler.backend import options
    from gemmsmith.torch.compiler.explain import explain

__all__ = [
    "FusedLinear", "FusedLinearCrossEntropy", "FusedMLP", "FusedMoE", "autotune", "decompositions",
    "explain", "export_operators", "gemm", "gemm_then_linear", "grouped_gemm", "options", "register_experts", "warmup",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import `explain` and `options` on first use: they import Inductor, which takes seconds."""
    if name in ("explain", "options"):
        return getattr(import_module(f"gemmsmith.torch.compiler.{'explain' if name == 'explain' else 'backend'}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
