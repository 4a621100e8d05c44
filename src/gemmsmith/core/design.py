"""Registry of kernel designs (CUTLASS: kernel schedules), which say how the warps of a kernel share the work.

Each design declares the configs that it supports; nothing here depends on a design's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gemmsmith.core.cached_property import cached_property
from gemmsmith.core.chip import CHIPS, Chip
from gemmsmith.core.dtypes import DType
from gemmsmith.core.errors import ARGUMENTS, ConfigError
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
    `clips_rows`: a tile's rows may end before its last one (`OperandCoord.group_end`).
    `uses_tma`: A and B are loaded by TMA, so by one thread, which clusters and eviction policies need.

    Raises:
        ConfigError: A field has a value that it cannot have.
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
        for name, (is_valid, accepted) in _FIELDS.items():
            value = getattr(self, name)
            if not is_valid(value):
                raise ConfigError(f"{name}: got {value!r}; use {accepted}")
            if isinstance(value, Mapping):  # the caller may change it later
                object.__setattr__(self, name, dict(value))
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


def _is_name(x: Any) -> bool:
    return isinstance(x, str) and x.isascii() and x.isidentifier()


def _is_count(x: Any, least: int = 1) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= least


def _are_registers(x: Any) -> bool:
    return isinstance(x, Mapping) and all(map(_is_count, x)) and all(map(_is_count, x.values()))


def _is_set_of(*names: str) -> tuple[Callable[[Any], bool], str]:
    return lambda x: isinstance(x, frozenset) and x <= set(names), f"a frozenset of {', '.join(names)}"


_REGISTERS = "registers per thread by number of math warpgroups, such as {1: 200, 2: 200}"
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (_is_name, "letters, digits and underscores"),
    "record": (callable, "a function of a Builder and a KernelSpec"),
    "max_accumulator_registers": (lambda x: _are_registers(x) and len(x) > 0, _REGISTERS),
    "max_promoted_registers": (_are_registers, _REGISTERS),
    "producer_warpgroups": (lambda x: _is_count(x, 0), "a number of warpgroups, 0 for none"),
    "supported_options": _is_set_of("splits", "cluster_splits", "alias_epilogue", "sync_clusters"),
    "groups_along": _is_set_of("m", "k"),
    "defaults": (lambda x: isinstance(x, Mapping) and all(map(_is_name, x)), "values by names of Config's fields"),
    "mma_op": (lambda x: isinstance(x, MmaOp), "an MmaOp, such as WGMMA"),
    "required_arch": (lambda x: isinstance(x, str) and x.removesuffix("a") in CHIPS, f"sm_90a, {', '.join(CHIPS)}"),
    "arrays": (
        lambda x: isinstance(x, Mapping) and all(_is_name(y) and y not in ("a", "b", *ARGUMENTS) for y in x),
        "dtypes by names that no argument of gemm has",
    ),
    "shapes": (lambda x: isinstance(x, str), 'text, such as "mk,gkn,g->mn"'),
    **dict.fromkeys(
        ("tile_per_warpgroup", "uses_tma", "warpgroups_split_n", "clips_rows"),
        (lambda x: isinstance(x, bool), "True or False"),
    ),
}
"""By field: whether a value is valid, and the valid ones, for error messages."""
_DESIGNS: dict[str, Design] = {}


def register_design(design: Design) -> Design:
    """Register a design, which `Config(design=...)` then accepts.

    Raises ConfigError if its name is taken, or if it is no Design.
    """
    if not isinstance(design, Design):
        raise ConfigError(f"design: got {type(design).__name__}; use a Design(name, record, ...)")
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
    designs = (x for x in list(_DESIGNS.values()) if x.max_promoted_registers or not promoted)
    return join_alternatives(sorted(x.name for x in designs if x.mma_op.multiplies(dtype)))


def join_alternatives(choices: Iterable[object]) -> str:
    """Return `a, b or c`."""
    words = [str(x) for x in choices]
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else "".join(words)
