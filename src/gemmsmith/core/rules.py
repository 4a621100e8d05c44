"""What a config must keep to, whatever the operands are."""

from __future__ import annotations

from collections.abc import Iterator

from gemmsmith.core.chip import HOPPER, find_chip
from gemmsmith.core.config import Config
from gemmsmith.core.design import find, for_chip, listed, taking
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.mma import WGMMA, WGMMA_M

STAGES_LIMIT = HOPPER.shared_bytes // (2 * 16 * (WGMMA_M + 8))
"""Stages of the smallest tile, 64x8 with rows of 32 bytes, that shared memory has room for."""
WIDEST_BAND = 4096
"""Tiles; a kernel's products of it with numbers of tiles are int32."""
OPERAND_BYTES = sorted({mma.a.bytes for mma in WGMMA})


def check(c: Config) -> None:
    """Raises ConfigError for a config that works with no operands; the message says what would work."""
    for holds, message in _rules(c):
        if not holds:
            raise ConfigError(message)


def _rules(c: Config) -> Iterator[tuple[bool, str]]:
    """The rules in order, each with its message; a rule may assume that those before it hold."""
    (m, n, k), (rows, columns), splits = c.tile, c.cluster, c.cluster_splits
    design = find(c.design)
    yield (c.consumers in design.accumulators,
           f"consumers: got {c.consumers}; use {listed(design.accumulators)} with {c.design}")  # fmt: skip
    warpgroups, chip = c.warpgroups[0], find_chip(c.chip)
    yield chip.has(design.architecture), f"design: got {c.design} for {chip}; use {listed(for_chip(chip))}"
    yield (m > 0 and m % (WGMMA_M * warpgroups) == 0 and m <= 256,
           f"tile M: got {m}; use a multiple of {WGMMA_M} x {warpgroups} warpgroups, up to 256")  # fmt: skip
    yield 8 <= n <= 256 and n % 8 == 0, f"tile N: got {n}; use a multiple of 8 from 8 to 256"
    yield (any(whole_rows(k, size) for size in OPERAND_BYTES),
           f"tile K: got {k}; use rows of 32, 64, or a multiple of 128 bytes up to 512")  # fmt: skip
    if design.multiplies != "wgmma":
        yield c.cluster == (1, 1), f"cluster: got {c.cluster}; {c.design} has no clusters, use 1x1"
        yield (c.evict == ("normal", "normal"),
               f"evict: got {c.evict}; {c.design} has no policies of the L2, use normal for both")  # fmt: skip
        yield not c.serpentine, f"serpentine: got {c.design}, which goes through k-tiles in their order"
    yield (not c.streaming_stores or chip.has("sm_90"),
           f"streaming_stores: got {chip}, which has no stores by TMA; use False")  # fmt: skip
    yield not c.pdl or chip.has("sm_90"), f"pdl: got {chip}, which has no programmatic dependent launch; use False"
    yield c.stages >= 2, f"stages: got {c.stages}; use at least 2"
    yield c.stages <= STAGES_LIMIT, f"stages: got {c.stages}; shared memory has room for {STAGES_LIMIT} of the smallest"
    yield ({rows, columns} <= {1, 2, 4} and rows * columns <= 8,
           f"cluster: got {c.cluster}; use 1, 2 or 4 each way, at most 8 CTAs")  # fmt: skip
    yield (1 <= splits <= 8 // (rows * columns),
           f"cluster_splits: got {splits}; use 1 for none, up to {8 // (rows * columns)} with a cluster of "
           f"{rows}x{columns}, at most 8 CTAs in all")  # fmt: skip
    yield 0 <= c.splits <= 64, f"splits: got {c.splits}; use 1 for none, 2 to 64, or 0 for stream-K"
    yield (1 in (c.splits, splits),
           f"splits: got {c.splits} and {splits} in a cluster; use one of them, 1 for the other")  # fmt: skip
    for name, count in (("splits", c.splits), ("cluster_splits", splits)):
        yield (name in design.takes or count == 1,
               f"{name}: got {count}; {c.design} computes whole tiles, use 1, or {taking(name)}")  # fmt: skip
    yield 1 <= c.raster_group <= WIDEST_BAND, f"raster_group: got {c.raster_group}; use 1 to {WIDEST_BAND}"
    yield (not c.sync_clusters or c.can_sync_clusters,
           f"sync_clusters: got {c.design}, splits {c.splits} and {splits} in a cluster; it takes "
           f"{taking('sync_clusters')} and whole tiles")  # fmt: skip
    yield (
        not c.alias_epilogue or "alias_epilogue" in design.takes,
        f"alias_epilogue: got {c.design}; it takes {taking('alias_epilogue')}",
    )


def whole_rows(k: int, size: int) -> bool:
    """Whether `k` elements of `size` bytes are a row that swizzles, or several of the widest."""
    return k * size in (32, 64) or (k * size % 128 == 0 and 128 <= k * size <= 512)
