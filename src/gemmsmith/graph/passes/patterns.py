"""Patterns of small expressions, and their matcher.

A pattern is a variable ("x", which matches any value), a number (which matches constants, to six digits), or (op,
pattern, ...). Commutative functions match in either order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gemmsmith.core.graph import Node
from gemmsmith.graph.passes.cse import COMMUTATIVE

Pattern = Any


class Matcher:
    """Matches patterns against nodes. Inner nodes must have a single use, or they would be computed twice."""

    def __init__(self, nodes: Sequence[Node], uses: Counter[int]) -> None:
        self.nodes, self.uses = nodes, uses

    def match(self, pattern: Pattern, node: Node) -> dict[str, int] | None:
        """Return the variables' nodes if `node` matches, else None."""
        return self._match_node(pattern, node, {})

    def _match_node(self, pattern: Pattern, node: Node, bindings: dict[str, int]) -> dict[str, int] | None:
        op, *operands = pattern
        if node.op != op or len(node.inputs) != len(operands):
            return None
        orders = [node.inputs, node.inputs[::-1]] if op in COMMUTATIVE else [node.inputs]
        if op == "fma":
            a, b, c = node.inputs
            orders = [(a, b, c), (b, a, c)]
        for inputs in orders:
            extended: dict[str, int] | None = dict(bindings)
            for operand, index in zip(operands, inputs, strict=True):
                extended = self._match_input(operand, index, extended) if extended is not None else None
            if extended is not None:
                return extended
        return None

    def _match_input(self, pattern: Pattern, index: int, bindings: dict[str, int]) -> dict[str, int] | None:
        node = self.nodes[index]
        if isinstance(pattern, str):
            if bindings.setdefault(pattern, index) != index:
                return None
            return bindings
        if isinstance(pattern, (int, float)):
            is_equal = node.op == "constant" and math.isclose(node.attribute, pattern, rel_tol=1e-6)
            return bindings if is_equal else None
        if self.uses[index] > 1:
            return None
        return self._match_node(pattern, node, bindings)
