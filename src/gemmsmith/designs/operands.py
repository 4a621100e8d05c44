"""A and B as every TMA design reads them: who of the cluster shares which tile."""

from __future__ import annotations

from gemmsmith.collective.operand import Operand
from gemmsmith.core.spec import KernelSpec
from gemmsmith.hw.tma import EVICT_FIRST, EVICT_LAST, EVICT_NORMAL
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Constant, Value
from gemmsmith.schedule.tiles import ClusterPosition

POLICIES = {"first": EVICT_FIRST, "normal": EVICT_NORMAL, "last": EVICT_LAST}


def operands(k: Builder, spec: KernelSpec, place: ClusterPosition) -> tuple[Operand, Operand]:
    """(A, B). CTAs of one cluster row need the same A tile, those of one column the same B tile. Arguments: a, b, and
    where it is shared a_part, b_part, the rows that a CTA brings."""
    rows, columns = spec.config.cluster
    row_mask = sum(1 << rows * j for j in range(columns))  # ranks run along M first
    column_mask = (1 << rows) - 1
    a_map, b_map = k.tensor_map("a"), k.tensor_map("b")
    a_part = k.parameter("a_part") if columns > 1 else 0
    b_part = k.parameter("b_part") if rows > 1 else 0
    a_mask, b_mask = _shift(row_mask, place.m + place.first), _shift(column_mask, place.n * rows + place.first)
    a_policy, b_policy = (POLICIES[eviction] for eviction in spec.config.evict)
    a = Operand(a_map, spec.a_tile, columns, place.n, a_part, a_mask, a_policy)
    b = Operand(b_map, spec.b_tile, rows, place.m, b_part, b_mask, b_policy)
    return a, b


def _shift(mask: int, by: Value | int) -> Value | int:
    return Constant(U32, mask) << by if isinstance(by, Value) else mask << by
