"""Config: the compile-time choices of a kernel, which do not depend on the problem's sizes."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal, get_args

from gemmsmith.core.chip import HOPPER, get_chip
from gemmsmith.core.design import get_design
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.frozen import changed

Eviction = Literal["first", "normal", "last"]
Raster = Literal["m", "n"]


@dataclass(frozen=True)
class Config:
    """The compile-time choices of a kernel.

    Args:
        design: Name of a registered `Design`: how the kernel's warps share the work (CUTLASS: KernelSchedule).
        tile: M, N, K of a CTA's tile (CUTLASS: TileShape_MNK).
        cluster: CTAs of a cluster along M and along N (CUTLASS: ClusterShape_MNK).
        stages: Stages of the pipeline of A and B (CUTLASS: StageCount).
        consumers: Math warpgroups (CUTLASS: consumer warpgroups). Each computes tile M / consumers rows, a multiple of
            64; with pingpong, a tile of its own.
        raster: "m" or "n", the dimension along which consecutive tiles run (CUTLASS: RasterOrderOptions).
        raster_group: Width of the raster band, in tiles of the other dimension (CUTLASS: max_swizzle_size; Triton:
            GROUP_SIZE_M).
        splits: Clusters that share the K of a tile (CUTLASS: DecompositionMode SplitK and its `splits`), 1 for none;
            0: stream-K, in which all clusters get equal shares of the tiles that would not fill a last wave.
        cluster_splits: CTAs of a cluster that share the K of a tile and reduce their partial sums in shared memory.
        swap_ab: Compute D^T = B^T @ A^T, so that a tile's N covers rows of A; for problems with few rows.
        evict: L2 eviction policies of the loads of A and B (CUTLASS: TMA::CacheHintSm90).
        streaming_stores: Store D with the L2 policy evict_first; for results larger than the L2.
        alias_epilogue: The epilogue's buffers alias the mainloop stages, which leaves shared memory for more stages;
            loads of the next tile wait for the epilogue (CUTLASS's non-persistent kernels: a union of both storages).
        serpentine: Every other tile of a CTA traverses K in reverse, to raise the L2 hit rate.
        sync_clusters: Clusters wait for one another every few k-tiles, to read the same data at the same time.
        chip: Name of the compute capability that the kernel is compiled for (CUTLASS: ArchTag).

    Raises:
        ConfigError: A value has the wrong type.
    """

    design: str = "cooperative"
    tile: tuple[int, int, int] = (128, 256, 64)
    cluster: tuple[int, int] = (2, 1)
    stages: int = 4
    consumers: int = 2
    raster: Raster = "m"
    raster_group: int = 8
    splits: int = 1
    cluster_splits: int = 1
    swap_ab: bool = False
    evict: tuple[Eviction, Eviction] = ("normal", "normal")
    streaming_stores: bool = False
    alias_epilogue: bool = False
    serpentine: bool = False
    sync_clusters: bool = False
    chip: str = HOPPER.name

    def __new__(cls, *_: object, **fields: object) -> Config:
        """Check the names of the fields, which a dataclass would report less clearly. Raises ConfigError."""
        for name in fields.keys() - _FIELDS.keys():
            near = get_close_matches(name, _FIELDS, 1)
            raise ConfigError(f"{name}: a Config has no such field; use {near[0] if near else ', '.join(_FIELDS)}")
        return super().__new__(cls)

    @classmethod
    def parse(cls, text: str) -> Config:
        """Return the Config whose `str` is `text`. Raises ConfigError."""
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if not match:
            raise ConfigError(f"text: got {text!r}; use that of a Config, such as {str(cls())!r}")
        fields: dict[str, Any] = {name: x for name, x in match.groupdict().items() if x is not None}
        fields |= {name: int(fields[name]) for name in _INT_FIELDS if name in fields}
        fields |= {name: tuple(map(int, fields[name].split("x"))) for name in ("tile", "cluster")}
        fields |= {name: True for name in _BOOL_FIELDS if name in fields}
        if "evict" in fields:
            fields["evict"] = tuple(fields["evict"].split())
        if fields.pop("stream_k", None):
            fields["splits"] = 0
        return cls(**fields)

    def __post_init__(self) -> None:
        for name in _FIELDS:
            object.__setattr__(self, name, _parse_field(name, getattr(self, name)))

    @property
    def warpgroups(self) -> tuple[int, int]:
        """Math warpgroups that share a tile, along M and along N."""
        return get_design(self.design).warpgroups(self.consumers)

    @property
    def can_sync_clusters(self) -> bool:
        """True if `sync_clusters` may be set: the design implements it, and no tile's K is split."""
        return "sync_clusters" in get_design(self.design).supported_options and self.splits == self.cluster_splits == 1

    def replace(self, **changes: Any) -> Config:
        """Return a copy with some fields changed. Raises ConfigError for other names and types.

        Unlike dataclasses.replace, it does not check the other fields again: tuning makes thousands of copies.
        """
        if not changes.keys() <= _FIELDS.keys():
            return replace(self, **changes)  # raises ConfigError, which names the field
        return changed(self, **{name: _parse_field(name, x) for name, x in changes.items()})

    def __str__(self) -> str:
        """Return the text that `parse` reads. Some fields are left out if they have their default value."""
        parts = (
            (True, f"{self.design} {'x'.join(map(str, self.tile))} cluster {'x'.join(map(str, self.cluster))}"),
            (True, f"stages {self.stages} consumers {self.consumers} raster {self.raster}{self.raster_group}"),
            (self.splits > 1, f"splits {self.splits}"),
            (not self.splits, "stream-K"),
            (self.cluster_splits > 1, f"cluster splits {self.cluster_splits}"),
            (self.swap_ab, "swap_ab"),
            (self.evict != ("normal", "normal"), f"evict {' '.join(self.evict)}"),
            *((getattr(self, name), name) for name in _BOOL_FIELDS if name != "swap_ab"),
            (self.chip != HOPPER.name, f"chip {self.chip}"),
        )
        return " ".join(text for is_shown, text in parts if is_shown)


def _parse_int(x: Any) -> int:
    if isinstance(x, bool):
        raise TypeError
    return operator.index(x)


def _parse_bool(x: Any) -> bool:
    return x if isinstance(x, bool) else {0: False, 1: True}[x]  # accepts numpy's bools, and 0 and 1 from JSON


def _parse_tuple(x: Any, parse: Callable[[Any], Any], count: int) -> tuple[Any, ...]:
    """Return x as a tuple of `count` values, each converted by `parse`. Raises TypeError, ValueError or KeyError."""
    values = tuple(map(parse, x))
    if len(values) != count:
        raise ValueError
    return values


_EVICTIONS = {x: x for x in get_args(Eviction)}
_INT_FIELDS = ("stages", "consumers", "raster_group", "splits", "cluster_splits")
_BOOL_FIELDS = ("swap_ab", "streaming_stores", "alias_epilogue", "serpentine", "sync_clusters")
_TEXT = re.compile(
    r"(?P<design>\w+) (?P<tile>\d+x\d+x\d+) cluster (?P<cluster>\d+x\d+) stages (?P<stages>\d+) "
    r"consumers (?P<consumers>\d+) raster (?P<raster>[mn])(?P<raster_group>\d+)"
    r"(?: splits (?P<splits>\d+)|(?P<stream_k> stream-K))?(?: cluster splits (?P<cluster_splits>\d+))?"
    r"(?P<swap_ab> swap_ab)?(?: evict (?P<evict>\w+ \w+))?"
    + "".join(f"(?P<{name}> {name})?" for name in _BOOL_FIELDS if name != "swap_ab")
    + r"(?: chip (?P<chip>\w+))?"
)
"""What `Config.__str__` writes; a group is a field."""
_FIELDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "design": (lambda x: get_design(x).name, "the name of a registered design"),
    "chip": (lambda x: get_chip(x).name, "the name of a chip"),
    "tile": (lambda x: _parse_tuple(x, _parse_int, 3), "three integers: M, N and K"),
    "cluster": (lambda x: _parse_tuple(x, _parse_int, 2), "two integers, along M and along N"),
    "raster": ({x: x for x in get_args(Raster)}.__getitem__, "m or n"),
    "evict": (lambda x: _parse_tuple(x, _EVICTIONS.__getitem__, 2), "first, normal or last, one for A and one for B"),
    **dict.fromkeys(_INT_FIELDS, (_parse_int, "an integer")),
    **dict.fromkeys(_BOOL_FIELDS, (_parse_bool, "True or False")),
}
"""By field: the function that parses its value, and the accepted values, for error messages."""


def _parse_field(name: str, value: Any) -> Any:
    """Return the value of the field `name`, converted to the field's type. Raises ConfigError if it cannot be."""
    parse, accepted = _FIELDS[name]
    try:
        return parse(value)
    except ConfigError:
        raise
    except (TypeError, ValueError, KeyError):
        shown = tuple(value) if isinstance(value, list) else value
        raise ConfigError(f"{name}: got {shown!r}; use {accepted}") from None
