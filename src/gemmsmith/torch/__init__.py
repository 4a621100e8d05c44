"""gemmsmith in PyTorch: products with epilogues that have gradients and can be compiled."""

from typing import TYPE_CHECKING, Any

from gemmsmith.torch.api import chain, gemm
from gemmsmith.torch.modules import FusedLinear, FusedLinearCrossEntropy, FusedMLP

if TYPE_CHECKING:
    from gemmsmith.torch.compiler.backend import options
    from gemmsmith.torch.compiler.explain import explain

__all__ = ["FusedLinear", "FusedLinearCrossEntropy", "FusedMLP", "chain", "explain", "gemm", "options"]


def __getattr__(name: str) -> Any:
    """What needs Inductor, which takes seconds to import."""
    if name == "explain":
        from gemmsmith.torch.compiler.explain import explain

        return explain
    if name == "options":
        from gemmsmith.torch.compiler.backend import options

        return options
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
