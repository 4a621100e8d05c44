"""Registry of kernel designs (CUTLASS: kernel schedules), which say how the warps of a kernel share the work.

Each design declares the configs that it supports; nothing here depends on a design's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from gemmsmith.core.chip import Chip
from gemmsmith.core.dtypes import DType
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.mma import WGMMA, MmaOp
from gemmsmith.core.product import Product


@dataclass(frozen=True)
class Design:
    """A kernel design and the configs that it supports.

    `record(builder, spec)`: records the kernel of a `KernelSpec` in the kernel language.
    `max_accumulator_registers`: by supported number of math (consumer) warpgroups, the registers per thread that the
    accumulator may have. `max_promoted_registers`: the same limit for both accumulators of promoted sums; empty if the
    design does not support these.
    `producer_warpgroups`: warpgroups in addition to the consumer warpgroups.
    `tile_per_warpgroup`: each consumer warpgroup computes a tile of its own; otherwise they split one tile along M, or
    along N if `warpgroups_split_n`.
    `supported_options`: which of the Config's fields splits, cluster_splits, alias_epilogue and sync_clusters the
    design implements.
    `defaults`: values of Config fields if only the design is given.
    `required_arch`: the earliest chip, or with an "a" the only one.
    `groups_along`: what a grouped GEMM may divide: "m" if tiles may have any coordinates and ends, "k" if also each
    may have other k-tiles.
    `arrays`, `shapes`: those of the `Product`, if the design computes one of its own; a and b are never exchanged then.
    `clips_rows`: a tile's rows may end before its last one (`WorkTile.m_end`).
    `uses_tma`: A and B are loaded by TMA, so by one thread, which clusters and eviction policies need.
    """

    name: str
    record: Callable[[Any, Any], None]
    max_accumulator_registers: Mapping[int, int]
    producer_warpgroups: int = 0
    tile_per_warpgroup: bool = False
    supported_options: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    max_promoted_registers: Mapping[int, int] = field(default_factory=dict)
    mma_op: MmaOp = WGMMA
    required_arch: str = "sm_90a"
    uses_tma: bool = True
    warpgroups_split_n: bool = False
    groups_along: frozenset[Literal["m", "k"]] = frozenset()
    arrays: Mapping[str, DType] = field(default_factory=dict)
    shapes: str = ""
    clips_rows: bool = False

    def __post_init__(self) -> None:
        self.product  # noqa: B018 checks the shapes

    @cached_property
    def product(self) -> Product | None:
        """The shapes and arrays of the product that the design computes; None: torch.matmul's."""
        return Product(f"the design {self.name}", self.arrays, self.shapes) if self.shapes or self.arrays else None

    def warpgroups(self, consumers: int) -> tuple[int, int]:
        """Return the consumer warpgroups that share a tile, along M and along N."""
        if self.tile_per_warpgroup:
            return 1, 1
        return (1, consumers) if self.warpgroups_split_n else (consumers, 1)


_DESIGNS: dict[str, Design] = {}


def register_design(design: Design) -> Design:
    """Register a design, which `Config(design=...)` then accepts. Raises ConfigError if its name is taken."""
    if _DESIGNS.setdefault(design.name, design) is not design:
        raise ConfigError(f"design: got {design.name!r}, which is registered already; use another name")
    return design


def get_design(name: str) -> Design:
    """Return the design of that name. Raises ConfigError if there is none."""
    if not isinstance(name, str) or name not in _DESIGNS:
        raise ConfigError(f"design: got {name!r}; use {join_alternatives(design_names())}")
    return _DESIGNS[name]


def design_names() -> list[str]:
    """Return the names of all designs."""
    return sorted(_DESIGNS)


def designs_supporting(option: str) -> str:
    """Return the designs that implement a Config's field, as text for an error."""
    return join_alternatives(name for name in design_names() if option in _DESIGNS[name].supported_options)


def designs_for_chip(chip: Chip) -> list[str]:
    """Return the designs that run on a chip, those for tensor cores first."""
    names = [name for name in design_names() if chip.supports(_DESIGNS[name].required_arch)]
    return sorted(names, key=lambda name: not _DESIGNS[name].mma_op.uses_tensor_cores)


def designs_for_groups(along: Literal["m", "k"]) -> str:
    """Return the designs for grouped GEMMs, as text for an error."""
    return join_alternatives(name for name in design_names() if along in _DESIGNS[name].groups_along)


def designs_for_dtype(dtype: DType, *, promoted: bool = False) -> str:
    """Return the designs that multiply operands of `dtype`, and promote their sums, as text for an error."""
    designs = (x for x in _DESIGNS.values() if x.max_promoted_registers or not promoted)
    return join_alternatives(sorted(x.name for x in designs if x.mma_op.multiplies(dtype)))


def join_alternatives(choices: Iterable[object]) -> str:
    """Return `a, b or c`."""
    words = [str(x) for x in choices]
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else "".join(words)
