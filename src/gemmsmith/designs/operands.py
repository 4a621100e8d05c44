"""A and B as every TMA design reads them: who of the cluster shares which tile."""

from __future__ import annotations

from gemmsmith.collective.operand import Operand
from gemmsmith.core.spec import KernelSpec
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Constant, Value
from gemmsmith.schedule.tiles import ClusterPosition


def operands(k: Builder, spec: KernelSpec, place: ClusterPosition) -> tuple[Operand, Operand]:
    """(A, B). CTAs of one cluster row need the same A tile, those of one column the same B tile."""
    rows, columns = spec.config.cluster
    row_mask = sum(1 << rows * j for j in range(columns))  # ranks run along M first
    column_mask = (1 << rows) - 1
    a = Operand(k.tensor_map("a"), spec.a_tile, columns, place.n, _shift(row_mask, place.m + place.first))
    b = Operand(k.tensor_map("b"), spec.b_tile, rows, place.m, _shift(column_mask, place.n * rows + place.first))
    return a, b


def _shift(mask: int, by: Value | int) -> Value | int:
    return Constant(U32, mask) << by if isinstance(by, Value) else mask << by
