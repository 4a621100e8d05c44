"""The estimated time of configs for a problem, in SM cycles, for any number of configs at once.

CTAs work in waves of tiles. A wave takes as long as the largest of three bounds: its tiles, each k-tile as long as the
slower of copies and math; its part of the bytes over the memory bandwidth; its part of the energy over the power limit.
The constants were fitted by benchmarks/fit.py to surveys on an H200, of A row-major and B column-major, and on an H100,
of all layouts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gemmsmith.core.dtypes import FP32
from gemmsmith.core.mma import WGMMA_M
from gemmsmith.core.problem import SCALE_BLOCK, Matrix, Problem
from gemmsmith.core.spec import EpilogueSpec, operand_major
from gemmsmith.core.tile import LINE_BYTES, SECTOR_BYTES
from gemmsmith.schedule.stream import LEAST_IDLE, MOST_PARTS
from gemmsmith.tuning.gpus import H200, Gpu
from gemmsmith.tuning.space import SMS, Column, Space

FLOPS_PER_CYCLE = 3990
"""Dense 16-bit FLOPs of one SM's tensor cores a cycle: m64n256k16 takes 128 cycles, which would be 4096."""
SM_BYTES_PER_CYCLE, FILL_BYTES_PER_CYCLE, MERGED = 62.4, 88.4, 0.271
"""Bytes a cycle: from the L2 to an SM; into an SM, with what other CTAs of its cluster multicast. And how much of what
all SMs of a GPC read at one time the chip reads once, unless it is multicast."""
OFF_LINES, OFF_SECTORS = 1.207, 0.368
"""How much longer a read from the L2 takes where rows do not begin at multiples of its lines, and yet longer where not
even of its sectors."""
READ_AGAIN = 0.0835
"""Of the bytes that more than one cluster reads, what reading them again costs of memory's time: an H200's L2 has two
partitions."""
SHORT_ROWS, IDLE, MEMORY_BOUND_ROWS = 0.021, 0.03, 64
"""Memory is by so much slower where k-tiles of 64 ask for 128 bytes of a row at a time, by a quarter of it where they
are twice as deep, felt with so few rows of A; and by so much of the share of SMs that ask for nothing."""
FILL_CYCLES, MEET_CYCLES, STAGE_CYCLES = 4302, 140, 20.1
"""Starting a kernel and filling the pipeline, more for each peer in a cluster, and for each stage."""
STORE_BYTES_PER_CYCLE, ELEMENT_CYCLES, NODE_CYCLES = 34.2, 1.87, 4.5
"""An epilogue that overlaps no mainloop: bytes of matrices a cycle; cycles for each element of a thread, and for each
of its nodes: of 1.5, 3, 4.5, 6 and 9 what comes nearest the costs in benchmarks/results/epilogues-tuned-h200.json."""
SWAPPED_STORE_BYTES_PER_CYCLE = 0.7
"""Bytes a cycle of a transposed tile that threads, not TMA, store along D's contiguous index."""
SHARE_CYCLES, CLUSTER_SHARE_CYCLES, BYTES_OF_SHARE_PER_CYCLE = 4583, 466, 17.8
"""Adding up a tile's partial sums: cycles for flags, cycles for barriers, bytes read a cycle."""
LATENCY_CYCLES, SHARPNESS = 544, 3.5
"""The latency of a copy from DRAM; and the exponent of the norm that combines work, memory and power."""
LOOP_CYCLES, LOOP_CYCLES_PER_K, DEEPER_128, DEEPER_256 = 136, 0.516, 1.11, 1.089
"""Cycles of an iteration of the mainloop, and more for each column of K: a barrier's and a wgmma's latency; and how
much slower than its parts a k-tile of 128, or 256, is: fewer of them are in flight."""
A_LOADS_OF_MORE_ROWS, A_LOADS_OF_ONE_WARPGROUP, A_LOADS_WITHOUT_MULTICAST = 0.12, 0.12, 0.25
"""How much slower a k-tile is whose fragments of A threads load: for each 64 rows of a warpgroup beyond the first,
where one warpgroup multiplies at a time, and where B is not multicast. The first two come nearest the times of
tries-tf32-h100.json; the last is that of one product, 2048 x 11008 x 5120 tt (kinds-h100.json)."""
PROMOTION_CYCLES, ISSUE_CYCLES, BORDER_CYCLES, COLUMN_SCALE_CYCLES = 50.5, 12.5, 33.3, 3.86
"""Promoted sums, a part of a tile: cycles of its warpgroup beside its FFMAs; cycles in which no product of it runs, and
more for each halving of the 64 columns within which all have the same scale of B; and those of each column that has a
block scale of its own."""
IN_PHASE, PROMOTED_ENERGY = 2.27, 1.73
"""The exponent of the norm that combines the tensor cores' work and a warpgroup's own, which may fall together; and how
much more energy a promoted FLOP takes. All six are fitted to benchmarks/results/survey-fp8-h200.json."""
ENERGY_FLOPS, ENERGY_L2, ENERGY_FILL, ENERGY_READ, ENERGY_DRAM = 650_000, 51_100, 118_000, 403_000, 12_370
"""At 700 W the chip gives a cycle (of 1/1600 us) so many FLOPs, bytes read from the L2, bytes written to shared memory,
bytes that wgmma reads there, bytes from DRAM: one or the other."""
OUT_OF_STEP = 0.082
"""Additional energy, as a fraction, of stream-K, which cannot have `sync_clusters`. Without it the model chose
stream-K for three shapes, with 0.81, 0.96 and 0.97 of the tuned speed (benchmarks/results/untuned-h200.json)."""


class Estimate(NamedTuple):
    """What the model says, in SM cycles: of a k-tile's math and copies, how long a k-tile takes, how many a CTA works
    on one after the other, how long it works, with stores that are not hidden, and how long the bytes and the energy
    take at all; all waves together; and bringing shares of K together, and a kernel's beginning."""

    math: Column
    copies: Column
    step: Column
    k_steps: Column
    stores: Column
    work: Column
    memory: Column
    power: Column
    waves: Column
    share: Column
    fill: Column

    @property
    def cycles(self) -> Column:
        return np.asarray(self.waves + self.share + self.fill)

    def take(self, which: Column) -> Estimate:
        """Of the configs at these indices."""
        return Estimate(*(x[which] for x in self))


class Extra(NamedTuple):
    """An epilogue's cost for an element of the product: bytes of matrices, and nodes that compute."""

    nbytes: float
    nodes: int

    @staticmethod
    def of(epilogue: EpilogueSpec) -> Extra:
        graph = epilogue.graph
        extents = graph.extents()
        places = [(o.extent, o.dtype) for o in graph.operands]
        places += [(extents[r.node], FP32 if graph.is_reduced(r) else r.dtype) for r in graph.results]
        nbytes = sum(
            dtype.bytes / (extent.width * extent.height) for extent, dtype in places if extent.is_matrix and dtype
        )
        return Extra(nbytes, sum(node.op not in ("accumulator", "operand", "constant") for node in graph.nodes))


def estimate(
    problem: Problem, s: Space, epilogue: EpilogueSpec | None = None, gpu: Gpu = H200, loads_a: Column | bool = False
) -> Estimate:
    """The estimate for every config of a space, on a GPU; for the bare product if no epilogue is given. `loads_a`:
    where threads load A's fragments, for wgmma reads such an A from registers."""
    extra = Extra.of(epilogue or EpilogueSpec.bare(problem.d))
    tile, k_tiles = _k_tile(problem, s, loads_a), np.maximum(1, np.ceil(problem.k / s.k))
    down, across = s.grid(problem.m, problem.n)
    tiles = problem.batch * down * across
    walk = _walk(s, tiles, k_tiles, tile.step, _store(problem, s, extra))

    # What of a tile lies outside of D takes memory as long as what lies inside (tries-stores-h100.json).
    stored = extra.nbytes * down * s.cluster_m * across * s.cluster_n
    nbytes = problem.batch * (2 * problem.k * (problem.m + problem.n) + stored)
    again = 2 * problem.batch * problem.k * (problem.m * (across > 1) + problem.n * (down > 1))
    slower = 1 + SHORT_ROWS * (64 / s.k) ** 2 if problem.m <= MEMORY_BOUND_ROWS else 1
    memory = (nbytes + READ_AGAIN * again) / gpu.dram_bytes_per_cycle * slower
    energy = tiles * s.rows * s.columns * k_tiles * tile.energy * (1 + OUT_OF_STEP * (s.splits == 0))
    power = energy + nbytes / ENERGY_DRAM

    def wave(work: Column, part: Column, clusters: Column) -> Column:
        """Of so much work and that part of the bytes and the energy."""
        reads = memory * part * (1 + IDLE * (1 - clusters * s.cluster_size / SMS))
        return np.asarray((work**SHARPNESS + reads**SHARPNESS + (power * part) ** SHARPNESS) ** (1 / SHARPNESS))

    waves = wave(walk.k_steps * tile.step + walk.stores, 1 - walk.in_last, walk.clusters)
    waves = waves + wave(walk.k_steps_of_last * tile.step + walk.stores_of_last, walk.in_last, walk.clusters_of_last)
    k_steps, stores = walk.k_steps + walk.k_steps_of_last, walk.stores + walk.stores_of_last
    fill = FILL_CYCLES + MEET_CYCLES * (s.cluster_size - 1) + STAGE_CYCLES * s.stages
    return Estimate(
        tile.math, tile.copies, tile.step, k_steps, stores, k_steps * tile.step + stores, memory, power,
        waves, walk.share, fill,
    )  # fmt: skip


class _KTile(NamedTuple):
    """Cycles of a CTA's k-tile: its math and copies, and what it takes; and the cycles that its energy is worth."""

    math: Column
    copies: Column
    step: Column
    energy: Column


def _k_tile(problem: Problem, s: Space, loads_a: Column | bool) -> _KTile:
    # wgmma reads A and B from shared memory, 128 bytes a cycle; A for each part of the columns of promoted sums
    parts = s.n / _columns(problem, s)[0] if problem.promoted else 1
    operands = 128 * (16 * parts + s.n / 4) * (s.m / 64) * (s.k / 16)
    math = np.maximum(2 * s.m * s.n * s.k / FLOPS_PER_CYCLE, operands / 128)
    filled, read = _copied(problem, s)
    copies = np.maximum(read / SM_BYTES_PER_CYCLE, filled / FILL_BYTES_PER_CYCLE)
    loop = np.maximum(LATENCY_CYCLES / s.stages * (s.k / 64), LOOP_CYCLES + LOOP_CYCLES_PER_K * s.k)
    deeper = np.where(s.k == 64, 1.0, np.where(s.k == 128, DEEPER_128, DEEPER_256))
    energy = 2 * s.m * s.n * s.k / ENERGY_FLOPS + read / ENERGY_L2 + filled / ENERGY_FILL + operands / ENERGY_READ
    if problem.promoted:
        alone, issued = _promoted(problem, s)
        math = ((math + issued) ** IN_PHASE + alone**IN_PHASE) ** (1 / IN_PHASE)
        energy = energy * PROMOTED_ENERGY
    step = np.maximum(np.maximum(math, copies), loop) * deeper
    rows = s.m / np.where(s.own_tiles, 1, s.consumers)
    loaded = step * (1 + A_LOADS_OF_MORE_ROWS * (rows / WGMMA_M - 1))
    loaded = loaded * (1 + A_LOADS_OF_ONE_WARPGROUP * (s.own_tiles | (s.consumers == 1)))
    loaded = loaded * (1 + A_LOADS_WITHOUT_MULTICAST * (s.rows == 1))
    return _KTile(math, copies, np.where(loads_a, loaded, step), energy)


def _promoted(problem: Problem, s: Space) -> tuple[Column, Column]:
    """Cycles in which a warpgroup multiplies and promotes its parts of a k-tile, one after the other: longer than the
    tensor cores work for all of them, unless other warpgroups' parts, or k-tiles in flight, take that time. And those
    in which the tensor cores wait between two parts."""
    columns, in_flight, scale_rows = _columns(problem, s)
    warpgroups = np.where(s.own_tiles, 1, s.consumers)
    parts = s.m / warpgroups / 64 * s.n / columns
    borders = (scale_rows == SCALE_BLOCK) * np.log2(64 / np.gcd(s.n.astype(int), 64))
    alone = columns * (0.5 + COLUMN_SCALE_CYCLES * (scale_rows == 1)) + PROMOTION_CYCLES
    issue = ISSUE_CYCLES + BORDER_CYCLES * borders
    whole = parts * (2 * columns + (alone + issue) / in_flight)
    return np.asarray(whole), np.asarray(parts * warpgroups * issue / in_flight)


def _columns(problem: Problem, s: Space) -> tuple[Column, Column, Column]:
    """Of promoted sums: columns of a part, k-tiles in flight, and how many columns share a block scale; 0: they have
    none."""
    of_a, of_b = (scale.rows if scale else 0 for scale in problem.scales)
    scale_rows = np.where(s.swap_ab, of_a, of_b)
    columns, in_flight = np.where((scale_rows == 1)[:, None], s.promoted[:, 1], s.promoted[:, 0]).T
    return columns, in_flight, scale_rows


def _store(problem: Problem, s: Space, extra: Extra) -> Column:
    """Cycles of a tile's epilogue."""
    store = s.m * s.n * extra.nbytes / STORE_BYTES_PER_CYCLE
    if not problem.d.stores_by_tma:
        by_threads = s.m * np.minimum(s.n, problem.m) * extra.nbytes / SWAPPED_STORE_BYTES_PER_CYCLE
        store = np.where(s.swap_ab, by_threads, store)
    threads = 128 * np.where(s.own_tiles, 1, s.consumers)
    return np.asarray((store + s.m * s.n / threads * (ELEMENT_CYCLES + NODE_CYCLES * extra.nodes)) / s.slices)


class _Walk(NamedTuple):
    """Which k-tiles a CTA works on: in whole waves of so many clusters, and in a last one, which has a part of all
    tiles, the rest; and the cycles of stores that are not hidden and of bringing shares of K together."""

    k_steps: Column
    clusters: Column
    clusters_of_last: Column
    k_steps_of_last: Column
    in_last: Column
    stores: Column
    stores_of_last: Column
    share: Column


def _walk(s: Space, tiles: Column, k_tiles: Column, step: Column, store: Column) -> _Walk:
    whole = np.floor(tiles / s.resident)
    rest, k_tiles_of_one = tiles - whole * s.resident, np.ceil(k_tiles / s.cluster_splits)
    hidden = np.where(s.own_tiles, k_tiles * step, 0.0)
    last = rest > 0
    stores = np.where(last, 0.0, store) + (whole + last - 1) * np.maximum(0.0, store - hidden)
    partial = 4 * s.m * s.n / BYTES_OF_SHARE_PER_CYCLE
    in_cluster = CLUSTER_SHARE_CYCLES + (s.cluster_splits - 1) * partial / s.slices
    share = np.where(s.cluster_splits > 1, in_cluster, 0.0)

    # split-K and stream-K: one wave of shares
    stream, shared = s.splits == 0, s.splits != 1
    clusters = np.maximum(1, np.minimum(s.resident, tiles * np.where(stream, k_tiles, s.splits)))
    remaining = np.where(stream & (tiles > s.resident), rest, 0)
    parts = np.minimum(np.minimum(np.floor(s.resident / np.maximum(remaining, 1)), k_tiles), MOST_PARTS)
    idle = (s.resident - remaining * parts) * LEAST_IDLE > s.resident * parts * whole
    alike = (remaining > 0) & (parts > 1) & ~idle
    shares = np.where(alike, whole * k_tiles + np.ceil(k_tiles / parts), np.ceil(tiles * k_tiles / clusters))
    others = np.where(stream, np.where(alike, parts - 1, 1), np.ceil(clusters / np.maximum(tiles, 1)) - 1)
    return _Walk(
        np.where(shared, shares, whole * k_tiles_of_one),
        np.where(shared, clusters, s.resident),
        rest,
        np.where(shared | (rest == 0), 0, k_tiles_of_one),
        np.where(shared, 0.0, rest / np.maximum(tiles, 1)),
        np.where(shared, np.maximum(1, np.floor(tiles / clusters)) * store, stores),
        np.where(shared | ~last, 0.0, store),
        np.where(shared, SHARE_CYCLES + others * partial, share),
    )


def _copied(problem: Problem, s: Space) -> tuple[Column, Column]:
    """Bytes of a CTA's k-tile: those that are written to its shared memory, and those that it reads from the L2."""
    (a, b), (alike_m, alike_n) = problem.operands, s.alike(problem)
    filled = read = np.zeros(1)
    for operand, swapped, width, sharers, alike in ((a, b, s.m, s.columns, alike_m), (b, a, s.n, s.rows, alike_n)):
        pairs = zip(tile_bytes(operand, width, s.k), tile_bytes(swapped, width, s.k), strict=True)
        nbytes, slower = (np.where(s.swap_ab, of_swapped, own) for own, of_swapped in pairs)
        once = np.where(sharers == 1, 1 - MERGED * (1 - 1 / alike), 1)
        filled, read = filled + nbytes, read + nbytes * slower * once / sharers
    return filled, read


def tile_bytes(operand: Matrix, width: Column, k: Column) -> tuple[Column, Column]:
    """Bytes of a k-tile of `width` rows of an (M or N) x K operand; and how many times as long the L2 takes for them
    where rows do not begin where its lines do. Rows of an MN-major tile lie along `width`, begin at multiples of it,
    and are read in whole lines."""
    size, pitch = operand.dtype.bytes, operand.pitch_bytes if operand.tma_ready else 0  # what is packed begins there
    off_line, off_sector = np.array([pitch % LINE_BYTES > 0, pitch % SECTOR_BYTES > 0], float)
    rows = np.minimum(width, max(operand.rows, 1))
    if operand_major(operand) == "MN":
        step = np.where(width < operand.rows, np.gcd(width.astype(int) * size, LINE_BYTES), LINE_BYTES)
        off_line = np.maximum(off_line, 1 - step / LINE_BYTES)
        off_sector = np.maximum(off_sector, (step < SECTOR_BYTES) / 2)
        of_box = np.clip(2 ** np.ceil(np.log2(rows * size)), SECTOR_BYTES, LINE_BYTES)
        rows = np.ceil(rows * size / of_box) * of_box / size
    return size * k * rows, np.asarray(1 + OFF_LINES * off_line + OFF_SECTORS * off_sector)
