"""Value types of a kernel: register types, and three parameter types that no register holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class ScalarType:
    """A scalar type: C++ spelling, width and inline-PTX constraint letter.

    Instances are singletons, compared by identity.
    """

    name: str
    cpp: str
    bits: int
    constraint: str
    signed: bool = False

    @property
    def is_integer(self) -> bool:
        """True for integer types; predicates are not integers."""
        return self.constraint in "rlh" and self.name != "pred"

    def __repr__(self) -> str:
        return self.name


PRED = ScalarType("pred", "bool", 1, "r")
I32 = ScalarType("i32", "int", 32, "r", signed=True)
U32 = ScalarType("u32", "uint32_t", 32, "r")
I64 = ScalarType("i64", "int64_t", 64, "l", signed=True)
U64 = ScalarType("u64", "uint64_t", 64, "l")
U16 = ScalarType("u16", "uint16_t", 16, "h")
F32 = ScalarType("f32", "float", 32, "f")
MAX_CLUSTERS = 288
"""Maximum clusters of a persistent kernel's grid, and entries of a cluster permutation: twice the 144 SMs of a full
GH100 (NVIDIA H100 whitepaper)."""
CLUSTER_PERMUTATION = ScalarType("cluster_permutation", "ClusterPermutation", 16 * MAX_CLUSTERS, "l")
"""Table passed by value as a kernel parameter: entry c is the raster position of the first tile of cluster c."""
FAST_DIVMOD = ScalarType("fast_divmod", "FastDivmod", 64, "l")
"""A divisor, passed by value as a kernel parameter: multiplier | shift << 32 on the host."""
TENSOR_MAP = ScalarType("tensor_map", "TensorMap", 1024, "l")
