"""Which code of Python depends on nothing but its arguments, its closure, its defaults and the globals it names.

Bytecode is judged by what is known of it: an instruction, an attribute or a builtin that is not listed here may read
something else, or change it.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from gemmsmith.core.bounded import Bounded
from gemmsmith.epilogue.frontend.names import METHODS, NAMES

MODULES = (
    "torch", "torch.nn", "torch.nn.functional", "torch.special", "numpy", "math", "operator", "functools", "gemmsmith",
)  # fmt: skip
"""Modules of which functions, dtypes and constants are known; their attributes are assumed not to change."""
_DTYPES = (
    "float16 half bfloat16 float32 float float64 double float8_e4m3fn float8_e5m2 int8 uint8 int16 int32 int64 bool "
    "bool_"
)
ATTRIBUTES = frozenset({
    *NAMES, *METHODS, *_DTYPES.split(),
    "pi", "e", "inf", "nan", "tau", "newaxis",  # numbers
    "nn", "functional", "special",  # modules of torch
    "shape", "ndim", "dtype", "values",  # of a traced value
    "items", "keys", "append", "extend", "index", "count",  # of containers that the function made itself
    "reduce", "partial", "quantize", "top_k_softmax", "interleave", "deinterleave",
})  # fmt: skip
"""Attributes that give the same for ever, of the known modules and of every value that a fingerprint can hold."""
BUILTINS = frozenset(map(id, (
    abs, all, any, bool, dict, divmod, enumerate, filter, float, int, isinstance, len, list, map, max, min, pow, range,
    reversed, round, slice, sorted, sum, tuple, zip, ArithmeticError, AssertionError, NotImplementedError, RuntimeError,
    TypeError, ValueError,
)))  # fmt: skip
"""Builtin functions and types that read nothing but their arguments; by id, for a module may have others."""

_LISTED = """
    BINARY_OP BINARY_SLICE BUILD_CONST_KEY_MAP BUILD_LIST BUILD_MAP BUILD_SLICE BUILD_TUPLE CACHE CALL CALL_FUNCTION
    CALL_FUNCTION_EX CALL_FUNCTION_KW CALL_INTRINSIC_1 CALL_KW CALL_METHOD COMPARE_OP CONTAINS_OP COPY COPY_FREE_VARS
    DELETE_FAST DICT_MERGE DICT_UPDATE DUP_TOP DUP_TOP_TWO END_FOR EXTENDED_ARG FOR_ITER GET_ITER IS_OP JUMP_ABSOLUTE
    JUMP_BACKWARD JUMP_FORWARD JUMP_IF_FALSE_OR_POP JUMP_IF_TRUE_OR_POP KW_NAMES LIST_APPEND LIST_EXTEND LIST_TO_TUPLE
    LOAD_ASSERTION_ERROR LOAD_ATTR LOAD_CLOSURE LOAD_CONST LOAD_DEREF LOAD_FAST LOAD_FAST_AND_CLEAR LOAD_FAST_BORROW
    LOAD_FAST_BORROW_LOAD_FAST_BORROW LOAD_FAST_CHECK LOAD_FAST_LOAD_FAST LOAD_GLOBAL LOAD_METHOD LOAD_SMALL_INT
    MAKE_CELL MAKE_FUNCTION MAP_ADD NOP NOT_TAKEN POP_ITER POP_JUMP_BACKWARD_IF_FALSE POP_JUMP_BACKWARD_IF_NONE
    POP_JUMP_BACKWARD_IF_NOT_NONE POP_JUMP_BACKWARD_IF_TRUE POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_NONE
    POP_JUMP_FORWARD_IF_NOT_NONE POP_JUMP_FORWARD_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE
    POP_JUMP_IF_TRUE POP_TOP PRECALL PUSH_NULL RAISE_VARARGS RERAISE RESUME RETURN_CONST RETURN_VALUE ROT_FOUR ROT_N
    ROT_THREE ROT_TWO SET_FUNCTION_ATTRIBUTE STORE_DEREF STORE_FAST STORE_FAST_LOAD_FAST STORE_FAST_MAYBE_NULL
    STORE_FAST_STORE_FAST SWAP TO_BOOL UNPACK_EX UNPACK_SEQUENCE
"""
_INSTRUCTIONS = frozenset(_LISTED.split())
"""Of CPython 3.10 to 3.14, besides BINARY_, INPLACE_ and UNARY_. They compute with the stack, local variables and
constants; what else some of them read is checked by name below."""
_INTRINSICS = ("INTRINSIC_UNARY_POSITIVE", "INTRINSIC_LIST_TO_TUPLE")


class Reads(NamedTuple):
    """The globals that a code object names; or, if it may read anything else, what that is, in words."""

    names: tuple[str, ...]
    other: str


def reads(code: CodeType) -> Reads:
    """What a function with this code reads besides its arguments and its closure, functions inside it included."""
    found = _READS.get(id(code))
    if found is None:
        names: set[str] = set()
        other = next(_other(code, names), "")
        _READS[id(code)] = found = code, Reads(tuple(sorted(names)), other)
    return found[1]


_READS: dict[int, tuple[CodeType, Reads]] = Bounded(4096)
"""By id, which is not used again while the entry keeps the code alive."""


def _other(code: CodeType, names: set[str]) -> Iterator[str]:
    """What the code may read besides globals, whose names are added to `names`."""
    for instruction in dis.get_instructions(code):
        op, name = instruction.opname, instruction.argval
        if op == "LOAD_GLOBAL":
            names.add(name)
        elif op in ("LOAD_ATTR", "LOAD_METHOD") and name not in ATTRIBUTES:
            yield f"it reads the attribute {name}"
        elif op in ("IMPORT_NAME", "IMPORT_FROM"):
            yield f"it imports {name}"
        elif op == "STORE_DEREF" and name not in code.co_cellvars:
            yield f"it assigns to {name}, which is not its own"
        elif op == "CALL_INTRINSIC_1" and instruction.argrepr not in _INTRINSICS:
            yield f"it executes {instruction.argrepr}"
        elif op not in _INSTRUCTIONS and not op.startswith(("BINARY_", "INPLACE_", "UNARY_")):
            yield f"it executes {op}"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _other(constant, names)


def is_known(x: Any) -> bool:
    """Whether x is one of the known modules, or a function, a dtype or a builtin in one that always does the same."""
    if isinstance(x, ModuleType):
        return x.__name__ in MODULES and sys.modules.get(x.__name__) is x
    if id(x) in BUILTINS:
        return True
    modules = [vars(sys.modules[name]) for name in MODULES if name in sys.modules]
    return any(module.get(name) is x for module in modules for name in ATTRIBUTES)
