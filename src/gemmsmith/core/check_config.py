"""Operand-independent rules for a valid Config."""

from __future__ import annotations

from collections.abc import Iterator

from gemmsmith.core.chip import HOPPER, get_chip
from gemmsmith.core.config import Config
from gemmsmith.core.design import designs_for_chip, designs_supporting, get_design, join_alternatives
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.mma import WGMMA, WGMMA_M

MAX_STAGES = HOPPER.max_shared_bytes_per_cta // (2 * 16 * (WGMMA_M + 8))
"""Stages of the smallest tile, 64x8 with rows of 32 bytes, that fit in shared memory."""
MAX_RASTER_GROUP = 4096
"""Tiles; the kernels multiply it by tile counts in int32."""
OPERAND_BITS = sorted({mma.a.bits for mma in WGMMA.instructions})


def check_config(c: Config) -> None:
    """Raise ConfigError if the config is invalid for all operands; the message says what would work."""
    for holds, message in _rules(c):
        if not holds:
            raise ConfigError(message)


def _rules(c: Config) -> Iterator[tuple[bool, str]]:
    """Yield (whether a rule holds, the message if not) of each rule; a rule may assume that the previous ones hold."""
    (m, n, k), (rows, columns), splits = c.tile, c.cluster, c.cluster_splits
    design = get_design(c.design)
    yield (
        c.consumers in design.max_accumulator_registers,
        f"consumers: got {c.consumers}; use {join_alternatives(design.max_accumulator_registers)} with {c.design}",
    )
    warpgroups, chip = c.warpgroups[0], get_chip(c.chip)
    yield (
        chip.supports(design.required_arch),
        f"design: got {c.design} for {chip}; use {join_alternatives(designs_for_chip(chip))}",
    )
    yield (m > 0 and m % (WGMMA_M * warpgroups) == 0 and m <= 256,
           f"tile M: got {m}; use a multiple of {WGMMA_M} x {warpgroups} warpgroups, up to 256")  # fmt: skip
    yield 8 <= n <= 256 and n % 8 == 0, f"tile N: got {n}; use a multiple of 8 from 8 to 256"
    yield (any(fills_swizzle_rows(k, bits) for bits in OPERAND_BITS),
           f"tile K: got {k}; use rows of 32, 64, or a multiple of 128 bytes up to 512")  # fmt: skip
    if not design.uses_tma:
        yield c.cluster == (1, 1), f"cluster: got {c.cluster}; {c.design} does not support clusters, use 1x1"
        yield (
            c.evict == ("normal", "normal"),
            f"evict: got {c.evict}; {c.design} does not support L2 eviction policies, use normal for both",
        )
        yield not c.serpentine, f"serpentine: not supported by {c.design}; use False"
    yield (not c.streaming_stores or chip.supports("sm_90"),
           f"streaming_stores: got {chip}, which does not support TMA stores; use False")  # fmt: skip
    yield c.stages >= 2, f"stages: got {c.stages}; use at least 2"
    yield (c.stages <= MAX_STAGES,
           f"stages: got {c.stages}; use at most {MAX_STAGES}, what fits with the smallest tile")  # fmt: skip
    yield ({rows, columns} <= {1, 2, 4} and rows * columns <= 8,
           f"cluster: got {c.cluster}; use 1, 2 or 4 each way, at most 8 CTAs")  # fmt: skip
    yield (1 <= splits <= 8 // (rows * columns),
           f"cluster_splits: got {splits}; use 1 for none, up to {8 // (rows * columns)} with a cluster of "
           f"{rows}x{columns}, at most 8 CTAs in all")  # fmt: skip
    yield 0 <= c.splits <= 64, f"splits: got {c.splits}; use 1 for none, 2 to 64, or 0 for stream-K"
    yield (1 in (c.splits, splits),
           f"splits: got {c.splits} and {splits} in a cluster; use one of them, 1 for the other")  # fmt: skip
    for name, count in (("splits", c.splits), ("cluster_splits", splits)):
        yield (
            name in design.supported_options or count == 1,
            f"{name}: got {count}; {c.design} does not support split-K, use 1, or {designs_supporting(name)}",
        )
    yield 1 <= c.raster_group <= MAX_RASTER_GROUP, f"raster_group: got {c.raster_group}; use 1 to {MAX_RASTER_GROUP}"
    yield (not c.sync_clusters or c.can_sync_clusters,
           f"sync_clusters: got {c.design}, splits {c.splits} and {splits} in a cluster; it needs "
           f"{designs_supporting('sync_clusters')}, and no split-K")  # fmt: skip
    yield (
        not c.alias_epilogue or "alias_epilogue" in design.supported_options,
        f"alias_epilogue: got {c.design}; it needs {designs_supporting('alias_epilogue')}",
    )


def fills_swizzle_rows(k: int, bits: int) -> bool:
    """Return whether `k` elements of `bits` bits fill a swizzle row of 32 or 64 bytes, or 1 to 4 rows of 128."""
    nbytes = k * bits / 8
    return nbytes in (32, 64) or (nbytes % 128 == 0 and 128 <= nbytes <= 512)
