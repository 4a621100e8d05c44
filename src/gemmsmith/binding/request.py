"""A request: what the caller of `gemm`, `grouped_gemm`, `plan` or `simulate` asks for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from gemmsmith.arrays import ArrayLike, cache_key_and_address
from gemmsmith.backends import Backend
from gemmsmith.binding.results import outputs_by_name
from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import validate_fp32_scalar
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.core.grouping import Grouping
from gemmsmith.core.problem import SCALE_NAMES
from gemmsmith.core.scalars import is_number
from gemmsmith.epilogue.inputs import operand_argument
from gemmsmith.epilogue.outputs import result_argument
from gemmsmith.graph.frontend.fingerprint import fingerprint

_SCALE_A, _SCALE_B = map(operand_argument, SCALE_NAMES.values())
_INDEX_OF_B = 2
"""Index of b's signature in a key of `read_arrays`."""
_NO_OPERANDS: Mapping[str, Any] = {}


class VisitorTree(Protocol):
    """An epilogue as a tree of operations."""

    def graph(self) -> EpilogueGraph: ...


Epilogue: TypeAlias = Callable[..., Any] | EpilogueGraph | VisitorTree
Out: TypeAlias = ArrayLike | Sequence[ArrayLike] | Mapping[str, ArrayLike] | None
Accumulate: TypeAlias = Literal["fp32", "fp16", "int32", "promoted", "fast"]
Precision: TypeAlias = Literal["tf32", "3xtf32"]
Key = tuple[Hashable, tuple[Any, ...], Hashable]
"""The epilogue's fingerprint, or its id if it has none; the key of the arrays (`read_arrays`); the options."""


class Request(NamedTuple):
    """The arrays and options of out = epilogue(a @ b), each as in `gemm`; `bind` checks them.

    Requests are equal if the same plan and launches compute them: they may differ in addresses, and in numbers.

    Attributes:
        a: (m, k) or (batch, m, k), an array, a Spec or an ArrayInfo.
        b: (k, n) or (batch, k, n), likewise.
        operands: The epilogue's operands by name, and the arrays of the design or of the groups.
        epilogue: A function, a graph, a visitor tree (an object with a method `graph()` that returns one), or None.
        grouping: The groups of a grouped GEMM, whose table is one of `operands`.
        fingerprint: Hash key of the epilogue, if it was computed before; the epilogue is then restored from it. None:
            it is computed when it is needed.
    """

    a: Any
    b: Any
    out: Any = None
    operands: Mapping[str, Any] = _NO_OPERANDS
    epilogue: Any = None
    scale_a: Any = None
    scale_b: Any = None
    out_dtype: Any = None
    accumulate: Any = None
    precision: Any = None
    fast_math: bool = True
    deterministic: bool = True
    config: Config | None = None
    batch_invariant: bool = False
    backend: Backend = "auto"
    grouping: Grouping | None = None
    fingerprint: Hashable = None

    @property
    def inputs(self) -> dict[str, Any]:
        """The scales and the operands, as `Plan.run` takes them."""
        return {"scale_a": self.scale_a, "scale_b": self.scale_b, "operands": self.operands}

    @property
    def key(self) -> Key:
        """The key of a plan in caches. It is not hashable if an option is not; `bind` refuses such an option."""
        arrays, _ = read_arrays(self.a, self.b, outputs_by_name(self.out), self.operands, self.scale_a, self.scale_b)
        source = self.fingerprint or fingerprint(self.epilogue) or (None, id(self.epilogue))
        return source, arrays, (type(self.out), self[OPTIONS])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and self.key == other.key

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.key)


OPTIONS = slice(Request._fields.index("out_dtype"), Request._fields.index("fingerprint"))
"""The fields of a Request that are neither arrays nor of the epilogue."""


def read_arrays(
    a: Any, b: Any, results: Mapping[str, Any], operands: Mapping[str, Any], scale_a: Any = None, scale_b: Any = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a hashable key of the arrays' layouts; and by Pointer name the addresses and numbers, which it leaves out.

    The key has dtypes, shapes, strides, devices and addresses modulo 16. Raises ArgumentError for an object that is
    neither an array nor a number, and for a torch tensor that requires grad, whose gradient would be lost.
    """
    a_signature, a_address = cache_key_and_address(a, "a")
    b_signature, b_address = cache_key_and_address(b, "b")
    pointers: dict[str, Any] = {"a": a_address, "b": b_address}
    key: tuple[Hashable, ...] = a_signature, a_address & 15, b_signature, b_address & 15
    for name, x in operands.items():
        key += _read_operand(x, name, operand_argument(name), pointers)
    if scale_a is not None:
        key += _read_operand(scale_a, "scale_a", _SCALE_A, pointers)
    if scale_b is not None:
        key += _read_operand(scale_b, "scale_b", _SCALE_B, pointers)
    for name, x in results.items():
        pointer = result_argument(name)
        signature, pointers[pointer] = cache_key_and_address(x, name)
        key += pointer, signature, pointers[pointer] & 15
    return key, pointers


def without_rows(key: tuple[Any, ...], m: int) -> tuple[Any, ...]:
    """Return a key of `read_arrays` without the rows of matrices that have `m` rows: those of a, operands and results.

    It is equal for arrays that differ only in M.
    """
    return tuple([
        (x[0], (None, x[1][1]), *x[2:])
        if isinstance(x, tuple) and i != _INDEX_OF_B and key[i - 1] != _SCALE_B and len(x[1]) == 2 and x[1][0] == m
        else x
        for i, x in enumerate(key)
    ])  # fmt: skip


def _read_operand(x: Any, name: str, pointer: str, pointers: dict[str, Any]) -> tuple[Hashable, ...]:
    """Return an operand's part of the key of `read_arrays`, and add its address, or the number, to `pointers`."""
    if isinstance(x, (int, float)) or ((isinstance(x, np.generic) or not hasattr(x, "shape")) and is_number(x)):
        try:
            pointers[pointer] = float(x)
        except OverflowError:
            pointers[pointer] = validate_fp32_scalar(name, x)  # raises
        return pointer, "number"
    signature, pointers[pointer] = cache_key_and_address(x, name)
    return pointer, signature, pointers[pointer] & 15
