"""Checks that Python code depends on nothing but its arguments, closure, defaults and the globals that it names.

The check inspects bytecode: an instruction, attribute or builtin that is not listed here may read or change something
else.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from gemmsmith.core.dicts import BoundedCache
from gemmsmith.graph.frontend.op_table import EPILOGUE_FUNCTIONS, find_op, op_names

STABLE_MODULES = (
    "torch", "torch.nn", "torch.nn.functional", "torch.special", "numpy", "math", "operator", "functools", "gemmsmith",
)  # fmt: skip
"""Modules whose functions, dtypes and constants are listed below; their attributes are assumed not to change."""
_DTYPES = (
    "float16 half bfloat16 float32 float float64 double float8_e4m3fn float8_e5m2 int8 uint8 int16 int32 int64 bool "
    "bool_"
)
STABLE_ATTRIBUTES = frozenset({
    *_DTYPES.split(),
    "pi", "e", "inf", "nan", "tau", "newaxis",  # numbers
    "nn", "functional", "special",  # modules of torch
    "shape", "ndim", "dtype", "values",  # of a traced value
    "items", "keys", "append", "extend", "index", "count",  # of containers that the function made itself
    "reduce", "partial",
})  # fmt: skip
"""Attributes that never change, of the modules above and of every value that a fingerprint can contain, besides the
names of operations."""
STABLE_BUILTIN_IDS = frozenset(map(id, (
    abs, all, any, bool, dict, divmod, enumerate, filter, float, int, isinstance, len, list, map, max, min, pow, range,
    reversed, round, slice, sorted, sum, tuple, zip, ArithmeticError, AssertionError, NotImplementedError, RuntimeError,
    TypeError, ValueError,
)))  # fmt: skip
"""Ids of the builtin functions and types that read nothing but their arguments."""

_OPCODES_TEXT = """
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
_STABLE_OPCODES = frozenset(_OPCODES_TEXT.split())
"""Opcodes of CPython 3.10 to 3.14, in addition to BINARY_*, INPLACE_* and UNARY_*, that use only the stack, local
variables and constants; names that some of them read are checked below."""
_STABLE_INTRINSICS = ("INTRINSIC_UNARY_POSITIVE", "INTRINSIC_LIST_TO_TUPLE")


class Reads(NamedTuple):
    """The globals that a code object names, and a description of anything else that it may read, or ""."""

    names: tuple[str, ...]
    unknown_read: str


def find_reads(code: CodeType) -> Reads:
    """Return what a code object and its nested functions read besides arguments and closure; see `Reads`."""
    cached = _READS.get(id(code))
    if cached is None:
        names: set[str] = set()
        unknown_reads = list(_find_unknown_reads(code, names))
        _READS[id(code)] = cached = code, Reads(tuple(sorted(names)), next(iter(unknown_reads), ""))
    return cached[1]


_READS: dict[int, tuple[CodeType, Reads]] = BoundedCache(4096)
"""Results by id of the code, which is not reused while the entry keeps the code alive."""


def _find_unknown_reads(code: CodeType, names: set[str]) -> Iterator[str]:
    """Yield a description of each thing that the code may read, or change, besides globals that it names.

    The names of these globals are added to `names`. Nested functions are included.
    """
    for instruction in dis.get_instructions(code):
        op, name = instruction.opname, instruction.argval
        if op == "LOAD_GLOBAL":
            names.add(name)
        elif op in ("LOAD_ATTR", "LOAD_METHOD") and not _is_stable(name):
            yield f"it reads the attribute {name}"
        elif op in ("IMPORT_NAME", "IMPORT_FROM"):
            yield f"it imports {name}"
        elif op == "STORE_DEREF" and name not in code.co_cellvars:
            yield f"it assigns to {name}, which is not its own"
        elif op == "CALL_INTRINSIC_1" and instruction.argrepr not in _STABLE_INTRINSICS:
            yield f"it executes {instruction.argrepr}"
        elif op not in _STABLE_OPCODES and not op.startswith(("BINARY_", "INPLACE_", "UNARY_")):
            yield f"it executes {op}"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _find_unknown_reads(constant, names)


def _is_stable(attribute: str) -> bool:
    return attribute in STABLE_ATTRIBUTES or attribute in EPILOGUE_FUNCTIONS or find_op(attribute) is not None


def is_listed_as_constant(x: Any) -> bool:
    """Return whether x is a module or builtin that this file lists, or a listed attribute of such a module."""
    if isinstance(x, ModuleType):
        return x.__name__ in STABLE_MODULES and sys.modules.get(x.__name__) is x
    if id(x) in STABLE_BUILTIN_IDS:
        return True
    modules = [vars(sys.modules[name]) for name in STABLE_MODULES if name in sys.modules]
    names = {*STABLE_ATTRIBUTES, *op_names(), *EPILOGUE_FUNCTIONS}
    return any(module.get(name) is x for module in modules for name in names)


def is_module(x: Any) -> bool:
    """Return whether x is a torch.nn.Module."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.nn.Module)
