"""The configs that are considered for an epilogue: tiles that have registers for it, clusters, shares of K."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from gemmsmith.core.config import Config
from gemmsmith.core.design import find
from gemmsmith.core.graph import Graph
from gemmsmith.core.mma import WGMMA_M
from gemmsmith.core.problem import SCALE_BLOCK
from gemmsmith.core.spec import EpilogueSpec, KernelSpec, promotion, slices
from gemmsmith.epilogue.device.held import held_registers, sources
from gemmsmith.epilogue.device.layout import ALIGNMENT, has_32_bits, piece_columns, suits
from gemmsmith.tuning.fitting import stages_that_fit, transposed

COOPERATIVE = [(256, n, 2) for n in range(192, 56, -8)] + [(192, n, 3) for n in range(192, 56, -8)]
COOPERATIVE += [(128, n, 2) for n in range(256, 128, -8)]
COOPERATIVE += [(128, n, 1) for n in (*range(128, 56, -8), 48, 32, 16, 8)]
COOPERATIVE += [(64, n, 1) for n in range(256, 0, -8)]
"""(M, N, consumers). Two warpgroups share a tile only where one has too few registers: it costs them 0.7 %; or where
one promotes its sums while the other multiplies."""
SHARED = [(128, n, 2) for n in (*range(128, 56, -8), 48, 32, 16, 8)]
PINGPONG = [(64, n) for n in range(256, 80, -16)] + [(128, n) for n in range(192, 56, -8)]
CLUSTERS = [(1, 1), (1, 2), (2, 1)]
"""Those of four CTAs, fewer of which fit, were the fastest for 3 of 324 shapes (survey-h200.json)."""
MOST_EXCHANGED = 192
"""Columns of a tile whose sums a cluster exchanges where an epilogue holds whole rows of it: wider ones spill."""
SPLITS, CLUSTER_SPLITS = (0, 2, 3, 4, 5, 6, 8, 12, 16), (2, 4)
MOST_STAGES = 16
FEW_ROWS, FEW_ROWS_DEPTH = 32, 256
"""Columns of swapped tiles for the fewest rows, and the K that only they are tried with."""
CROWDED, CROWDED_BLOCKS, APART = 0.8, 0.64, 0.44
"""Of the registers that accumulators may take, what they, and elements to be quantized, may where an epilogue needs
more than a few; where it needs many, and a warpgroup has more than 64 rows; and where it reads a matrix without TMA,
whose elements and addresses are held at once."""
SPARED, BESIDE_SHARES, SPARED_APART = 32, 4, 16
"""Registers that promoted sums leave a cluster that adds up its CTAs' sums, or an epilogue of whole rows where tiles
are shared otherwise, and one that quantizes there; and that those of all k-tiles in flight leave an epilogue that reads
a matrix without TMA: with fewer they spill."""
RICH = frozenset({"erf", "gelu", "expm1", "elu"})
"""Functions whose intermediate values would spill with the largest accumulators."""


def candidates(epilogue: EpilogueSpec, promoted: bool = False) -> Iterator[Config]:
    """All configs, for products of any size, with as many stages as shared memory holds; transposed ones too. Those for
    sums that are `promoted` are of the designs that can, a block of K deep."""
    yield from _oriented(epilogue, False, promoted)
    if epilogue.graph.transposable:
        yield from _oriented(transposed(epilogue), True, promoted)


def _oriented(epilogue: EpilogueSpec, swap: bool, promoted: bool) -> Iterator[Config]:
    """The configs with that `swap_ab`, for an epilogue of what they compute."""
    cooperative = COOPERATIVE + SHARED * (_heavy(epilogue) or promoted)
    tiles: list[tuple[str, int, int, int]] = [("cooperative", *t) for t in cooperative]
    if promoted:  # no pingpong, which the model's constants for promoted sums are not fitted to
        tiles = [t for t in tiles if _promotes(*t) and not _crowds(t[0], t[1], t[3], epilogue)]
    else:
        tiles += [("pingpong", *t, 2) for t in PINGPONG]
    if swap:
        tiles = [tile for tile in tiles if not _spills_transposed(*tile[:3], epilogue.graph)]
    roomy = [tile for tile in tiles if _has_registers(*tile, epilogue)]
    for design, m, n, consumers in roomy or [tile for tile in tiles if suits(epilogue.graph, epilogue.tma, tile[2])]:
        depths = (64, 128) if (m == 64 or m + n <= 256) and not promoted else (64,)
        for k in (*depths, FEW_ROWS_DEPTH) if swap and n <= FEW_ROWS and not promoted else depths:
            tiled = Config(design, (m, n, k), consumers=consumers, stages=MOST_STAGES, swap_ab=swap)
            stages = stages_that_fit(tiled, epilogue, (m + n) * k * 2)
            for cluster in CLUSTERS:
                if stages < 3 or n % (8 * cluster[0]):
                    continue
                raster = "n" if cluster[1] > cluster[0] else "m"
                c = tiled.replace(cluster=cluster, stages=stages, raster=raster)
                yield c
                if n % 16 == 0 if n > FEW_ROWS else swap:
                    yield from _shares(c, epilogue)


def _promotes(name: str, m: int, n: int, consumers: int) -> bool:
    """Whether a tile has registers for both accumulators of promoted sums."""
    taken = promotion(Config(name, (m, n, SCALE_BLOCK), consumers=consumers)).registers
    return taken <= find(name).promoted.get(consumers, 0)


def spares(spec: KernelSpec) -> bool:
    """Whether promoted sums, with a problem's scales, leave enough registers."""
    c = spec.config
    if not spec.promoted:
        return True
    graph = spec.epilogue.graph
    quantizes = any(node.op == "quantize" for node in graph.nodes)
    spared = SPARED if c.cluster_splits > 1 else BESIDE_SHARES * (quantizes and c.splits != 1)
    if graph.takes_whole_rows and c.splits != 1:
        spared = SPARED
    columns, in_flight, taken = spec.promotion
    if _reads_apart(spec.epilogue):
        spared = max(spared, (in_flight - 1) * columns // 2 + SPARED_APART)
    return taken + spared <= find(c.design).promoted[c.consumers]


def _stores_fp32(graph: Graph) -> bool:
    """Whether some result is a matrix of 32-bit elements."""
    return any(r.dtype and r.dtype.bits == 32 and r.name in graph.stored for r in graph.results)


def _has_registers(name: str, m: int, n: int, consumers: int, epilogue: EpilogueSpec) -> bool:
    """Whether a tile suits an epilogue, and has registers for it beside the accumulators."""
    design = find(name)
    if not suits(epilogue.graph, epilogue.tma, n):
        return False
    held = held_registers(epilogue.graph, piece_columns(epilogue.graph, epilogue.tma, n))
    taken = (m // WGMMA_M // design.warpgroups(consumers)[0] * n / 2 + held) / design.accumulators[consumers]
    if _crowds(name, m, consumers, epilogue):
        return taken <= CROWDED_BLOCKS and not _needs_64_rows(epilogue)
    return taken <= (APART if _reads_apart(epilogue) else 1.0 if _light(epilogue) and not held else CROWDED)


def _crowds(name: str, m: int, consumers: int, epilogue: EpilogueSpec) -> bool:
    """Whether a warpgroup has more than 64 rows of a tile where an epilogue needs many registers: too few are left for
    promoted sums or shares of K."""
    return m > WGMMA_M * find(name).warpgroups(consumers)[0] and _heavy(epilogue)


def _spills_transposed(design: str, m: int, n: int, graph: Graph) -> bool:
    """Whether a tile spills where 32-bit elements are stored along columns, one by one, in pieces as wide as the
    tile."""
    return _stores_fp32(graph) and design == "pingpong" and m == 128 and n > 144 and n % 16 > 0


@lru_cache(maxsize=64)
def _heavy(epilogue: EpilogueSpec) -> bool:
    """Whether an epilogue needs many registers: for matrices beside the first and reductions, if they are two, for a
    matrix that is read without TMA, and for one that is stored along its columns."""
    graph = epilogue.graph
    reductions = [node for node in graph.nodes if node.op == "reduce"]
    return max(len(graph.matrices) - 1, 0) + len(reductions) > 1 or _by_threads(epilogue)


def _by_threads(epilogue: EpilogueSpec) -> bool:
    """Whether an epilogue reads a matrix without TMA, or computes one that is stored along its columns."""
    column_major = any(r.name in epilogue.column_major for r in epilogue.graph.results)
    return _reads_apart(epilogue) or (epilogue.graph.computes and column_major)


def _needs_64_rows(epilogue: EpilogueSpec) -> bool:
    """Whether an epilogue that needs many registers spills where a warpgroup has more than 64 rows: for what threads
    read or store, or for a matrix of 32-bit elements."""
    graph = epilogue.graph
    direct = any(name not in epilogue.tma for name in graph.stored)
    return has_32_bits(graph) or direct or _by_threads(epilogue)


@lru_cache(maxsize=64)
def _light(epilogue: EpilogueSpec) -> bool:
    """Whether an epilogue is considered with the largest accumulators: the bare product, or little more, stored by TMA.
    One that loads a matrix would have too few or too narrow pieces of it in flight (tries-h200.json)."""
    graph = epilogue.graph
    vectors = [o for o in graph.operands if o.extent.height or o.extent.width]
    rich = epilogue.exact or any(node.op in RICH for node in graph.nodes)
    direct = any(name not in epilogue.tma for name in graph.stored)
    return not graph.computes or not (len(vectors) > 1 or _loads(epilogue) or rich or direct or _heavy(epilogue))


def _reads_apart(epilogue: EpilogueSpec) -> bool:
    """Whether the epilogue reads a matrix without TMA."""
    return any(o.extent.is_matrix and o.name not in epilogue.tma for o in epilogue.graph.operands)


def _loads(epilogue: EpilogueSpec) -> bool:
    """Whether the epilogue reads a matrix."""
    return any(o.extent.is_matrix for o in epilogue.graph.operands)


def stages_through(c: Config, epilogue: EpilogueSpec) -> int:
    """The stages of a config whose results TMA stores through them (`alias_epilogue`), of which two surely hold them;
    0 where they do not, or where two warpgroups share the tile: one is faster with it, two are slower."""
    if c.design != "cooperative" or not c.consumers == c.splits == 1 or c.swap_ab:
        return 0
    stored = sum(r.dtype.bytes for r in epilogue.graph.results if r.dtype and r.name in epilogue.tma)
    m, n, k = c.tile
    stage = (m + n) * k * 2
    fits = 0 < m * n * stored <= 2 * stage
    alias_epilogue = c.replace(alias_epilogue=True, stages=MOST_STAGES)
    return stages_that_fit(alias_epilogue, epilogue, stage, _exchange(c, epilogue)) if fits else 0


def _exchange(c: Config, epilogue: EpilogueSpec) -> int:
    """Bytes of shared memory for the sums that the CTAs of a cluster exchange, and for their barriers."""
    slots = (c.cluster_splits - 1) * c.tile[0] * c.tile[1] * 4 // slices(c, epilogue.graph)
    return slots + ALIGNMENT * (slots > 0)


def _shares(base: Config, epilogue: EpilogueSpec) -> Iterator[Config]:
    m, n, k = base.tile
    if "splits" not in find(base.design).takes or base.consumers == 3:  # three have few registers
        return
    if _crowds(base.design, m, base.consumers, epilogue):
        return
    for splits in SPLITS:
        yield base.replace(splits=splits)
    if n > MOST_EXCHANGED and sources(epilogue.graph):
        return
    for splits in CLUSTER_SPLITS:
        shared = base.replace(cluster_splits=splits, stages=MOST_STAGES)
        stages = stages_that_fit(shared, epilogue, (m + n) * k * 2, _exchange(shared, epilogue))
        if stages >= 3:
            yield shared.replace(stages=stages)


def has_room(config: Config, epilogue: EpilogueSpec, promoted: bool) -> bool:
    """Whether an epilogue left a config, fitted to it, registers beside its accumulators and three stages."""
    m, n, _ = config.tile
    alone = not promoted and config.splits == config.cluster_splits == 1
    if not alone and _crowds(config.design, m, config.consumers, epilogue):
        return False
    return config.stages >= 3 and _has_registers(config.design, m, n, config.consumers, epilogue)


@lru_cache(maxsize=1024)
def with_reuse_for(epilogue: EpilogueSpec, config: Config) -> Config:
    """A bare product's config of one tile a CTA: an epilogue's results leave through the stages as the product did, and
    where a matrix is loaded wherever they fit: 0.3 to 1.3 % of six such products (tries-h200.json)."""
    through = stages_through(config, epilogue) if config.alias_epilogue or _loads(epilogue) else 0
    return config.replace(alias_epilogue=through > 0, stages=through or config.stages)
