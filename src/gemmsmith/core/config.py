"""Config: the choices of a kernel that do not depend on the problem, and are constant in its code."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal, get_args

from gemmsmith.core.chip import HOPPER, find_chip
from gemmsmith.core.design import current_name, find
from gemmsmith.core.errors import ConfigError

Eviction = Literal["first", "normal", "last"]
Raster = Literal["m", "n"]
FORMERLY = {"swap": "swap_ab", "swizzle": "raster_group", "reuse": "alias_epilogue", "lockstep": "sync_clusters"}
"""What fields were called in tables that are stored."""


@dataclass(frozen=True)
class Config:
    """The choices of a kernel.

    design: how the kernel's warps share the work; the name of a registered `Design`.
    tile: M, N, K of a CTA's tile. cluster: CTAs along M and along N. stages: of the pipeline of A and B.
    consumers: math warpgroups. Each takes tile M / consumers rows, a multiple of 64; with pingpong, a tile of its own.
    raster: the index ("m" or "n") along which consecutive tiles run. raster_group: the width, in tiles of the other
    index, of the band in which they run (CUTLASS: max_swizzle_size).
    splits: clusters that share the K of a tile (split-K), 1 by default; 0: all clusters get equal shares of the tiles
    that would not fill a last wave (stream-K).
    cluster_splits: CTAs of a cluster that share the K of a tile and add up their sums in shared memory.
    swap_ab: computes D^T = B^T @ A^T, so that a tile's N counts rows of A; for problems with few rows.
    evict: the L2's eviction policies for the kernel's reads of A and B.
    streaming_stores: TMA stores have the L2 evict first what they write: for results larger than it.
    pdl: programmatic dependent launch. The kernel starts while the stream's last one ends, and lets the next one do so.
    alias_epilogue: the epilogue's buffers lie over the stages of A and B, which makes room for more stages; copies of
    the next tile wait until they are empty (CUTLASS: ReuseSmemC).
    serpentine: every other tile of a CTA is summed from its last k-tile to its first, for more hits in the L2.
    sync_clusters: clusters wait for one another every few k-tiles, so that they read the same data at the same time.
    chip: what the kernel is compiled for, by the name of its compute capability.

    Raises ConfigError for a value of the wrong type.
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
    pdl: bool = False
    alias_epilogue: bool = False
    serpentine: bool = False
    sync_clusters: bool = False
    chip: str = HOPPER.name

    def __new__(cls, *_: object, **fields: object) -> Config:
        for name in FORMERLY.keys() & fields.keys():
            raise ConfigError(f"{name}: this field is called {FORMERLY[name]} now")
        for name in fields.keys() - _FIELDS.keys():
            near = get_close_matches(name, _FIELDS, 1)
            raise ConfigError(f"{name}: a Config has no such field; use {near[0] if near else ', '.join(_FIELDS)}")
        return super().__new__(cls)

    @staticmethod
    def stored(fields: Mapping[str, Any]) -> Config:
        """From a table's row, which may have the names that designs and fields had when it was stored."""
        found = {FORMERLY.get(name, name): x for name, x in dict(fields).items()}
        if "design" in found:
            found["design"] = current_name(found["design"])
        return Config(**found)

    def __post_init__(self) -> None:
        for name in _FIELDS:
            object.__setattr__(self, name, _read(name, getattr(self, name)))

    @property
    def warpgroups(self) -> tuple[int, int]:
        """Math warpgroups that share a tile, along M and along N."""
        return find(self.design).warpgroups(self.consumers)

    @property
    def can_sync_clusters(self) -> bool:
        """Whether it may have `sync_clusters`: its design implements it, and clusters have whole tiles."""
        return "sync_clusters" in find(self.design).takes and self.splits == self.cluster_splits == 1

    def replace(self, **changes: Any) -> Config:
        """A copy with some choices changed."""
        if not changes.keys() <= _FIELDS.keys():
            return replace(self, **changes)  # which raises
        copy = object.__new__(Config)  # what it keeps has been read: a choice is among thousands of copies
        copy.__dict__.update(self.__dict__, **{name: _read(name, given) for name, given in changes.items()})
        return copy

    def __str__(self) -> str:
        tile, cluster = "x".join(map(str, self.tile)), "x".join(map(str, self.cluster))
        return (
            f"{self.design} {tile} cluster {cluster} stages {self.stages} "
            f"consumers {self.consumers} raster {self.raster}{self.raster_group}"
            + {1: "", 0: " stream-K"}.get(self.splits, f" splits {self.splits}")
            + f" cluster splits {self.cluster_splits}" * (self.cluster_splits > 1)
            + " swap_ab" * self.swap_ab
            + f" evict {' '.join(self.evict)}" * (self.evict != ("normal", "normal"))
            + " streaming_stores" * self.streaming_stores
            + " pdl" * self.pdl
            + " alias_epilogue" * self.alias_epilogue
            + " serpentine" * self.serpentine
            + " sync_clusters" * self.sync_clusters
            + f" chip {self.chip}" * (self.chip != HOPPER.name)
        )


def _integer(x: Any) -> int:
    if isinstance(x, bool):
        raise TypeError
    return operator.index(x)


def _switch(x: Any) -> bool:
    return x if isinstance(x, bool) else {0: False, 1: True}[x]  # numpy's bools, and JSON that has numbers


def _several(x: Any, read: Callable[[Any], Any], count: int) -> tuple[Any, ...]:
    found = tuple(map(read, x))
    if len(found) != count:
        raise ValueError
    return found


_EVICTIONS = {x: x for x in get_args(Eviction)}
_INTEGERS = ("stages", "consumers", "raster_group", "splits", "cluster_splits")
_SWITCHES = ("swap_ab", "streaming_stores", "pdl", "alias_epilogue", "serpentine", "sync_clusters")
_FIELDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "design": (lambda x: find(x).name, "a design that is registered"),
    "chip": (lambda x: find_chip(x).name, "the name of a chip"),
    "tile": (lambda x: _several(x, _integer, 3), "three integers, for M, N and K"),
    "cluster": (lambda x: _several(x, _integer, 2), "two integers, along M and along N"),
    "raster": ({x: x for x in get_args(Raster)}.__getitem__, "m or n"),
    "evict": (lambda x: _several(x, _EVICTIONS.__getitem__, 2), "first, normal or last, one for A and one for B"),
    **dict.fromkeys(_INTEGERS, (_integer, "an integer")),
    **dict.fromkeys(_SWITCHES, (_switch, "True or False")),
}
"""For each field the function that reads its value, and the values that it takes, for error messages."""


def _read(name: str, given: Any) -> Any:
    """A field's value, which may have been given as another type."""
    read, wanted = _FIELDS[name]
    try:
        return read(given)
    except ConfigError:
        raise
    except (TypeError, ValueError, KeyError):
        shown = tuple(given) if isinstance(given, list) else given
        raise ConfigError(f"{name}: got {shown!r}; use {wanted}") from None
