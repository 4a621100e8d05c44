"""Value types of a kernel: register types, and structs, which only parameters have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemmsmith.core.frozen import cached_property


@dataclass(frozen=True, eq=False)
class ScalarType:
    """A scalar type. Instances are singletons, compared by identity.

    `cpp`: its name in C++. `constraint`: the letter of its registers in inline PTX. `struct`: the C++ definition of a
    type that no register holds, such as a tensor map; "" for others.
    """

    name: str
    cpp: str
    bits: int
    constraint: str
    signed: bool = False
    struct: str = ""

    @property
    def constant(self) -> str:
        """What declares a constant in C++: a reference to a struct, since no register holds one."""
        return f"const {self.cpp}{'&' * bool(self.struct)}"

    @property
    def is_integer(self) -> bool:
        """True for integer types; predicates are not integers."""
        return self.constraint in "rlh" and self.name != "pred" and not self.struct

    @cached_property
    def range(self) -> range:
        """The numbers that an integer type holds."""
        low = -(1 << self.bits - 1) if self.signed else 0
        return range(low, low + (1 << self.bits))

    def wrap(self, x: Any) -> Any:
        """Return x modulo 2^bits in the type's range: an int or, unless the type has 64 bits, an array of int64."""
        low = self.range.start
        return ((x - low) & ((1 << self.bits) - 1)) + low

    def __repr__(self) -> str:
        return self.name


PRED = ScalarType("pred", "bool", 1, "r")
"""True or false; PTX: a predicate."""
I32 = ScalarType("i32", "int", 32, "r", signed=True)
"""A signed integer of 32 bits."""
U32 = ScalarType("u32", "uint32_t", 32, "r")
"""An unsigned integer of 32 bits, or 32 bits of any meaning, such as two packed values."""
I64 = ScalarType("i64", "int64_t", 64, "l", signed=True)
"""A signed integer of 64 bits."""
U64 = ScalarType("u64", "uint64_t", 64, "l")
"""An unsigned integer of 64 bits, such as an address in global memory, in bytes."""
U16 = ScalarType("u16", "uint16_t", 16, "h")
"""An unsigned integer of 16 bits."""
F32 = ScalarType("f32", "float", 32, "f")
"""A float of 32 bits."""
TENSOR_MAP = ScalarType(
    "tensor_map", "TensorMap", 1024, "l",
    struct="struct alignas(64) TensorMap { uint64_t opaque[16]; };  // CUtensorMap\n",
)  # fmt: skip
