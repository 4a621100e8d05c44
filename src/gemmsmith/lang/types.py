"""Types of values in a kernel: what a register can hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Type:
    """A register type: its C++ spelling and the letter of its inline-PTX constraint. There is one object of each."""

    name: str
    cpp: str
    bits: int
    constraint: str
    signed: bool = False

    @property
    def is_integer(self) -> bool:
        return self.constraint in "rlh" and self.name != "pred"

    def __repr__(self) -> str:
        return self.name


PRED = Type("pred", "bool", 1, "r")
I32 = Type("i32", "int", 32, "r", signed=True)
U32 = Type("u32", "uint32_t", 32, "r")
I64 = Type("i64", "int64_t", 64, "l", signed=True)
U64 = Type("u64", "uint64_t", 64, "l")
U16 = Type("u16", "uint16_t", 16, "h")
F32 = Type("f32", "float", 32, "f")
ORDER_LENGTH = 288
"""Twice the 144 SMs of a full GH100."""
ORDER = Type("order", "Order", 16 * ORDER_LENGTH, "l")
"""A short table of small numbers, passed by value: for each cluster of a grid, where in the walk it begins."""
TENSOR_MAP = Type("tensor_map", "TensorMap", 1024, "l")
