"""Patterns of small expressions, and the matcher of fusion and fission.

A pattern is a variable ("x"), a constant (a number, to six digits), or (op, pattern, ...); commutative functions match
either way round.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gemmsmith.core.graph import Node
from gemmsmith.epilogue.passes.share import COMMUTATIVE

Pattern = Any


class Matcher:
    """Matches patterns against nodes. Inner nodes must have no other user, since they would then be computed twice."""

    def __init__(self, nodes: Sequence[Node], uses: Counter[int]) -> None:
        self.nodes, self.uses = nodes, uses

    def match(self, pattern: Pattern, node: Node) -> dict[str, int] | None:
        """The variables' nodes, if `node` has that shape."""
        return self._node(pattern, node, {})

    def _node(self, pattern: Pattern, node: Node, bound: dict[str, int]) -> dict[str, int] | None:
        op, *parts = pattern
        if node.op != op or len(node.inputs) != len(parts):
            return None
        orders = [node.inputs, node.inputs[::-1]] if op in COMMUTATIVE else [node.inputs]
        if op == "fma":
            a, b, c = node.inputs
            orders = [(a, b, c), (b, a, c)]
        for inputs in orders:
            found: dict[str, int] | None = dict(bound)
            for part, index in zip(parts, inputs, strict=True):
                found = self._input(part, index, found) if found is not None else None
            if found is not None:
                return found
        return None

    def _input(self, pattern: Pattern, index: int, bound: dict[str, int]) -> dict[str, int] | None:
        node = self.nodes[index]
        if isinstance(pattern, str):
            if bound.setdefault(pattern, index) != index:
                return None
            return bound
        if isinstance(pattern, (int, float)):
            same = node.op == "constant" and math.isclose(node.value, pattern, rel_tol=1e-6)
            return bound if same else None
        if self.uses[index] > 1:
            return None
        return self._node(pattern, node, bound)
