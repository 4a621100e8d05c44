"""The partial results of reductions: which share them, their shape, and where those of each group of rows are."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gemmsmith import hw
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import EpilogueGraph, Result, reduced_dims
from gemmsmith.core.grouping import Grouping
from gemmsmith.core.mma import FRAGMENT_ROWS_PER_WARP
from gemmsmith.core.problem import Problem
from gemmsmith.core.scalars import ceil_div
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.inputs import WarpgroupTile
from gemmsmith.graph.reductions import REDUCTIONS, Monoid
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import U64
from gemmsmith.lang.values import Value, ValueLike
from gemmsmith.tile_scheduler.group_table import GroupTable, group_extent

MAX_PARTIALS = 2**31 - 2**14
"""Maximum of batch * partials and of batch * outputs: kernels index them in int32, by up to 2^13 past the end."""


def shared_partials(graph: EpilogueGraph, deterministic: bool) -> dict[str, str]:
    """Map the name of each reduction to that of the first one with the same partials, such as a sum for a mean.

    Reductions of a constant are left out, since kernels do not compute them. Without `deterministic` all map to
    themselves: sums may be atomic, which have no partials.
    """
    first_with_key: dict[tuple[int, str, Monoid], str] = {}
    shared = {}
    for r in graph.results:
        node = graph.nodes[r.node]
        if node.op == "reduce" and graph.constant_operand_of(r) is None:
            kind, axis = node.attribute
            first_name = first_with_key.setdefault((node.inputs[0], axis, REDUCTIONS[kind].monoid), r.name)
            shared[r.name] = first_name if deterministic else r.name
    return shared


def reduces_groups(axis: str, spec: KernelSpec) -> bool:
    """Return whether a reduction over `axis` is over the rows of each group by itself, with a result for each group.

    With groups along the columns of a transposed product (role "b"), over the columns.
    """
    grouping = spec.grouping
    return grouping is not None and grouping.clips_rows and {"a": "m", "b": "n"}[grouping.role] in axis


def rows_of_block(axis: str, spec: KernelSpec) -> int:
    """Return how many rows of a group are reduced to one block of partials: a warp's, or with axis "mn" a tile's."""
    return spec.config.tile[0] if axis == "mn" else FRAGMENT_ROWS_PER_WARP


def partials_argument(name: str) -> str:
    """Return the name of the kernel argument that holds the address of a reduction's partials."""
    return f"partials_{name}"


@dataclass(frozen=True)
class PartialsShape:
    """Shape of a reduction's partials, for the host.

    Each of `batch` x `num_outputs` outputs has `num_partials` partials. `kind`: a name of REDUCTIONS. For a reduction
    to one scalar per batch, to which each warp of each tile contributes, `tiles_per_batch` and `tiles_n` are the tiles
    of the grid, rounded up to whole clusters, in total and along N; otherwise they are 0. `groups`: if each group of
    rows has results of its own, the number of groups, which then share the partials; else 0.
    """

    kind: str
    batch: int
    num_partials: int
    num_outputs: int
    tiles_per_batch: int = 0
    tiles_n: int = 0
    groups: int = 0

    @property
    def bytes(self) -> int:
        """Size of the partials in bytes."""
        return 4 * len(REDUCTIONS[self.kind].monoid.identity) * self.component_stride

    @property
    def total_outputs(self) -> int:
        """Outputs of all batches, or of all groups."""
        return self.batch * max(self.groups, 1) * self.num_outputs

    @property
    def component_stride(self) -> int:
        """Elements between two components of a state: the partials of all outputs."""
        return self.batch * self.num_partials * self.num_outputs


def merge_batches(shape: PartialsShape, axis: str) -> PartialsShape:
    """Return the partials' shape for the kernel that combines them: reduced batches are partials of one output."""
    if "b" not in reduced_dims(axis):
        return shape
    return replace(shape, batch=1, num_partials=shape.batch * shape.num_partials)


def partials_shape(result: Result, spec: KernelSpec, p: Problem) -> PartialsShape:
    """Return the shape of the partials of a reduction, `result`, for the problem `p`.

    With the axis "n" there is one partial for every `slice_columns` columns; with "m", for a warp's 16 rows; with "mn",
    for each warp of each tile. If only the batch is reduced, each element is a partial. Raises ArgumentError if there
    are more than MAX_PARTIALS.
    """
    graph, config = spec.epilogue.graph, spec.config
    node = graph.nodes[result.node]
    (kind, axis), dims = node.attribute, graph.broadcast_dims[node.inputs[0]]
    m, n = p.m // dims.row_divisor, p.n // dims.column_divisor
    by_group = reduces_groups(axis, spec)
    batch = p.groups if by_group else p.batch
    if by_group and not spec.epilogue.is_atomic(result):
        partials, outputs, tiles_n = max_blocks(p, rows_of_block(axis, spec)), n, 0
        if axis == "mn":
            tiles_n = _tiles_n(spec, p)
            partials, outputs = partials * tiles_n * 4 * config.warpgroups[0], 1
        shape = PartialsShape(kind, 1, partials, outputs, tiles_n, tiles_n, p.groups)
        return _checked_shape(shape, result, p)
    match reduced_dims(axis).removeprefix("b"):
        case "n":
            shape = PartialsShape(kind, batch, ceil_div(p.n, spec.slice_columns), m)
        case "m":
            shape = PartialsShape(kind, batch, ceil_div(p.m, FRAGMENT_ROWS_PER_WARP), n)
        case "mn":
            tiles_m = ceil_div(p.m, config.tile[0] * config.cluster[0]) * config.cluster[0]
            tiles_n = _tiles_n(spec, p)
            num_partials = tiles_m * tiles_n * 4 * config.warpgroups[0]
            shape = PartialsShape(kind, batch, num_partials, 1, tiles_m * tiles_n, tiles_n)
        case _:
            shape = PartialsShape(kind, batch, 1, m * n)
    return _checked_shape(shape, result, p)


def _tiles_n(spec: KernelSpec, p: Problem) -> int:
    """Return the tiles along N of the grid, rounded up to whole clusters; slices of columns count as tiles."""
    per_cluster = spec.config.cluster[1] * spec.num_reducing_ctas * spec.config.warpgroups[1]
    return ceil_div(p.n, spec.slice_columns * per_cluster) * per_cluster


def _checked_shape(shape: PartialsShape, result: Result, p: Problem) -> PartialsShape:
    """Return the shape. Raises ArgumentError if it has more partials or outputs than kernels can index."""
    count = max(shape.batch * shape.num_partials, shape.total_outputs)
    if count > MAX_PARTIALS:
        raise ArgumentError(
            f"{result.name}: got {p}, whose {shape.kind} has {count} partial results, more than the maximum of "
            f"{MAX_PARTIALS}; split the GEMM along M or N"
        )
    return shape


RANGE_BYTES = 8
"""The first partial of a group and the number of its partials, int32 each."""


def ranges_argument(name: str) -> str:
    """Return the name of the kernel argument that holds the address of a reduction's ranges of partials."""
    return f"ranges_{name}"


def max_blocks(p: Problem, rows: int) -> int:
    """Return the most blocks of `rows` rows that all groups together may have: each may have one that is not full.

    With a masked table each group has a matrix of `group_extent` rows; otherwise all groups share them.
    """
    assert p.grouping
    return group_extent(p) * (p.groups if p.grouping.is_masked else 1) // rows + p.groups


class GroupPartials:
    """Numbers the blocks of `rows` rows of groups, of which each has `partials_per_block` partials.

    The rows of a group are divided into blocks from its first row on. The first block of group g has the number
    begin(g) / rows + g, rounded down, where begin(g) is the number of rows of all groups before. As a group of s rows
    has at most s / rows + 1 blocks, groups do not overlap; and no prefix sum but `begin` is needed. Some numbers stay
    unused.

    Kernel arguments: `ranges_`, followed by the result's name: the address of what RANGE_BYTES describes, by group.
    """

    def __init__(
        self, name: str, grouping: Grouping, table: GroupTable, rows: int, partials_per_block: ValueLike = 1
    ) -> None:
        self._grouping, self._table, self._rows, self._partials_per_block = grouping, table, rows, partials_per_block
        self._ranges = current_builder().scratch(ranges_argument(name), lambda p: RANGE_BYTES * p.groups)

    def block_of(self, wg_tile: WarpgroupTile, row: Value) -> Value:
        """Return the number of the block that begins at `row`, a row of the tile's group."""
        group = wg_tile.work.group
        begin = self._table.begin(group)
        row_of_group = row if self._grouping.is_masked else row - begin
        return (begin // self._rows + group + row_of_group // self._rows).named("first_block")

    def store_ranges(self, thread: Value, threads: int) -> None:
        """Store the first partial and the number of partials of each group, for the second kernel.

        All `threads` consumer threads of one CTA execute it. If the table of groups is invalid, each group has one
        partial, which `Reduction.fill` sets to NaN.
        """
        k, table, is_invalid = current_builder(), self._table, self._table.is_invalid
        with k.range(0, table.groups, threads, name="first_group") as first_group:
            group = (first_group + thread).named("group_of_range")
            is_group = group < table.groups
            # threads past the last group must not read past the table
            of_table = k.minimum(group, self._grouping.capacity - 1)
            begin = table.begin(of_table)
            blocks = (table.begin(of_table + 1) - begin + (self._rows - 1)) // self._rows
            first = k.select(is_invalid, 0, (begin // self._rows + group) * self._partials_per_block)
            count = k.select(is_invalid, 1, blocks * self._partials_per_block)
            address = self._ranges + (group * RANGE_BYTES).to(U64)
            hw.store_global_word(address, first, is_group, "first_partial")
            hw.store_global_word(address + 4, count, is_group, "partial_count")
