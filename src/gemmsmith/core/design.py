"""Registry of kernel designs (CUTLASS: kernel schedules), which say how the warps of a kernel share the work.

Each design declares the configs that it supports; nothing here depends on a design's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal

from gemmsmith.core.chip import CHIPS, Chip
from gemmsmith.core.dtypes import DType
from gemmsmith.core.errors import ARGUMENTS, ConfigError
from gemmsmith.core.frozen import cached_property
from gemmsmith.core.grouping import Grouping
from gemmsmith.core.mma import WGMMA, Major, Mma, MmaOp
from gemmsmith.core.product import ROLES, Product, Role


@dataclass(frozen=True)
class Design:
    """A kernel design and the configs that it supports.

    `record(builder, spec)`: records the kernel of a `KernelSpec` in the kernel language.
    `max_accumulator_registers`: the registers per thread that the accumulator may have, by the number of math
    (consumer) warpgroups; others are not supported. `max_promoted_registers`: the same limit for both accumulators of
    promoted sums; empty if the design does not support these.
    `producer_warpgroups`: warpgroups in addition to the consumer warpgroups.
    `tile_per_warpgroup`: each consumer warpgroup computes a tile of its own; otherwise they split one tile along M, or
    along N if `warpgroups_split_n`.
    `supported_options`: what the design implements. Of the Config's fields: splits, cluster_splits, alias_epilogue and
    sync_clusters. Of what a caller may ask for: block_scales; 3xtf32, the residuals of A and B as further operands;
    interleaved_b, two arrays as b; a_in_registers, A in layouts that the instruction reads from registers only.
    `defaults`: values of Config fields if only the design is given.
    `required_arch`: the earliest chip, such as "sm_80"; with an "a", as in "sm_90a", the only one.
    `dtypes`: the dtypes of A and B in memory, and the one in which both are multiplied: {(BF16, INT4): BF16}; a and b
    are never exchanged if they differ. Empty: those of `mma_op`'s instructions.
    `majors`: the layouts of an operand, "a" or "b", that the design reads, if they are not all of the instruction's; an
    array in another one is copied first.
    `groups_along`: what a grouped GEMM may divide: "m" if a tile may begin at any row and end before its last row, "k"
    if also each tile may have other k-tiles.
    `arrays`, `shapes`: those of the `Product`, if the design computes one of its own; a and b are never exchanged then.
    `clips_rows`: a tile's rows may end before its last one (`OperandCoord.group_end`).
    `uses_tma`: TMA loads A and B. Without it the design supports neither clusters nor L2 eviction policies.

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
    dtypes: Mapping[tuple[DType, DType], DType] = field(default_factory=dict)
    majors: Mapping[Role, tuple[Major, ...]] = field(default_factory=dict)

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

    def mma_for(self, a: DType, b: DType, d: DType) -> Mma | None:
        """Return the instruction for A and B of these dtypes in memory, accumulated in `d`; None if there is none."""
        # a design with `dtypes` converts both operands to one dtype before it multiplies them
        multiplied = (self.dtypes.get((a, b)),) * 2 if self.dtypes else (a, b)
        return self.mma_op.find(*multiplied, d)

    def readable_majors(self, role: Role, mma: Mma, *, promoted: bool, grouping: Grouping | None) -> tuple[Major, ...]:
        """Return the layouts of an operand that the instruction, the design and the groups all support.

        Tiles that begin at any row are K-major: along the contiguous dimension, TMA only starts at multiples of 16
        bytes. `promoted`: sums are promoted (see KernelSpec); then `mma.register_majors` are not supported.
        """
        allowed = {*self.majors.get(role, ("K", "MN"))}
        if self.clips_rows and role == "a":
            allowed &= {"K"}
        if grouping:
            allowed &= {*grouping.majors(role, mma.a)}
        reads_registers = role == "a" and "a_in_registers" in self.supported_options and not promoted
        return tuple(x for x in mma.majors + mma.register_majors * reads_registers if x in allowed)

    def warpgroups(self, consumers: int) -> tuple[int, int]:
        """Return the consumer warpgroups that share a tile, along M and along N."""
        if self.tile_per_warpgroup:
            return 1, 1
        return (1, consumers) if self.warpgroups_split_n else (consumers, 1)


def _is_name(x: Any) -> bool:
    return isinstance(x, str) and x.isascii() and x.isidentifier()


def _is_dtype(x: Any) -> bool:
    return isinstance(x, DType)


def _is_pair_of_dtypes(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and all(map(_is_dtype, x))


def _is_count(x: Any, least: int = 1) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= least


def _are_registers(x: Any) -> bool:
    return isinstance(x, Mapping) and all(map(_is_count, x)) and all(map(_is_count, x.values()))


def _is_set_of(*names: str) -> tuple[Callable[[Any], bool], str]:
    return lambda x: isinstance(x, frozenset) and x <= set(names), f"a frozenset of {', '.join(names)}"


_OPTIONS = (
    "splits", "cluster_splits", "alias_epilogue", "sync_clusters", "block_scales", "3xtf32", "interleaved_b",
    "a_in_registers",
)  # fmt: skip
_REGISTERS = "registers per thread by number of math warpgroups, such as {1: 200, 2: 200}"
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (_is_name, "letters, digits and underscores"),
    "record": (callable, "a function of a Builder and a KernelSpec"),
    "max_accumulator_registers": (lambda x: _are_registers(x) and len(x) > 0, _REGISTERS),
    "max_promoted_registers": (_are_registers, _REGISTERS),
    "producer_warpgroups": (lambda x: _is_count(x, 0), "a number of warpgroups, 0 for none"),
    "supported_options": _is_set_of(*_OPTIONS),
    "groups_along": _is_set_of("m", "k"),
    "defaults": (lambda x: isinstance(x, Mapping) and all(map(_is_name, x)), "values by names of Config's fields"),
    "mma_op": (lambda x: isinstance(x, MmaOp), "an MmaOp, such as WGMMA"),
    "required_arch": (lambda x: isinstance(x, str) and x.removesuffix("a") in CHIPS, f"sm_90a, {', '.join(CHIPS)}"),
    "arrays": (
        lambda x: isinstance(x, Mapping) and all(_is_name(y) and y not in ("a", "b", *ARGUMENTS) for y in x),
        "dtypes by names that no argument of gemm has",
    ),
    "dtypes": (
        lambda x: isinstance(x, Mapping) and all(map(_is_pair_of_dtypes, x)) and all(map(_is_dtype, x.values())),
        "one DType by two, such as {(BF16, INT4): BF16}",
    ),
    "majors": (
        lambda x: isinstance(x, Mapping) and {*x} <= {*ROLES} and all({*y} <= {"K", "MN"} for y in x.values()),
        'layouts by operand, such as {"b": ("K",)}',
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
    """Register a design, so that `Config(design=...)` accepts its name.

    Raises ConfigError if its name is taken, or if it is no Design.
    """
    if not isinstance(design, Design):
        raise ConfigError(f"design: got {type(design).__name__}; use a Design(name, record, ...)")
    if _DESIGNS.setdefault(design.name, design) is not design:
        raise ConfigError(f"design: got {design.name!r}, which is registered already; use another name")
    return design


@lru_cache(maxsize=1)
def registered_designs() -> dict[str, Design]:
    """Return the designs by name. The library's register themselves when gemmsmith.kernels.build is imported."""
    import_module("gemmsmith.kernels.build")
    return _DESIGNS


def get_design(name: str) -> Design:
    """Return the design of that name. Raises ConfigError if there is none."""
    if not isinstance(name, str) or name not in registered_designs():
        raise ConfigError(f"design: got {name!r}; use {join_alternatives(design_names())}")
    return registered_designs()[name]


def design_names() -> list[str]:
    """Return the names of all designs."""
    return sorted(registered_designs())


def designs_supporting(option: str) -> str:
    """Return the designs with one of the `supported_options`, as text for an error."""
    return designs_that(lambda design: option in design.supported_options)


def designs_for_chip(chip: Chip) -> list[str]:
    """Return the names of the designs that run on a chip: those that use tensor cores first, then in order."""
    designs = [x for x in list(registered_designs().values()) if chip.supports(x.required_arch)]
    return [x.name for x in sorted(designs, key=lambda x: not x.mma_op.uses_tensor_cores)]


def designs_that(support: Callable[[Design], Any]) -> str:
    """Return the designs that support something, as text for an error."""
    return join_alternatives(name for name in design_names() if support(registered_designs()[name]))


def join_alternatives(choices: Iterable[object]) -> str:
    """Return `a, b or c`."""
    words = [str(x) for x in choices]
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else "".join(words)
