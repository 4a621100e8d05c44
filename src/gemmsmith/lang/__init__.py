"""The language of kernels: `Builder` records one; `gemmsmith.hw` has the instructions."""

from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32, I32, I64, PRED, U16, U32, U64
from gemmsmith.lang.values import Value

__all__ = ["F32", "I32", "I64", "PRED", "U16", "U32", "U64", "Builder", "Kernel", "Value"]
