"""How a warpgroup's part of a tile is cut into pieces, and what shared memory its epilogue needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import DType
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.graph import Extent, Graph, Node
from gemmsmith.core.mma import CHUNK, WGMMA_M, Major
from gemmsmith.core.spec import BARRIER_BYTES, EpilogueSpec, KernelSpec, slices
from gemmsmith.core.tile import Tile
from gemmsmith.epilogue.lines import refused

MOST_COLUMNS = 256
"""Columns that a tile may have."""
ALIGNMENT = 1024
"""Where swizzled tiles begin in shared memory: at a multiple of it."""
TMA_BYTES = 16
"""Rows of a box are a multiple of it (CUDA driver API, cuTensorMapEncodeTiled)."""
MOST_SLOTS = 8
"""Matrix pieces in flight a warpgroup: each has a barrier, which costs the kernel's start."""


@dataclass(frozen=True)
class Layout:
    """A piece is 64 rows by `columns` columns of the accumulator. A warpgroup's part of a tile is `blocks` x `parts`
    pieces. Stores of `round` pieces go at once through one of `sets` sets of buffers; matrix operands come through
    `slots` slots, a piece each.
    """

    columns: int
    blocks: int
    parts: int
    loads: tuple[tuple[str, Tile], ...]
    stores: tuple[tuple[str, Tile], ...]
    vectors: tuple[tuple[str, int], ...]
    round: int
    sets: int
    slots: int

    @property
    def pieces(self) -> int:
        return self.blocks * self.parts

    @property
    def rounds(self) -> int:
        """How many rounds a tile takes; the last may have fewer pieces."""
        return -(-self.pieces // self.round)


def piece_columns(graph: Graph, tma: frozenset[str], n: int) -> int:
    """Columns of a piece of an n wide tile: 64 where it divides n, 128 for pairs of halves, a block or a whole row.
    ConfigError where none suits the epilogue, or the boxes of the matrices in `tma`."""
    extents, halves, blocks = graph.extents(), graph.halves, _blocks(graph)
    matrices = [(o.extent, o.dtype) for o in graph.operands if o.name in tma]
    matrices += [(extents[r.node], r.dtype) for r in graph.results if r.name in tma]
    least = max([TMA_BYTES * extent.width // dtype.bytes for extent, dtype in matrices if dtype], default=1)
    least = max(least, 2 * CHUNK if halves else CHUNK)
    if graph.takes_whole_rows:
        widths: tuple[int, ...] = (n,)
    elif blocks:
        widths = tuple(blocks)
    elif halves:
        widths = (128, 64, 32, 16)
    else:
        widths = (64, 32, 16, n)
    for width in widths:
        if n % width == 0 and width % least == 0 and blocks.keys() <= {width}:
            return width
    if graph.takes_whole_rows and blocks:
        raise ConfigError(f"tile N: got {n}; this epilogue needs {', '.join(map(str, blocks))}, a block")
    needed = least if widths[-1] == n else max(least, widths[-1])
    raise ConfigError(f"tile N: got {n}; this epilogue needs a multiple of {needed}")


def _blocks(graph: Graph) -> dict[int, tuple[Node, int]]:
    """Columns of the product that are quantized together -> a node that asks for it, the width of its values."""
    nodes = zip(graph.extents(), graph.nodes, strict=True)
    return {(e.width or 1) * node.value[1]: (node, e.width or 1) for e, node in nodes if node.op == "quantize"}


def check_blocks(graph: Graph) -> None:
    """EpilogueError for blocks to be quantized that no piece can be: whole pairs of chunks in a tile, all the same."""
    blocks = _blocks(graph)
    for columns, (node, width) in blocks.items():
        if columns % (2 * CHUNK * width) or columns > MOST_COLUMNS:
            message = f"quantize: block: got {columns // width}; use a multiple of {2 * CHUNK}"
            raise refused(f"{message}, at most {MOST_COLUMNS // width}", node.where)
    if len(blocks) > 1:
        listed = " and ".join(map(str, sorted(blocks)))
        node, _ = blocks[max(blocks)]
        raise refused(f"quantize: got blocks of {listed} columns of the product; use blocks of one size", node.where)


def suits(graph: Graph, tma: frozenset[str], n: int) -> bool:
    """Whether a tile n wide can have this epilogue."""
    try:
        return piece_columns(graph, tma, n) > 0
    except ConfigError:
        return False


def has_32_bits(graph: Graph) -> bool:
    """Whether a matrix that an epilogue reads or stores has elements of 32 bits."""
    dtypes = [o.dtype for o in graph.operands if o.extent.is_matrix]
    dtypes += [r.dtype for r in graph.results if r.name in graph.stored]
    return any(dtype and dtype.bits == 32 for dtype in dtypes)


@lru_cache(maxsize=1024)
def layout(spec: KernelSpec) -> Layout:
    """The layout of a spec's epilogue. ConfigError where the tile does not suit it."""
    graph, config = spec.epilogue.graph, spec.config
    extents = graph.extents()
    n = spec.slice_columns
    columns = piece_columns(graph, spec.epilogue.tma, n)
    blocks, parts = spec.warpgroup_rows // WGMMA_M, n // columns
    loads = [
        (o.name, _tile(spec.epilogue, o.name, o.dtype, o.extent, columns))
        for o in graph.operands
        if o.extent.is_matrix and o.name in spec.tma and o.dtype
    ]
    stores = [
        (r.name, _tile(spec.epilogue, r.name, r.dtype, extents[r.node], columns))
        for r in graph.results
        if r.name in graph.stored and r.dtype
    ]
    vectors = _vectors(graph, n, spec.warpgroup_rows)
    stages = config.stages * (spec.stage_bytes + BARRIER_BYTES) + spec.scale_bytes(config.stages)
    free = spec.chip.shared_bytes - stages - spec.exchange_bytes
    free -= ALIGNMENT * (spec.exchange_bytes > 0)  # its barriers
    free -= -(-config.consumers * sum(4 * count for _, count in vectors) // ALIGNMENT) * ALIGNMENT
    free //= config.consumers
    over = config.stages * spec.stage_bytes // config.consumers if config.alias_epilogue else 0
    load, store = (sum(tile.bytes for _, tile in tiles) for tiles in (loads, stores))
    round, sets, slots = _rounds(free, over, blocks * parts, load, store)
    return Layout(columns, blocks, parts, tuple(loads), tuple(stores), vectors, round, sets, slots)


def _tile(epilogue: EpilogueSpec, name: str, dtype: DType, extent: Extent, columns: int) -> Tile:
    """A piece in shared memory lies as its matrix does; fp8 row by row, since stmatrix transposes 16-bit elements."""
    major: Major = "MN" if name in epilogue.column_major and dtype.bits >= 16 else "K"
    return Tile(dtype, WGMMA_M // extent.height, columns // extent.width, major)


def _vectors(graph: Graph, columns: int, rows: int) -> tuple[tuple[str, int], ...]:
    """The operands with one value a column or a row of a warpgroup's part of a tile, and how many those are."""
    vectors = [o for o in graph.operands if not o.extent.is_matrix and (o.extent.height or o.extent.width)]
    return tuple((o.name, columns // o.extent.width if o.extent.width else rows // o.extent.height) for o in vectors)


def _rounds(free: int, over: int, pieces: int, load: int, store: int) -> tuple[int, int, int]:
    """(pieces a round, sets of buffers, slots) for `free` bytes a warpgroup; stores may have `over` bytes instead.

    All pieces at once where shared memory holds them beside the stages; else as many as fit twice, so that one set
    is written while the other drains. With operands to load, pieces go one by one, and slots come first: what is
    loaded before the mainloop costs nothing.
    """
    if load:
        load += BARRIER_BYTES
        both = [(slots, sets) for slots in range(1, MOST_SLOTS + 1) for sets in (1, 2) if slots <= pieces]
        fits = [(a, b) for a, b in both if b * store <= (over or free - a * load) and a * load <= free]
        slots, sets = max(fits, default=(1, 1))
        return 1, min(sets, pieces), slots
    buffers = (over or free) // store if store else pieces
    if buffers >= pieces:
        return pieces, 1, 0
    return (buffers // 2, 2, 0) if buffers > 1 else (1, 1, 0)


def least_bytes(graph: Graph, tma: frozenset[str], config: Config, loaded: int = 2) -> int:
    """Shared memory an epilogue should be left beside the stages: each warpgroup `loaded` pieces of everything where it
    loads matrices, if it has as many; where it only stores, a quarter of what it stores, or one piece that is as wide
    as the tile. Stores that alias_epilogue the stages need none."""
    n, consumers = config.tile[1] // config.warpgroups[1] // slices(config, graph), config.consumers
    extents, columns = graph.extents(), piece_columns(graph, tma, n)
    loads = [(o.extent, o.dtype) for o in graph.operands if o.extent.is_matrix and o.name in tma]
    stores = [(extents[r.node], r.dtype) for r in graph.results if r.name in graph.stored]
    beside = loads + stores * (not config.alias_epilogue)
    piece = sum(WGMMA_M // e.height * columns // e.width * dtype.bytes for e, dtype in beside if dtype)
    parts, rows = n // columns, config.tile[0] // config.warpgroups[0]
    all_pieces = rows // WGMMA_M * parts
    pieces = min(all_pieces, loaded if loads else max(min(parts, 2), -(-all_pieces // 4)))
    vectors = sum(4 * count for _, count in _vectors(graph, n, rows))
    whole = -(-consumers * vectors // ALIGNMENT) * ALIGNMENT
    return consumers * (pieces * piece + 2 * BARRIER_BYTES * bool(piece)) + whole
