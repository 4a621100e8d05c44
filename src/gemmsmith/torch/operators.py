"""A library of the operators of exported programs, in C++, with an exported header for each kind of call."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from gemmsmith.arrays import Spec
from gemmsmith.core.errors import ArgumentError, GemmsmithError
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.epilogue.inputs import operand_argument
from gemmsmith.epilogue.outputs import result_argument
from gemmsmith.host.export.trace import Signature
from gemmsmith.host.planned_gemm import PlannedGemm
from gemmsmith.host.plans import Plan
from gemmsmith.torch.graph_serialization import deserialize
from gemmsmith.torch.ops import (
    DECOMPOSITIONS,
    OPERATORS,
    as_request,
    below_autograd,
    decompose,
    fp32_precision,
    result_dtype,
)


def export_operators(programs: Sequence[Any], folder: str | Path, rows: Sequence[int] = ()) -> list[Any]:
    """Write operators.cpp, a library with which exported programs run gemmsmith's kernels without Python.

    Each kind of call of `gemm` gets a header (`Plan.export`). What no header computes, such as groups and reductions,
    PyTorch's operations do, with a warning that says why. operators.cpp begins with the command that compiles it; a
    process loads it before a program that AOTInductor has packaged (examples/deploy/run_program.cpp). No GPU is needed
    to write it.

    Args:
        programs: Those of torch.export that one process runs: it can load one such library.
        folder: Where operators.cpp and the headers go.
        rows: M for which kernels are chosen where the program's M is dynamic, besides that of its example inputs.

    Returns:
        The programs for AOTInductor, which call the library.

    Raises:
        ArgumentError: A program has an operator that cannot be decomposed; see `decompositions`.
    """
    calls = _Calls(Path(folder), rows)
    table = DECOMPOSITIONS | dict.fromkeys(OPERATORS.values(), calls.keep_or_decompose)
    made = [program.run_decompositions(table) for program in programs]
    text, schemas = Path(__file__).with_suffix(".cpp").read_text("utf-8"), [f"{x._schema}" for x in OPERATORS.values()]
    parts = {
        "includes": "\n".join(f'#include "{name}.h"' for name in calls.functions),
        "functions": "\n".join(calls.functions.values()),
        "calls": " || ".join(f"call_{name}(c)" for name in calls.functions) or "false",
        "schemas": "\n".join(f'    m.def("{x.partition("::")[2]}");' for x in schemas),
    }
    for part, value in parts.items():
        text = text.replace(f"<!-- {part} -->", value)
    calls.folder.mkdir(parents=True, exist_ok=True)
    (calls.folder / "operators.cpp").write_text(text, "utf-8")
    return made


class _Calls:
    """The kinds of calls of gemm_{o} in programs. `functions`: C++ functions that run them, by the headers' names."""

    def __init__(self, folder: Path, rows: Sequence[int]) -> None:
        self.folder, self.rows = folder, rows
        self.functions: dict[str, str] = {}
        self._is_exported: dict[Any, bool] = {}

    def keep_or_decompose(self, *arguments: Any) -> Any:
        """Export the kind of a call, if it is new, and keep the call; or compute it by PyTorch's operations."""
        a, b, b2, offsets, key, epilogue, numbers, operands = arguments
        graph = deserialize(epilogue)
        if len(operands) > len(graph.tensor_names):
            return NotImplemented  # a call that was exported: see below
        kind = key, b2 is None, offsets is None, *map(_layout, (a, b, *operands))
        if kind not in self._is_exported:
            try:
                if b2 is not None or offsets is not None:
                    raise ArgumentError("got groups, or two arrays as b, which no operator in C++ takes")
                self._export(graph, key, a, b, numbers, operands)
                self._is_exported[kind] = True
            except GemmsmithError as error:
                what = " @ ".join(f"{tuple(x.shape)}" for x in (a, b))
                warnings.warn(f"gemm of {what}: {error}; PyTorch's operations compute it", stacklevel=2)
                self._is_exported[kind] = False
        if not self._is_exported[kind]:
            return decompose(*arguments)
        # AOTInductor passes None instead of an empty list of tensors (torch 2.14). Operators ignore surplus ones.
        return NotImplemented if operands else below_autograd(OPERATORS[len(graph.results)], *arguments[:-1], [a])

    def _export(self, graph: EpilogueGraph, key: int, a: Any, b: Any, numbers: Any, operands: Any) -> None:
        """Write the header for calls like this one, and its function. Raises ArgumentError if no header can."""
        plans, m = [], a.shape[-2]
        for rows in (None, *self.rows) if isinstance(m, torch.SymInt) and a.dim() == 2 else (None,):
            of_a, of_b, *others = (_spec(x, m, rows) for x in (a, b, *operands))
            request = as_request(graph, of_a, of_b, numbers, others)
            plans.append(Plan(PlannedGemm(request._replace(precision=fp32_precision(a)))))
        name, signature = f"gemm_{len(self.functions)}", Signature.of(plans[0]._planned)
        plans[0].export(self.folder, name, plans[1:])
        self.functions[name] = "\n".join(_function(name, key, signature, graph, a, b, operands))


def _layout(x: Any) -> tuple[Any, ...]:
    """Return a tensor's dtype, sizes and strides, on which its kind of call depends; None for one that is dynamic."""
    return x.dtype, *(size if isinstance(size, int) else None for size in (*x.shape, *x.stride()))


def _spec(x: Any, m: Any, rows: int | None) -> Spec:
    """Return a stand-in for a fake tensor, of the example's sizes, but for `rows` where the program has its M, `m`."""

    def value(size: Any) -> Any:
        if isinstance(size, int):
            return size
        return rows if rows and size.node.expr == m.node.expr else size.node.hint

    return Spec(tuple(map(value, x.shape)), x.dtype, tuple(map(value, x.stride())))


def _function(
    name: str, key: int, signature: Signature, graph: EpilogueGraph, a: Any, b: Any, operands: Any
) -> Iterator[str]:
    """Yield the lines of the C++ function that runs a call and returns true, or false for a call of another kind."""
    arrays = {x.name: x for x in signature.arrays}
    inputs = {"a": ("c.a", a.dtype), "b": ("c.b", b.dtype)}
    for i, (operand, x) in enumerate(zip(graph.tensor_names, operands, strict=True)):
        inputs[operand_argument(operand)] = f"c.operands[{i}]", x.dtype
    outputs = {result_argument(r.name): (f"c.results[{i}]", result_dtype(graph, r, a.dtype))
               for i, r in enumerate(graph.results)}  # fmt: skip
    if arrays.keys() != inputs.keys() | outputs.keys():
        raise ArgumentError(f"got arrays {list(arrays)}, which an operator does not have")
    checks = [f"c.key != {key}"]
    checks += (f"!is({x}, {_code(dtype)}, {len(arrays[y].sizes)})" for y, (x, dtype) in inputs.items())
    sizes = {"m": ("a", a.dim() - 2, a), "k": ("a", a.dim() - 1, a), "n": ("b", b.dim() - 1, b)}
    if a.dim() + b.dim() > 4:
        sizes["batch"] = ("a", 0, a) if a.dim() > 2 else ("b", 0, b)
    yield from (f"RUN({name})", f"static bool call_{name}(Call &c) {{", f"    {name}_args x = {{}};")
    yield f"    if ({' || '.join(checks)}) return false;"
    yield from (f"    x.{size} = c.{x}.size({i});" for size, (x, i, _) in sizes.items())
    checks = [f"x.{y} != {x.shape[i]}" for y, (_, i, x) in sizes.items() if isinstance(x.shape[i], int)]
    for y, (x, _) in inputs.items():
        checks += (f"{x}.size({i}) != {_size(*size)}" for i, size in enumerate(arrays[y].sizes))
        strides = enumerate(arrays[y].strides or ())
        checks += (f"({x}.size({i}) > 1 && {x}.stride({i}) != {z})" for i, z in strides if isinstance(z, int))
    yield f"    if ({' || '.join(checks)}) return false;"
    for y, (_, dtype) in outputs.items():
        shape = ", ".join(_size(*size) for size in arrays[y].sizes)
        yield f"    c.results.push_back(empty({{{shape}}}, {_code(dtype)}, c.a));"
    for y, (x, _) in (inputs | outputs).items():
        yield f"    x.{y} = {x}.data_ptr();"
        yield from (
            f"    x.{z} = stride({x}, {i});" for i, z in enumerate(arrays[y].strides or ()) if isinstance(z, str)
        )
    yield from (f"    x.{operand_argument(y)} = (float)c.numbers[{i}];" for i, y in enumerate(graph.number_names))
    yield f"    run_{name}(x, c.a);\n    return true;\n}}"


def _code(dtype: Any) -> str:
    """Return a torch.dtype in C++."""
    return f"aoti_torch_dtype_{dtype}()".replace("torch.", "")


def _size(size: str | int, by: int) -> str:
    """Return a variable or a number, divided by another and rounded up, in C++."""
    whole = f"x.{size}" if isinstance(size, str) else f"{size}"
    return f"(({whole} + {by - 1}) / {by})" if by > 1 else whole
