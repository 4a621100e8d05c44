"""How a warpgroup's tile is divided into epilogue subtiles, and the shared memory that its epilogue needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from gemmsmith.core.dtypes import E4M3, E5M2, DType
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph, Node
from gemmsmith.core.mma import N8_COLUMNS, THREADS_PER_WARPGROUP, WGMMA_M, Major
from gemmsmith.core.scalars import ceil_div, round_up
from gemmsmith.core.spec import BARRIER_PAIR_BYTES, KernelSpec
from gemmsmith.core.tile import SWIZZLE_ALIGNMENT_BYTES, Tile
from gemmsmith.graph.precision import epilogue_cost
from gemmsmith.graph.source_location import epilogue_error

MAX_TILE_N = 256
"""Maximum columns of a tile: the maximum N of a wgmma (PTX ISA)."""
TMA_ROW_ALIGNMENT_BYTES = 16
"""Bytes of which a TMA box's rows are a multiple (CUDA driver API, cuTensorMapEncodeTiled)."""
MAX_LOAD_STAGES = 8
"""Maximum subtiles of matrix operands in flight per warpgroup. Chosen, not measured: each has a barrier, whose
initialization takes time at the kernel's start."""
MAX_UNROLLED_INSTRUCTIONS = 6000
"""Instructions of an epilogue, about, whose subtiles are unrolled: 96 KB. With 110 KB epilogues are as fast as their
instructions let expect, with 150 KB to 600 KB two to eight times slower, since warps wait for instructions
(heavy-unrolled-h100)."""
MAX_RESERVED_BYTES = 65 << 10
"""Bytes of shared memory, at most, that stages leave to an epilogue for wide subtiles of the matrices that it loads.
This and the next two: nearest to the fastest subtiles and stages of 12 GEMMs (tries-subtiles)."""
MIN_RESERVED_COLUMNS = 32
"""Columns of those subtiles, at least, if the tile has subtiles of that width."""
MAX_RESERVED_STORE_BYTES = 16 << 10
"""Bytes for the stores of a warpgroup, at most: more stages take precedence over wider subtiles."""
INSTRUCTIONS_PER_ELEMENT = 8
"""Instructions of an epilogue per element, about, besides those of its functions: loads, conversions and stores."""


@dataclass(frozen=True)
class EpiloguePlan:
    """Division of a warpgroup's tile into `subtiles_m` x `subtiles_n` subtiles of 64 rows x `epi_tile_n` columns.

    `loads` and `stores` are the matrices that go through shared memory, each as (name, layout of a subtile);
    `broadcasts` the row and column broadcasts, as (name, elements per tile). Matrix operands are loaded into
    `load_stages` stages of one subtile (CUTLASS: StagesC). Results are stored in groups of `subtiles_per_store`
    subtiles, each through one of `store_stages` stages (CUTLASS: StagesD).
    """

    epi_tile_n: int
    subtiles_m: int
    subtiles_n: int
    loads: tuple[tuple[str, Tile], ...]
    stores: tuple[tuple[str, Tile], ...]
    broadcasts: tuple[tuple[str, int], ...]
    subtiles_per_store: int
    store_stages: int
    load_stages: int
    loops_over_columns: bool = False
    """Whether a run-time loop computes the subtiles of 64 rows, in one place of the code: then a group is a subtile."""

    @property
    def subtiles(self) -> int:
        return self.subtiles_m * self.subtiles_n

    @property
    def has_two_buffers(self) -> bool:
        """Whether one subtile can be loaded while another one is computed.

        If the epilogue loads no matrix: whether one can be stored meanwhile.
        """
        buffers = self.load_stages if self.loads else self.store_stages * self.subtiles_per_store
        return buffers >= min(2, self.subtiles)

    @property
    def store_groups(self) -> int:
        """Groups of subtiles per tile; the last may have fewer subtiles."""
        return ceil_div(self.subtiles, self.subtiles_per_store)


def choose_epi_tile_n(graph: EpilogueGraph, tma_names: frozenset[str], n: int) -> int:
    """Return the width of the subtiles of a tile with `n` columns: the first of `subtile_widths`.

    Raises ConfigError, with widths of tiles that work, if there is none.
    """
    for width in subtile_widths(graph, tma_names, n):
        return width
    blocks, widths = _quantize_blocks(graph), _possible_widths(graph, n)
    if graph.requires_full_rows and blocks:
        listed = ", ".join(map(str, blocks))
        raise ConfigError(f"tile N: got {n}; this epilogue needs its quantization block, {listed} columns")
    min_columns = _min_columns(graph, tma_names)
    multiple = min_columns if widths[-1] == n else max(min_columns, widths[-1])
    raise ConfigError(f"tile N: got {n}; this epilogue needs a multiple of {multiple}")


def subtile_widths(graph: EpilogueGraph, tma_names: frozenset[str], n: int) -> list[int]:
    """Return the possible widths, in columns, of the subtiles of a tile with `n` columns, in order of preference.

    If the epilogue needs full rows, the only width is `n`; if it quantizes, its block. Else they are 128 (with
    interleaved columns only), 64, 32, 16, and last, without interleaved columns, `n`. All divide `n`, and are multiples
    of what fragments need and of what TMA needs for the rows of the matrices `tma_names`, which are row-major.
    """
    min_columns, blocks = _min_columns(graph, tma_names), _quantize_blocks(graph)
    widths = (w for w in _possible_widths(graph, n) if n % w == 0 and w % min_columns == 0 and blocks.keys() <= {w})
    return list(dict.fromkeys(widths))


def _possible_widths(graph: EpilogueGraph, n: int) -> tuple[int, ...]:
    """Return the widths from which `subtile_widths` selects, in their order."""
    if graph.requires_full_rows:
        return (n,)
    if blocks := _quantize_blocks(graph):
        return tuple(blocks)
    return (128, 64, 32, 16) if graph.has_interleaved_columns else (64, 32, 16, n)


def _min_columns(graph: EpilogueGraph, tma_names: frozenset[str]) -> int:
    """Return the number of columns of which a subtile's width must be a multiple.

    It has whole groups of 8 columns, two with interleaved columns (one of each half), and whole 16-byte units of the
    matrices `tma_names`, as TMA needs them.
    """
    broadcast_dims = graph.broadcast_dims
    matrices = [(o.broadcast_dims, o.dtype) for o in graph.operands if o.name in tma_names]
    matrices += [(broadcast_dims[r.node], r.dtype) for r in graph.results if r.name in tma_names]
    min_columns = max(
        [TMA_ROW_ALIGNMENT_BYTES * dims.columns_per_value // dtype.bytes for dims, dtype in matrices if dtype],
        default=1,
    )
    return max(min_columns, 2 * N8_COLUMNS if graph.has_interleaved_columns else N8_COLUMNS)


def _quantize_blocks(graph: EpilogueGraph) -> dict[int, tuple[Node, int]]:
    """Return (quantize node, columns of the accumulator per value) by block size in such columns."""
    nodes = zip(graph.broadcast_dims, graph.nodes, strict=True)
    quantized = [(node, dims.column_divisor) for dims, node in nodes if node.op == "quantize"]
    return {columns_per_value * node.attribute[1]: (node, columns_per_value) for node, columns_per_value in quantized}


def check_quantize_blocks(graph: EpilogueGraph) -> None:
    """Raise EpilogueError for quantization blocks that cannot be subtiles.

    Blocks must be multiples of two groups of 8 columns, at most a tile's width, and all equal.
    """
    blocks = _quantize_blocks(graph)
    for columns, (node, width) in blocks.items():
        if columns % (2 * N8_COLUMNS * width) or columns > MAX_TILE_N:
            message = f"quantize: block: got {columns // width}; use a multiple of {2 * N8_COLUMNS}"
            raise epilogue_error(f"{message}, at most {MAX_TILE_N // width}", node.location)
    if len(blocks) > 1:
        listed = " and ".join(map(str, sorted(blocks)))
        node, _ = blocks[max(blocks)]
        raise epilogue_error(f"quantize: got blocks of {listed} accumulator columns; use one block size", node.location)


def supports_tile_n(graph: EpilogueGraph, tma_names: frozenset[str], n: int) -> bool:
    """Return whether a tile that is `n` columns wide supports this epilogue."""
    return bool(subtile_widths(graph, tma_names, n))


def has_32bit_matrix(graph: EpilogueGraph) -> bool:
    """Return whether a matrix that the epilogue reads or stores has 32-bit elements."""
    return any(x.dtype and x.dtype.bits == 32 for x in graph.matrices)


@lru_cache(maxsize=1024)
def plan_epilogue(spec: KernelSpec) -> EpiloguePlan:
    """Plan a spec's epilogue: with the widest subtiles of which shared memory can hold two, else with the narrowest.

    Two, so that one is loaded or stored while another one is computed. Raises ConfigError if the tile does not support
    the epilogue.
    """
    n, names = spec.slice_columns, row_major_names(spec.epilogue)
    widest = min(
        choose_epi_tile_n(spec.epilogue.graph, names, n), _unrolled_columns(spec.epilogue, spec.warpgroup_rows, n)
    )
    plans = [_plan_subtiles(spec, w) for w in subtile_widths(spec.epilogue.graph, names, n) if w <= widest]
    return next((plan for plan, fits in plans if fits and plan.has_two_buffers), plans[-1][0])


def _plan_subtiles(spec: KernelSpec, epi_tile_n: int) -> tuple[EpiloguePlan, bool]:
    """Return (the plan with subtiles of `epi_tile_n` columns, whether its buffers fit in shared memory)."""
    config, n = spec.config, spec.slice_columns
    loops = _unrolled_columns(spec.epilogue, spec.warpgroup_rows, n) < n
    subtiles_m, subtiles_n = spec.warpgroup_rows // WGMMA_M, n // epi_tile_n
    loads, stores = _staged_subtiles(spec, epi_tile_n)
    broadcasts = _broadcast_sizes(spec.epilogue.graph, n, spec.warpgroup_rows)
    free = spec.chip.max_shared_bytes_per_cta - spec.mainloop_bytes(config.stages)
    free = (free - _broadcast_bytes(broadcasts, config.consumers)) // config.consumers
    aliased_bytes = config.stages * spec.stage_bytes // config.consumers if config.alias_epilogue else 0
    load_bytes, store_bytes = (sum(tile.bytes for _, tile in tiles) for tiles in (loads, stores))
    stage_counts = _choose_stages(free, aliased_bytes, subtiles_m * subtiles_n, load_bytes, store_bytes)
    subtiles_per_store, store_stages, load_stages = stage_counts or (1, 1, min(len(loads), 1))
    if loops:  # an iteration stores one subtile
        subtiles_per_store, store_stages = 1, subtiles_per_store * store_stages
    plan = EpiloguePlan(
        epi_tile_n, subtiles_m, subtiles_n, loads, stores, broadcasts,
        subtiles_per_store, store_stages, load_stages, loops,
    )  # fmt: skip
    return plan, stage_counts is not None


def count_instructions(epilogue: EpilogueSpec, rows: int, columns: int) -> float:
    """Return about how many instructions the unrolled epilogue of `rows` x `columns` of a warpgroup has."""
    functions = epilogue_cost(epilogue.graph, epilogue.fast_math, vector_share=0.5)  # a thread's two rows share them
    return rows * columns / THREADS_PER_WARPGROUP * (INSTRUCTIONS_PER_ELEMENT + functions.instructions)


def is_short(epilogue: EpilogueSpec, rows: int, n: int) -> bool:
    """Return whether the code of a warpgroup's tile of `rows` x `n` is short enough for the instruction cache."""
    return count_instructions(epilogue, rows, _unrolled_columns(epilogue, rows, n)) <= MAX_UNROLLED_INSTRUCTIONS


def _unrolled_columns(epilogue: EpilogueSpec, rows: int, n: int) -> int:
    """Return for how many of a tile's `n` columns the code is unrolled; a run-time loop repeats it for the others.

    It is `n` if that code is short enough, else the width of the widest subtile for which it is, else of the narrowest.
    """
    if count_instructions(epilogue, rows, n) <= MAX_UNROLLED_INSTRUCTIONS:
        return n
    widths = subtile_widths(epilogue.graph, row_major_names(epilogue), n)
    short = (w for w in widths if count_instructions(epilogue, rows, w) <= MAX_UNROLLED_INSTRUCTIONS)
    return next(short, min(widths))


def row_major_names(epilogue: EpilogueSpec) -> frozenset[str]:
    """Return the matrices that TMA may access, without column-major operands.

    The boxes of those extend along M, so that they do not limit the width of subtiles.
    """
    return epilogue.tma_eligible - (epilogue.column_major & {o.name for o in epilogue.graph.operands})


def _staged_subtiles(spec: KernelSpec, epi_tile_n: int) -> tuple[tuple[tuple[str, Tile], ...], ...]:
    """Return (loads, stores): the matrices that go through shared memory, each as (name, layout of a subtile)."""
    graph, epilogue = spec.epilogue.graph, spec.epilogue
    operands = [(o.name, o.dtype, o.broadcast_dims) for o in graph.operands if o.name in spec.tma_names]
    results = [(r.name, r.dtype, graph.broadcast_dims[r.node]) for r in graph.matrix_results]
    return tuple(
        tuple((name, _subtile(epilogue, name, dtype, dims, epi_tile_n)) for name, dtype, dims in x if dtype)
        for x in (operands, results)
    )


def _subtile(epilogue: EpilogueSpec, name: str, dtype: DType, dims: BroadcastDims, columns: int) -> Tile:
    """Return the layout in shared memory of the matrix `name` in a subtile of `columns` columns of the accumulator.

    It is that of the matrix; but fp8 is always row-major, since stmatrix can only transpose 16-bit elements.
    """
    major: Major = "MN" if name in epilogue.column_major and dtype not in (E4M3, E5M2) else "K"
    return Tile(dtype, WGMMA_M // dims.rows_per_value, columns // dims.columns_per_value, major)


def _broadcast_sizes(graph: EpilogueGraph, columns: int, rows: int) -> tuple[tuple[str, int], ...]:
    """Return (name, elements per warpgroup tile) of each row and column broadcast."""
    rows_and_columns = ((o.name, o.broadcast_dims) for o in graph.operands if not o.broadcast_dims.is_matrix)
    return tuple(
        (name, columns // dims.columns_per_value if dims.columns_per_value else rows // dims.rows_per_value)
        for name, dims in rows_and_columns if dims.varies_along_m or dims.varies_along_n
    )  # fmt: skip


def _choose_stages(
    free: int, aliased_bytes: int, subtiles: int, load_bytes: int, store_bytes: int
) -> tuple[int, int, int] | None:
    """Return (subtiles per store, store stages, load stages) of a warpgroup; None if shared memory is too small.

    All bytes are those of a warpgroup; `load_bytes` and `store_bytes` of one subtile. Stores use `aliased_bytes`
    instead of `free`, if not 0.

    All subtiles are stored at once if they fit; otherwise as many as fit twice, so that one stage is written while the
    other drains. With operands to load, subtiles are stored one by one. Two load stages come first, then two store
    stages, then further load stages: loads that are issued before the mainloop cost nothing.
    """
    if load_bytes:
        load_bytes += BARRIER_PAIR_BYTES
        candidates = [(a, b) for a in range(1, MAX_LOAD_STAGES + 1) for b in (1, 2) if a <= subtiles]
        fitting = [
            (min(load_stages, 2), store_stages, load_stages)
            for load_stages, store_stages in candidates
            if store_stages * store_bytes <= (aliased_bytes or free - load_stages * load_bytes)
            and load_stages * load_bytes <= free
        ]
        if not fitting:
            return None
        _, store_stages, load_stages = max(fitting)
        return 1, min(store_stages, subtiles), load_stages
    buffers = (aliased_bytes or free) // store_bytes if store_bytes else subtiles
    if buffers >= subtiles:
        return subtiles, 1, 0
    if buffers > 1:
        return buffers // 2, 2, 0
    return (1, 1, 0) if buffers else None


def _broadcast_bytes(broadcasts: tuple[tuple[str, int], ...], consumers: int) -> int:
    """Return the bytes of shared memory of the row and column broadcasts, in fp32, of all consumer warpgroups.

    They are rounded up to where the next swizzled tile can begin.
    """
    return round_up(consumers * sum(4 * count for _, count in broadcasts), SWIZZLE_ALIGNMENT_BYTES)


def min_smem_bytes(spec: KernelSpec, min_load_buffers: int = 2) -> int:
    """Return the bytes of shared memory that the choice of the number of stages leaves to the epilogue.

    If it loads matrices, a warpgroup has buffers for `min_load_buffers` subtiles of every matrix, at most a tile's.
    They are the widest subtiles that fit in MAX_RESERVED_BYTES, else the narrowest from MIN_RESERVED_COLUMNS on. If it
    only stores, there are buffers for a quarter of the tile, at least for two subtiles (one if it is as wide as the
    tile). Stores get at most MAX_RESERVED_STORE_BYTES, but at least one of the narrowest subtiles; with alias_epilogue
    they need no memory.
    """
    graph, n, consumers = spec.epilogue.graph, spec.slice_columns, spec.config.consumers
    names = row_major_names(spec.epilogue)
    widest, widths = choose_epi_tile_n(graph, names, n), subtile_widths(graph, names, n)

    def reserved(epi_tile_n: int) -> int:
        """Return the bytes for subtiles of this width, for all warpgroups, without broadcasts."""
        loads, stores = _staged_subtiles(spec, epi_tile_n)
        load_bytes, store_bytes = (sum(tile.bytes for _, tile in tiles) for tiles in (loads, stores))
        subtiles_n = n // epi_tile_n
        all_subtiles = spec.warpgroup_rows // WGMMA_M * subtiles_n
        subtiles = min(all_subtiles, min_load_buffers if loads else max(min(subtiles_n, 2), ceil_div(all_subtiles, 4)))
        narrowest_store_bytes = store_bytes * min(widths) // epi_tile_n
        stored = min(subtiles * store_bytes, max(MAX_RESERVED_STORE_BYTES, narrowest_store_bytes))
        nbytes = subtiles * load_bytes + stored * (not spec.config.alias_epilogue)
        return consumers * (nbytes + 2 * BARRIER_PAIR_BYTES * bool(nbytes))

    loads, _ = _staged_subtiles(spec, widest)
    wide = [w for w in widths if MIN_RESERVED_COLUMNS <= w <= widest] if loads else []
    sizes = [reserved(w) for w in wide or [widest]]
    nbytes = next((x for x in sizes if x <= MAX_RESERVED_BYTES), sizes[-1])
    return nbytes + _broadcast_bytes(_broadcast_sizes(graph, n, spec.warpgroup_rows), consumers)
