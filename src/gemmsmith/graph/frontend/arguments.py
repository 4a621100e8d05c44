"""Arguments of visitor trees: by name, from tuples that mirror a tree; and binding of a tree's graph to operands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gemmsmith.core.dtypes import DType
from gemmsmith.core.errors import did_you_mean
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph
from gemmsmith.graph.frontend.classify import describe
from gemmsmith.graph.frontend.visitors import Visitor
from gemmsmith.graph.source_location import epilogue_error


def arguments_by_name(visitor: Visitor, tree: Any) -> dict[str, Any]:
    """Return arguments by name, from a tuple that mirrors the visitor tree.

    An EVT takes a tuple of its children's arguments followed by its node's, a TopologicalVisitor a tuple of its nodes',
    a leaf with a name the value, and other leaves (). A store or reduction may take (), too: its array is then
    allocated. Raises EpilogueError if the structures of the two trees differ.
    """
    by_name: dict[str, Any] = {}
    for leaf, value in _pair_leaves(visitor, tree):
        name = leaf.argument
        is_empty = value is None or (isinstance(value, tuple) and not value)
        if name is None:
            if not is_empty:
                raise epilogue_error(f"{leaf!r} takes no argument, got {type(value).__name__}; use ()")
        elif not is_empty:
            if name in by_name and by_name[name] is not value:
                raise epilogue_error(f"{name!r}: got two different values; use the same for both, or two names")
            by_name[name] = value
        elif not leaf.is_output:
            raise epilogue_error(f"{leaf!r}: got {value!r}; use an array or a number")
    return by_name


def _pair_leaves(visitor: Visitor, tree: Any) -> Iterator[tuple[Visitor, Any]]:
    if not visitor.children:
        yield visitor, tree
        return
    if not isinstance(tree, tuple) or len(tree) != len(visitor.children):
        received = f"a tuple of {len(tree)}" if isinstance(tree, tuple) else type(tree).__name__
        order = ", ".join(map(repr, visitor.children))
        raise epilogue_error(f"arguments: got {received}; use a tuple of {len(visitor.children)}, for {order}")
    for child, value in zip(visitor.children, tree, strict=True):
        yield from _pair_leaves(child, value)


def bind_operands(
    graph: EpilogueGraph, operands: Mapping[str, tuple[BroadcastDims, DType | None]], acc_shape: tuple[int, ...] = ()
) -> EpilogueGraph:
    """Return the graph with the batches and dtypes of actual operands.

    Args:
        graph: A visitor tree's graph.
        operands: (broadcast dims, dtype) by name; the dtype of a Python number is None.
        acc_shape: The accumulator's shape (..., M, N), which resolves ambiguous dims: if M is 1, a row is a matrix.

    Raises:
        EpilogueError: for a missing or unexpected operand, and for one of another kind than its node reads.
    """
    expected = {o.name: o for o in graph.operands}
    for name in expected.keys() - operands.keys():
        raise epilogue_error(f"{name}: not given; pass {describe(expected[name].broadcast_dims)} of that name")
    for name in operands.keys() - expected.keys():
        reads = ", ".join(expected) or "no operand"
        raise epilogue_error(f"{name}: given, but the epilogue reads {reads}; leave it out{did_you_mean(name)}")
    one_row, one_column = acc_shape[-2:-1] == (1,), acc_shape[-1:] == (1,)
    bound = []
    for name, operand in expected.items():
        expected_dims, (dims, dtype) = operand.broadcast_dims, operands[name]
        if (dims.rows_per_value != expected_dims.rows_per_value and not one_row) or (
            dims.columns_per_value != expected_dims.columns_per_value and not one_column
        ):
            raise epilogue_error(f"{name}: got {describe(dims)}; use {describe(expected_dims)}")
        bound.append(replace(operand, broadcast_dims=expected_dims._replace(batch=dims.batch), dtype=dtype))
    return replace(graph, operands=tuple(bound))
