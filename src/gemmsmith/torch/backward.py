"""What a backward pass computes, worked out from an epilogue's text: constants, which torch.compile takes as such.

Names are those of `derivative`: x_name an operand of the epilogue, y_name a result, d_name its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import NamedTuple, ParamSpec, TypeVar

import torch

from gemmsmith.core.dtypes import FP32, DType, as_dtype
from gemmsmith.core.graph import Graph, Node, Result, over
from gemmsmith.epilogue.frontend.derivative import (
    GRADIENT,
    OPERAND,
    PRODUCT,
    VALUE,
    derivative,
    differentiable,
    extremes,
    storing,
    ties,
)
from gemmsmith.epilogue.lines import refused
from gemmsmith.torch import text
from gemmsmith.torch.operator import MOST_RESULTS, arity

A, B = "@a", "@b"
"""Stand for a and b among the names of operands."""

Names = tuple[str, ...]
P = ParamSpec("P")
R = TypeVar("R")


def constant(function: Callable[P, R]) -> Callable[P, R]:
    """A function of constants that is called while a graph is compiled, not traced; it remembers what it gave."""
    known = lru_cache(maxsize=1024)(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return known(*args, **kwargs)  # type: ignore[arg-type]

    marked: Callable[P, R] = torch.compiler.assume_constant_result(call)
    return marked


class Step(NamedTuple):
    """A product whose results are gradients, or counts. `tensors`: the operands' names, and 0, or the width of the
    matrix to which the gradient of a reduction is expanded."""

    epilogue: str
    reads_product: bool
    tensors: tuple[tuple[str, int], ...]
    numbers: Names
    results: Names


class Reduced(NamedTuple):
    """A result that is a reduction, `over` some of the product's indices b, m, n. `mean_of`: the width of the values
    that it is a mean of, or 0; `ties`: counts the elements that are equal to a maximum or minimum."""

    name: str
    over: str
    keepdim: bool
    mean_of: int
    ties: Step | None


@constant
def tensors(epilogue: str) -> Names:
    """The names of a text's operands that are tensors."""
    return tuple(o.name for o in text.read(epilogue).operands if o.dtype is not None)


@constant
def numbers(epilogue: str) -> Names:
    """The names of a text's operands that are numbers."""
    return tuple(o.name for o in text.read(epilogue).operands if o.dtype is None)


@constant
def results(epilogue: str) -> Names:
    """The names of a text's results."""
    return tuple(r.name for r in text.read(epilogue).results)


class Forward(NamedTuple):
    """A text with the results that its derivative reads, and their names; the results that users see; where its tensors
    and numbers are among those of the text that it was made of. What the backward pass keeps: the names, and where they
    are among a, b, the operands and the results. Which results have no gradient."""

    epilogue: str
    stored: Names
    of: Names
    tensors: tuple[int, ...]
    numbers: tuple[int, ...]
    kept: Names
    kept_at: tuple[int, ...]
    flat: tuple[int, ...]


@constant
def forward(epilogue: str, wanted: Names, dtype: str, recompute: bool) -> Forward:
    """What computes a text's results, and keeps what the gradients of `wanted` need: names of operands, A and B.

    Raises EpilogueError for what has no gradient, ArgumentError where there would be too many operands.
    """
    graph = text.read(epilogue)
    for r in graph.results:
        if r.dtype is not None and r.dtype.bits < 16:
            raise refused(f"{r.name}: got a result in {r.dtype}, which has no gradient; use torch.no_grad(), or bf16")
    found: tuple[str, Names] = epilogue, ()
    if not recompute:
        kept_graph, names = storing(graph, _wanted(wanted), _default(dtype))
        if len(kept_graph.results) <= MOST_RESULTS:
            found = text.write(kept_graph), names
    longer, stored = found
    of, made = results(epilogue), text.read(longer)
    flows = differentiable(made, _wanted(wanted))
    flat = tuple(i for i, r in enumerate(made.results) if not flows[r.node])
    differing = tuple(name for i, name in enumerate(of) if i not in flat)
    reduced, steps, _ = backward(longer, stored, differing, wanted, dtype)
    for step in steps:
        arity(step.epilogue)
    every = [*steps, *(r.ties for r in reduced if r.ties)]
    read = {name for step in every for name, _ in step.tensors}
    product = any(step.reads_product for step in every)
    read |= {A} if product or B in wanted else set()
    read |= {B} if product or A in wanted else set()
    places = (A, B, *(OPERAND + name for name in tensors(longer)), *(VALUE + name for name in results(longer)))
    kept = [(i, name) for i, name in enumerate(places) if name in read]
    return Forward(
        longer, stored, of,
        tuple(tensors(epilogue).index(name) for name in tensors(longer)),
        tuple(numbers(epilogue).index(name) for name in numbers(longer)),
        tuple(name for _, name in kept), tuple(i for i, _ in kept), flat,
    )  # fmt: skip


@constant
def backward(
    epilogue: str, stored: Names, of: Names, wanted: Names, dtype: str
) -> tuple[tuple[Reduced, ...], tuple[Step, ...], str]:
    """What computes the gradients of `wanted` from those `of` results: the results that are reductions, whose gradients
    are shaped first; the products; and the gradient that is the product's as it is, if one is."""
    graph, default, passed_on = text.read(epilogue), _default(dtype), ""
    reduced = tuple(_reduced(graph, r, stored, of, default) for r in graph.results if graph.is_reduced(r))
    steps, names = [], _wanted(wanted)
    for first in range(0, len(names), MOST_RESULTS):
        found = derivative(graph, of, names[first : first + MOST_RESULTS], stored, default)
        for r in found.results:
            node = found.nodes[r.node]
            if r.name == "out" and node.op == "operand" and node.value.startswith(GRADIENT):
                passed_on = node.value
        left = tuple(r for r in found.results if r.name != "out" or not passed_on)
        if left:
            steps.append(_step(Graph(found.nodes, found.operands, left), reduced))
    return reduced, tuple(steps), passed_on


@constant
def fed(epilogue: str, stored: Names, wanted: Names, dtype: str) -> Step:
    """The gradients of `wanted` from that of the only result that users see, "out", as the epilogue of the product that
    is its gradient."""
    graph = text.read(epilogue)
    found = derivative(graph, ["out"], _wanted(wanted), stored, _default(dtype))
    if any(node.op == "accumulator" for node in found.nodes):
        raise refused("out: its derivative needs the product again; use gemmsmith.torch.gemm twice")
    nodes = [Node("accumulator") if n.value == GRADIENT + "out" else n for n in found.nodes]
    operands = tuple(o for o in found.operands if o.name != GRADIENT + "out")
    return _step(Graph(tuple(nodes), operands, found.results))


def _reduced(graph: Graph, r: Result, stored: Names, of: Names, default: DType) -> Reduced:
    (inner,), (kind, axis) = graph.nodes[r.node].inputs, graph.nodes[r.node].value
    counts = _step(ties(graph, r.name, stored, default)) if r in extremes(graph) and r.name in of else None
    width = max(graph.extents()[inner].width, 1) if kind == "mean" else 0
    return Reduced(r.name, over(axis), r.keepdim, width, counts)


def _step(graph: Graph, reduced: tuple[Reduced, ...] = ()) -> Step:
    product = any(node.op == "accumulator" for node in graph.nodes)
    thin = {GRADIENT + r.name for r in reduced}
    widths = tuple(
        (o.name, o.extent.width * (o.extent.is_matrix and o.extent.batch and o.name in thin))
        for o in graph.operands
        if o.dtype is not None
    )
    named = tuple(o.name for o in graph.operands if o.dtype is None)
    return Step(text.write(graph), product, widths, named, tuple(r.name for r in graph.results))


def _wanted(names: Names) -> Names:
    """What `derivative` is asked for: one product stands for the gradients of A and B."""
    product = (PRODUCT,) if A in names or B in names else ()
    return (*product, *(name for name in names if name not in (A, B)))


def _default(dtype: str) -> DType:
    return FP32 if dtype == "torch.float64" else as_dtype(dtype.removeprefix("torch."))
