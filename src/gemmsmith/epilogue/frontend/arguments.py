"""Arguments of visitor trees: by name, from tuples that mirror a tree; and what a tree's graph becomes with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gemmsmith.core.dtypes import DType
from gemmsmith.core.errors import meant
from gemmsmith.core.graph import Extent, Graph
from gemmsmith.epilogue.frontend.classify import in_words
from gemmsmith.epilogue.frontend.visitors import Visitor
from gemmsmith.epilogue.lines import refused


def arguments(visitor: Visitor, tree: Any) -> dict[str, Any]:
    """Arguments by name, from a tuple that mirrors the visitor.

    An EVT takes a tuple of its children's arguments and then its node's, a TopologicalVisitor one of its nodes', a
    leaf with a name the value, and all others (). A store or reduction may take () too: its array is then made.
    Raises EpilogueError where the shapes of the two trees differ.
    """
    found: dict[str, Any] = {}
    for leaf, value in _paired(visitor, tree):
        name = leaf.argument
        nothing = value is None or (isinstance(value, tuple) and not value)
        if name is None:
            if not nothing:
                raise refused(f"{leaf!r} takes no argument, got {type(value).__name__}; use ()")
        elif not nothing:
            if name in found and found[name] is not value:
                raise refused(f"{name!r}: got two different values; use the same for both, or two names")
            found[name] = value
        elif not leaf.stores:
            raise refused(f"{leaf!r}: got {value!r}; use an array or a number")
    return found


def _paired(visitor: Visitor, tree: Any) -> Iterator[tuple[Visitor, Any]]:
    if not visitor.parts:
        yield visitor, tree
        return
    if not isinstance(tree, tuple) or len(tree) != len(visitor.parts):
        got = f"a tuple of {len(tree)}" if isinstance(tree, tuple) else type(tree).__name__
        order = ", ".join(map(repr, visitor.parts))
        raise refused(f"arguments: got {got}; use a tuple of {len(visitor.parts)}, for {order}")
    for part, value in zip(visitor.parts, tree, strict=True):
        yield from _paired(part, value)


def bind(graph: Graph, operands: Mapping[str, tuple[Extent, DType | None]], product: tuple[int, ...] = ()) -> Graph:
    """The graph with the batches and dtypes of actual operands, by name; a dtype of None is a number's.

    `product`, the shape (..., M, N), tells where an array's extents are ambiguous: a row is a matrix where M is 1.
    Raises EpilogueError for a missing or needless operand, and for one that is not what its node reads.
    """
    wanted = {o.name: o for o in graph.operands}
    for name in wanted.keys() - operands.keys():
        raise refused(f"{name}: not given; pass {in_words(wanted[name].extent)} of that name")
    for name in operands.keys() - wanted.keys():
        reads = ", ".join(wanted) or "no operand"
        raise refused(f"{name}: given, but the epilogue reads {reads}; leave it out{meant(name)}")
    one_row, one_column = product[-2:-1] == (1,), product[-1:] == (1,)
    bound = []
    for name, operand in wanted.items():
        want, (got, dtype) = operand.extent, operands[name]
        if (got.height != want.height and not one_row) or (got.width != want.width and not one_column):
            raise refused(f"{name}: got {in_words(got)}; use {in_words(want)}")
        bound.append(replace(operand, extent=want._replace(batch=got.batch), dtype=dtype))
    return replace(graph, operands=tuple(bound))
