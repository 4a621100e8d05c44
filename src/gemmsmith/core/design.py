"""Designs: how the warps of a kernel share the work. Each says here what configs it takes; none is known by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gemmsmith.core.chip import Chip
from gemmsmith.core.errors import ConfigError


@dataclass(frozen=True)
class Design:
    """`record(builder, spec)` records the kernel of a `KernelSpec` in the kernel language.

    `multiplies`: its instruction, "wgmma", "mma" or "fma"; `architecture`: the least chip for it, or with an "a" the
    only one.
    `accumulators`: the numbers of math warpgroups that it takes, each with the registers a thread that the accumulator
    may have then. `promoted`: those for both accumulators of promoted sums, if it takes these. `other_warpgroups`:
    those beside the math warpgroups. `own_tiles`: each math warpgroup has a tile of its own; else they share one,
    each its rows, or, `side_by_side`, each its columns.
    `takes`: which of the Config's fields splits, cluster_splits, alias_epilogue and sync_clusters it implements.
    `defaults`: of a Config's fields, where only the design is given. `formerly`: the name that it has in tables which
    were stored before it was renamed.
    """

    name: str
    record: Callable[[Any, Any], None]
    accumulators: Mapping[int, int]
    other_warpgroups: int = 0
    own_tiles: bool = False
    takes: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    formerly: str = ""
    promoted: Mapping[int, int] = field(default_factory=dict)
    multiplies: Literal["wgmma", "mma", "fma"] = "wgmma"
    architecture: str = "sm_90a"
    side_by_side: bool = False

    def warpgroups(self, consumers: int) -> tuple[int, int]:
        """Math warpgroups that share a tile, along M and along N."""
        if self.own_tiles:
            return 1, 1
        return (1, consumers) if self.side_by_side else (consumers, 1)


_DESIGNS: dict[str, Design] = {}


def register_design(design: Design) -> Design:
    """Makes a design known, to `Config(design=...)` for one. ConfigError where its name is taken."""
    if _DESIGNS.setdefault(design.name, design) is not design:
        raise ConfigError(f"design: got {design.name!r}, which is registered already; use another name")
    return design


def find(name: str) -> Design:
    """The design of that name. ConfigError where there is none."""
    if not isinstance(name, str) or name not in _DESIGNS:
        renamed = current_name(name)
        hint = f", which is called {renamed} now" if renamed != name else f"; use {listed(names())}"
        raise ConfigError(f"design: got {name!r}{hint}")
    return _DESIGNS[name]


def current_name(name: str) -> str:
    """The name today of a design that was called so in a stored table."""
    return next((design.name for design in _DESIGNS.values() if name and design.formerly == name), name)


def names() -> list[str]:
    """The names of all designs."""
    return sorted(_DESIGNS)


def taking(option: str) -> str:
    """The designs that implement a Config's field, as an error lists them."""
    return listed(name for name in names() if option in _DESIGNS[name].takes)


def for_chip(chip: Chip) -> list[str]:
    """The designs that run on a chip, those for tensor cores first."""
    found = [name for name in names() if chip.has(_DESIGNS[name].architecture)]
    return sorted(found, key=lambda name: _DESIGNS[name].multiplies == "fma")


def promoting(low_parts: bool) -> str:
    """The designs that promote sums: of 3xTF32, or of FP8, which mma.sync does not multiply."""
    return listed(x for x in names() if _DESIGNS[x].promoted and (low_parts or _DESIGNS[x].multiplies == "wgmma"))


def listed(choices: Iterable[object]) -> str:
    """`a, b or c`."""
    words = [str(x) for x in choices]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
