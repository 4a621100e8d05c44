"""The reference for grouped GEMMs: the accumulator one group after the other, and where results are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gemmsmith.backends.reference.epilogue import reduced
from gemmsmith.backends.reference.matmul import Array
from gemmsmith.core.grouping import Grouping
from gemmsmith.core.problem import SCALE_BLOCK
from gemmsmith.core.scalars import ceil_div

Multiply = Callable[[Array, Array, Array | None, Array | None], Array]
"""(a, b, scale_a, scale_b) -> the product of a group."""


def group_slices(grouping: Grouping, table: Array, extent: int, end_multiple: int = 1) -> list[slice] | None:
    """Return the rows (or elements of K) of each group; None if the table is invalid.

    `table`: int32, the end of each group, or its size. `extent`: rows (or K) that are divided; in a masked GEMM, the
    rows of each group's own matrix. Each group's end must be a multiple of `end_multiple`.
    """
    sizes: Any = np.diff(table.astype(np.int64), prepend=0) if grouping.table == "offsets" else table.astype(np.int64)
    ends = sizes if grouping.is_masked else sizes.cumsum()
    is_valid = (sizes >= 0).all() and (ends <= extent).all() and (ends % end_multiple == 0).all()
    return [slice(int(end - size), int(end)) for end, size in zip(ends, sizes, strict=True)] if is_valid else None


def group_rows(grouping: Grouping, groups: list[slice]) -> list[Any]:
    """Return the index of each group's rows, in (m, ...) or, if masked, (groups, m, ...)."""
    return list(enumerate(groups)) if grouping.is_masked else groups


def accumulate(
    grouping: Grouping, groups: list[slice], multiply: Multiply, a: Array, b: Array, scale_a: Array | None,
    scale_b: Array | None,
) -> Array:  # fmt: skip
    """Return the products of all groups, (m, n) or (groups, m, n), with zeros in rows of no group.

    `a`: (m, k), or (groups, m, k) if masked. `b`: (groups, k, n), or (k, n) if the groups divide K. `multiply` computes
    one group's product.
    """
    count, m, n = len(groups), a.shape[-2], b.shape[-1]
    accumulator = np.zeros((count, m, n) if grouping.has_batch else (m, n))
    for g, (group, rows) in enumerate(zip(groups, group_rows(grouping, groups), strict=True)):
        if grouping.along == "k":
            blocks = slice(group.start // SCALE_BLOCK, ceil_div(group.stop, SCALE_BLOCK))
            part_a, part_b = _part(scale_a, g, -1, blocks), _part(scale_b, g, -2, blocks)
            accumulator[g] = multiply(a[:, group], b[group], part_a, part_b)
        else:
            has_row_scales = scale_a is not None and scale_a.shape[-2] == m
            part_a = _part(scale_a, g, -2, group) if has_row_scales else _part(scale_a, g)
            accumulator[rows] = multiply(a[rows], b[g], part_a, _part(scale_b, g))
    return accumulator


def _part(scales: Array | None, group: int, axis: int = -1, part: slice = slice(None)) -> Array | None:
    """Return the scales of a group, or of the elements `part` of it along `axis`, -1 or -2.

    None if there are no scales. `scales`: (groups, rows, columns), or (rows, columns) for all groups.
    """
    if scales is None:
        return None
    of_group = scales[group % scales.shape[0]] if scales.ndim == 3 else scales
    return of_group[part] if axis == -2 else of_group[:, part]


def gathered(x: Any, indices: Array, rows: int | None = None) -> Any:
    """Return the rows of an array at `indices`, with zeros for an index that is no row.

    `rows`: the number of rows of A. With it, an array that does not have a value for each of them is returned as it is.
    """
    if rows is not None and (np.ndim(x) < 2 or len(x) != rows):
        return x
    is_row = (indices >= 0) & (indices < len(x))
    rows_of_x = np.zeros((len(indices), *x.shape[1:]), x.dtype)
    rows_of_x[is_row] = x[indices[is_row]]
    return rows_of_x


def rows_of(groups: list[slice], operands: Mapping[str, Any]) -> dict[str, Any]:
    """Return the operands, with those of shape (groups, 1, n) repeated to one row per row of the product (m, n)."""
    group_of_row = np.repeat(np.arange(len(groups)), [x.stop - x.start for x in groups])
    return {name: x[group_of_row, 0] if np.ndim(x) == 3 else x for name, x in operands.items()}


def of_no_group(kind: str) -> float:
    """Return the reduction, of a kind, of a row of no group."""
    return -np.inf if kind == "logsumexp" else 0.0


def reduced_by_group(grouping: Grouping, groups: list[slice], x: Array, kind: str, axis: str) -> Array:
    """Return a reduction of x, (m, n) or (groups, m, n), over the rows of the groups.

    A reduction along M has one result per group; others have `of_no_group` in rows of no group.
    """
    parts = group_rows(grouping, groups)
    if "m" in axis:
        return np.stack([reduced(x[rows], kind, axis) for rows in parts])
    result = np.full(x.shape[:-1], of_no_group(kind))
    for rows in parts:
        result[rows] = reduced(x[rows], kind, axis)
    return result
