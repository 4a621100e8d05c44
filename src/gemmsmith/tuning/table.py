"""Tuned configs: measured once for a shape, and kept."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import resources
from typing import Any

from gemmsmith.core.config import Config
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import EpilogueSpec, KernelSpec
from gemmsmith.tuning.choose import stages_that_fit

SHIPPED = "h200.json"
"""Beside this file; made by benchmarks/sweep.py."""
FEW_ROWS = 64
"""Up to here, M changes little: operands of that many rows take one tile."""


class Table:
    """Configs by (N, K), and M within."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """rows: m, n, k and config, a Config's fields."""
        self._found: dict[tuple[int, int], list[tuple[int, Config]]] = {}
        for row in rows:
            fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in row["config"].items()}
            self._found.setdefault((row["n"], row["k"]), []).append((row["m"], Config(**fields)))
        for entries in self._found.values():
            entries.sort(key=lambda entry: entry[0])

    def get(self, problem: Problem, epilogue: EpilogueSpec | None = None) -> Config | None:
        """The config of that N and K and the next M that was tuned, up to twice as many rows; None where there is none
        or it does not suit the problem's layouts and epilogue."""
        entries = self._found.get((problem.n, problem.k))
        if entries is None or problem.batch != 1:
            return None
        place = bisect_left(entries, problem.m, key=lambda entry: entry[0])
        if place == len(entries) or entries[place][0] > max(2 * problem.m, FEW_ROWS):
            return None
        return suited(entries[place][1], problem, epilogue)


def suited(config: Config, problem: Problem, epilogue: EpilogueSpec | None) -> Config | None:
    """A config with as many stages as the epilogue leaves room for; None where it cannot be."""
    epilogue = epilogue or EpilogueSpec.bare(problem.d)
    if config.swap and not epilogue.graph.turns:
        return None
    try:
        most = stages_that_fit(config.tile, epilogue, config.consumers, most=config.stages)
        config = config.replace(stages=min(config.stages, most))
        KernelSpec.of(problem.T if config.swap else problem, config, None if config.swap else epilogue)
    except ConfigError:
        return None
    return config


@lru_cache(maxsize=1)
def shipped() -> Table:
    """The package's own."""
    file = resources.files("gemmsmith.tuning") / SHIPPED
    return Table(json.loads(file.read_text())["rows"]) if file.is_file() else Table()
