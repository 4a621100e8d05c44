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
from gemmsmith.core.templates import fill_template
from gemmsmith.epilogue.inputs import operand_argument
from gemmsmith.epilogue.outputs import result_argument
from gemmsmith.host.export.header import in_c
from gemmsmith.host.export.signature import Array, Signature
from gemmsmith.host.planned_gemm import PlannedGemm
from gemmsmith.host.plans import Plan
from gemmsmith.torch.define_op import DECOMPOSITIONS, below_autograd
from gemmsmith.torch.graph_serialization import deserialize
from gemmsmith.torch.ops import OPERATORS, as_request, decompose, fp32_precision, result_dtype


def export_operators(programs: Sequence[Any], folder: str | Path, rows: Sequence[int] = ()) -> list[Any]:
    """Write operators.cpp, a library with which exported programs run gemmsmith's kernels without Python.

    Each kind of call gets a header (`Plan.export`), also those of experts. What no header computes PyTorch's operations
    do, with a warning that says why. operators.cpp begins with the command that compiles it; a process loads the
    library before a program that AOTInductor has packaged (examples/deploy/run_program.cpp). It needs no GPU.

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
    schemas = [f"{x._schema}" for x in OPERATORS.values()]
    parts = {
        "includes": "\n".join(f'#include "{name}.h"' for name in calls.functions),
        "functions": "\n".join(calls.functions.values()),
        "calls": " || ".join(f"call_{name}(c)" for name in calls.functions) or "false",
        "schemas": "\n".join(f'    m.def("{x.partition("::")[2]}");' for x in schemas),
    }
    calls.folder.mkdir(parents=True, exist_ok=True)
    (calls.folder / "operators.cpp").write_text(fill_template(Path(__file__).with_suffix(".cpp"), parts), "utf-8")
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
                self._export(graph, key, a, b, b2, offsets, numbers, operands)
                self._is_exported[kind] = True
            except GemmsmithError as error:
                what = " @ ".join(f"{tuple(x.shape)}" for x in (a, b))
                warnings.warn(f"gemm of {what}: {error}; PyTorch's operations compute it", stacklevel=2)
                self._is_exported[kind] = False
        if not self._is_exported[kind]:
            return decompose(*arguments)
        # AOTInductor passes None instead of an empty list of tensors (torch 2.14). Operators ignore surplus ones.
        return NotImplemented if operands else below_autograd(OPERATORS[len(graph.results)], *arguments[:-1], [a])

    def _export(
        self, graph: EpilogueGraph, key: int, a: Any, b: Any, b2: Any, offsets: Any, numbers: Any, operands: Any
    ) -> None:
        """Write the header for calls like this one, and its function. Raises ArgumentError if no header can."""
        plans, m = [], a.shape[-2]
        is_dynamic = isinstance(m, torch.SymInt) and a.dim() == 2
        for rows in dict.fromkeys((m.node.hint, *self.rows)) if is_dynamic else (None,):
            of_a, of_b, of_b2, ends, *others = (_spec(x, m, rows) for x in (a, b, b2, offsets, *operands))
            if ends:  # as by_rows
                others = [Spec((1, 1, *x.shape)[-3:], x.dtype, (0, 0, *x.strides)[-3:]) for x in others]
            request = as_request(graph, of_a, (of_b, of_b2) if of_b2 else of_b, numbers, others, ends)
            plans.append(Plan(PlannedGemm(request._replace(precision=fp32_precision(a)))))
        name, signature = f"gemm_{len(self.functions)}", Signature.of(plans[0]._planned)
        plans[0].export(self.folder, name, plans[1:])
        inputs = {"c.a": ("a", a), "c.b": ("b", b)} | (
            {} if ends is None else {"(*c.offsets)": ("in_offsets", offsets)}
        )
        for i, (operand, x) in enumerate(zip(graph.tensor_names, operands, strict=True)):
            inputs[f"c.operands[{i}]"] = operand_argument(operand), x
        checks = f"c.key != {key} || !c.b2 != {int(b2 is None)} || !c.offsets != {int(ends is None)}"
        self.functions[name] = "\n".join(_function(name, checks, signature, graph, inputs))


def _layout(x: Any) -> tuple[Any, ...]:
    """Return a tensor's dtype, sizes and strides, on which its kind of call depends; None for one that is dynamic."""
    return x.dtype, *(size if isinstance(size, int) else None for size in (*x.shape, *x.stride()))


def _spec(x: Any, m: Any, rows: int | None) -> Any:
    """Return a stand-in for a fake tensor, of the example's sizes, but for `rows` where the program has its M, `m`."""
    if x is None:
        return None

    def value(size: Any) -> Any:
        if isinstance(size, int):
            return size
        return rows if rows and size.node.expr == m.node.expr else size.node.hint

    return Spec(tuple(map(value, x.shape)), x.dtype, tuple(map(value, x.stride())))


def _function(
    name: str, check: str, signature: Signature, graph: EpilogueGraph, inputs: dict[str, tuple[str, Any]]
) -> Iterator[str]:
    """Yield the lines of the C++ function that runs a call and returns true, or false for a call of another kind.

    `check`: a condition of a call of another kind. `inputs`: arrays and their fake tensors, by the tensors in C++.
    """
    arrays, a = {x.name: x for x in signature.arrays}, inputs["c.a"][1]
    outputs = {f"c.results[{i}]": result_argument(r.name) for i, r in enumerate(graph.results)}
    if arrays.keys() != {y for y, _ in inputs.values()} | {*outputs.values()}:
        raise ArgumentError(f"got arrays {list(arrays)}, which an operator does not have")
    yield from (f"RUN({name})", f"static bool call_{name}(Call &c) {{", f"    {name}_args x = {{}};")
    checks = [check]
    for x, (y, tensor) in inputs.items():
        both = (x, "(*c.b2)") if arrays[y].second else (x,)
        checks += (f"!is({z}, {_code(tensor.dtype)}, {tensor.dim()})" for z in both)
    yield f"    if ({' || '.join(checks)}) return false;"
    known, checks, passed = set[Any](), list[str](), list[str]()
    for x, (y, tensor) in inputs.items():
        array = arrays[y]
        skipped = len(array.sizes) - tensor.dim()  # of an operand of groups that has no dimensions of batch and rows
        for i, (size, by) in enumerate(array.sizes[skipped:]):
            if isinstance(size, str) and size not in known:
                known.add(size)
                yield f"    x.{size} = {x}.size({i}) * {by};"
                checks += [f"x.{size} != {tensor.shape[i] * by}"] * isinstance(tensor.shape[i], int)
            checks.append(f"{x}.size({i}) != {in_c(size, by, 'x.')}")
            step = array.strides[skipped + i] if array.strides else 1
            if isinstance(step, int):
                checks.append(f"({x}.size({i}) > 1 && {x}.stride({i}) != {step})")
            if array.second:
                checks += (f"c.b2->{z}({i}) != c.b.{z}({i})" for z in ("size", "stride"))
        passed += _passed(array, x, skipped)
        if array.second:
            passed.append(f"    x.{array.second} = address(*c.b2);")
    yield f"    if ({' || '.join(checks)}) return false;"
    for r, (x, y) in zip(graph.results, outputs.items(), strict=True):
        if (arrays[y].strides or (1,))[-1] != 1:
            raise ArgumentError(f"got the result {r.name}, which is not row-major")
        shape = ", ".join(in_c(*size, "x.") for size in arrays[y].sizes)
        yield f"    c.results.push_back(empty({{{shape}}}, {_code(result_dtype(graph, r, a.dtype))}, c.a));"
        passed += _passed(arrays[y], x)
    passed += (f"    x.{operand_argument(y)} = (float)c.numbers[{i}];" for i, y in enumerate(graph.number_names))
    yield from (*passed, f"    run_{name}(x, c.a);", "    return true;", "}")


def _passed(array: Array, tensor: str, skipped: int = 0) -> Iterator[str]:
    yield f"    x.{array.name} = address({tensor});"
    for i, step in enumerate((array.strides or ())[skipped:]):
        if isinstance(step, str):
            yield f"    x.{step} = stride({tensor}, {i});"


def _code(dtype: Any) -> str:
    return f"aoti_torch_dtype_{dtype}()".replace("torch.", "")
