"""An epilogue as a kernel is compiled for: its graph, and how its arrays are accessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gemmsmith.core.dtypes import FP32
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.frozen import changed
from gemmsmith.core.graph import EpilogueGraph, Result, identity_graph
from gemmsmith.core.problem import Matrix
from gemmsmith.core.product import Role


@dataclass(frozen=True)
class EpilogueSpec:
    """An epilogue graph, whose results all have a dtype, and how its arrays are accessed.

    `tma_eligible`: names of the matrices, operands and results, that TMA can access; others are accessed element by
    element, with any strides. `column_major`: names of the matrices with contiguous columns. `fast_math`: SFU
    approximations instead of CUDA's math library. `deterministic`: reductions in two passes of fixed order instead of
    by atomics, and scattered rows are stored instead of added by atomics.
    """

    graph: EpilogueGraph
    tma_eligible: frozenset[str]
    column_major: frozenset[str] = frozenset()
    fast_math: bool = True
    deterministic: bool = True

    @classmethod
    def identity(cls, d: Matrix) -> EpilogueSpec:
        """Return the epilogue that only stores D."""
        tma_eligible, column_major = (frozenset({"out"} if x else ()) for x in (d.can_tma_store, d.is_column_major))
        return cls(identity_graph(d.dtype), tma_eligible, column_major)

    def for_arrays(self, arrays: Mapping[str, Matrix]) -> EpilogueSpec:
        """Return the spec for matrices with these strides and alignments, by name.

        TMA loads no operands of 64-bit integers.
        """
        loadable = [o.name for o in self.graph.matrix_operands if o.dtype and o.dtype.bits < 64]
        tma_eligible = [name for name in loadable if arrays[name].is_tma_compatible]
        tma_eligible += [name for name in self.graph.matrix_result_names if arrays[name].can_tma_store]
        column_major = [name for name in self.graph.matrix_names if arrays[name].is_column_major]
        return changed(self, tma_eligible=frozenset(tma_eligible), column_major=frozenset(column_major))

    def with_clipped_rows(self, role: Role = "a") -> EpilogueSpec:
        """Return the spec for tiles that may begin and end at any row (with role "b": at any column) of D.

        Matrices that are contiguous along that dimension are then accessed element by element, not by TMA. Raises
        ConfigError for a reduction over that dimension that such tiles do not support.
        """
        for r in self.reductions_in_order("m" if role == "a" else "n"):
            kind, _ = self.graph.nodes[r.node].attribute
            if role == "b":
                raise ConfigError(
                    f"{r.name}: got a {kind} over rows of groups, which are columns of the kernel's D; change swap_ab"
                )
            if kind == "mean":
                raise ConfigError(f"{r.name}: got a mean over rows that are divided into groups; use a sum")
        column_major = self.tma_eligible & self.column_major
        return replace(self, tma_eligible=column_major if role == "b" else self.tma_eligible - column_major)

    def reductions_in_order(self, dim: str) -> list[Result]:
        """Return the reductions over a dimension, "m" or "n", that two passes compute in a fixed order, not atomics."""
        reductions = [r for r in self.graph.results if self.graph.is_reduction(r) and not self.is_atomic(r)]
        return [r for r in reductions if dim in self.graph.nodes[r.node].attribute[1]]

    def is_atomic(self, result: Result) -> bool:
        """Return whether warps add to the result by atomics, after it was zeroed. Only fp32 sums support that."""
        node = self.graph.nodes[result.node]
        return node.op == "reduce" and not self.deterministic and node.attribute[0] == "sum" and result.dtype == FP32

    def with_graph(self, graph: EpilogueGraph) -> EpilogueSpec:
        """Return the same spec with another graph."""
        return changed(self, graph=graph)
