"""Tables of tuned configs: the package's, and the user's, which `tune` writes."""

from __future__ import annotations

import json
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import resources
from operator import index
from pathlib import Path
from typing import Any

from gemmsmith.backends.cuda.cache import directory as cache_directory
from gemmsmith.backends.cuda.cache import read_whole, write_whole
from gemmsmith.core.chip import HOPPER, Chip
from gemmsmith.core.config import Config
from gemmsmith.core.design import find
from gemmsmith.core.dtypes import E4M3, E5M2
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.problem import Problem
from gemmsmith.core.rules import check
from gemmsmith.core.spec import EpilogueSpec
from gemmsmith.tuning.candidates import has_room, spares, with_reuse_for
from gemmsmith.tuning.depth import for_16_bits, for_operands
from gemmsmith.tuning.fitting import fitting, spec_for
from gemmsmith.tuning.space import has_one_tile, in_steps, reads_again

SHIPPED = "h200.json"
"""The package's table, in this folder: of 16 bits by benchmarks/sweep.py, of FP8 with block scales the fastest in
benchmarks/results/survey-fp8-layers-h200.json and fp8-h200.json."""
VERSION, READABLE = 6, (1, 2, 3, 4, 5, 6)
"""Of the user's file: its configs are a Config's fields, of which older ones have fewer, and may have other names. Up
to 5 all were for operands of 16 bits."""
FEW_ROWS = 64
"""Entries with M up to this serve every smaller M: operands of that many rows take one tile."""


def operands(problem: Problem) -> str:
    """What a config is tuned for besides sizes: operands, those of 16 bits alike, and whether sums are promoted."""
    a = problem.a.dtype
    name = "16 bits" if a.bits == 16 else "fp8" if a in (E4M3, E5M2) else str(a)
    return f"{name}, promoted" if problem.promoted else name


class Table:
    """Configs by (N, K, operands, chip), and for each by M."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """rows: m, n, k, the `operands`, by default of 16 bits, and config, a Config's fields as they are called now or
        were once. Raises KeyError, TypeError or ValueError for others."""
        self._found: dict[tuple[int, int, str, str], list[tuple[int, Config]]] = {}
        for row in rows:
            m, n, k = (index(row[name]) for name in "mnk")
            config = Config.stored(row["config"])
            check(config)
            self._found.setdefault((n, k, row.get("operands", "16 bits"), config.chip), []).append((m, config))
        for entries in self._found.values():
            entries.sort(key=lambda entry: entry[0])

    def get(self, problem: Problem, chip: Chip = HOPPER) -> Config | None:
        """The chip's config of that N and K and the next M that was tuned, up to twice as many rows. None where there
        is none, where it is of a wgmma design and does not suit the problem's layouts, and, with a warning, where it is
        of another and does not suit the problem."""
        entries = self._found.get((problem.n, problem.k, operands(problem), chip.name))
        if entries is None or problem.batch != 1:
            return None
        index_of_next = bisect_left(entries, problem.m, key=lambda entry: entry[0])
        if index_of_next == len(entries) or entries[index_of_next][0] > max(2 * problem.m, FEW_ROWS):
            return None
        found = entries[index_of_next][1]
        if find(found.design).multiplies == "wgmma":
            return suited(found, in_steps(problem))
        try:
            spec_for(found, problem)
        except ConfigError as error:
            _passed_over(found, operands(problem), str(error))
            return None
        return found


@lru_cache(maxsize=4096)
def suited(config: Config, problem: Problem, epilogue: EpilogueSpec | None = None) -> Config | None:
    """A bare product's config for one that may have an epilogue, other sizes and dtypes: no `sync_clusters` where CTAs
    have one tile, `alias_epilogue` and stages as the results leave room; None where it cannot be."""
    config = for_16_bits(config, problem.a.dtype)
    try:
        if has_one_tile(config, problem):
            config = config.replace(sync_clusters=False) if config.sync_clusters else config
            config = with_reuse_for(epilogue, config) if epilogue else config
        elif not reads_again(problem) and (config.sync_clusters or config.serpentine):
            config = config.replace(sync_clusters=False, serpentine=False)
        config = for_operands(config, problem.a.dtype)
        spec = spec_for(config, problem, epilogue)
        return fitting(config, spec) if spares(spec) else None
    except ConfigError:
        return None


def tuned(problem: Problem, epilogue: EpilogueSpec | None = None) -> Config | None:
    """The user's config for the bare product, else the package's, else None. A fused one takes it where its epilogue
    leaves that tile room: it is 1.6 % faster than what the model chooses in the mean of 29 products of one tile a CTA
    (tries-h200.json). Tiles whose halves are of no whole 8 columns are widened for an epilogue that stores halves, as
    gated activations do. Where D is computed transposed, the model is used instead."""
    found = kept().get(problem) or shipped().get(problem)
    if found is None or epilogue is None or epilogue.graph.is_bare:
        return found
    if found.swap_ab:
        return None
    problem = in_steps(problem)
    fused = suited(found, problem, epilogue) or suited(_in_halves(found), problem, epilogue)
    return fused if fused and has_room(fused, epilogue) else None


def _in_halves(config: Config) -> Config:
    """The config with a tile whose halves are whole groups of 8 columns, which a store of 16 bytes takes."""
    m, n, k = config.tile
    return config.replace(tile=(m, -(-n // 16) * 16, k))


def keep(problem: Problem, config: Config, us: float, gpu: str) -> None:
    """Enters a config in the user's table, instead of an older one for the same sizes and chip; other processes may do
    so too, and the last one wins. A folder that cannot be written to is no error."""
    sizes = {"m": problem.m, "n": problem.n, "k": problem.k, "operands": operands(problem)}

    def is_older(row: dict[str, Any]) -> bool:
        return {"operands": "16 bits"} | row == row | sizes and row["config"].get("chip", HOPPER.name) == config.chip

    rows = [row for row in _rows(_kept_file()) if not is_older(row)]
    rows.append({**sizes, "config": vars(config), "us": us, "gpu": gpu})
    write_whole(_kept_file(), json.dumps({"version": VERSION, "rows": rows}).encode())


def kept() -> Table:
    """The user's table, read again if its file has changed."""
    file = _kept_file()
    try:
        return _read(file, file.stat().st_mtime_ns)
    except OSError:
        return _NOTHING


def kept_bytes() -> bytes:
    """The file of the user's table; nothing where there is none."""
    try:
        return read_whole(_kept_file())
    except OSError:
        return b""


@lru_cache(maxsize=4)
def _read(file: Path, changed: int) -> Table:
    return Table(_rows(file))


def _rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a file; an empty list if there is none, if it has another version, or, with a warning, if it is
    damaged."""
    try:
        found = json.loads(read_whole(file))
        rows = list(found["rows"]) if found["version"] in READABLE else []
        Table(rows)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _damaged(file, f"{type(error).__name__}: {error}")
        return []
    return rows


@lru_cache(maxsize=64)
def _damaged(file: Path, why: str) -> None:
    """Warns of a damaged table, once for each file and fault."""
    warnings.warn(f"gemmsmith ignores its table of tuned configs {file} ({why}); mend or delete it", stacklevel=2)


@lru_cache(maxsize=64)
def _passed_over(config: Config, kind: str, why: str) -> None:
    """Warns of a row that does not suit what it is for, once for each."""
    warnings.warn(f"gemmsmith passes over a tuned config for {kind}, {config} ({why}); tune again", stacklevel=2)


def _kept_file() -> Path:
    return _file_in(cache_directory())


@lru_cache(maxsize=16)
def _file_in(folder: Path) -> Path:
    return folder / "tuned.json"


@lru_cache(maxsize=1)
def shipped() -> Table:
    """The package's table."""
    file = resources.files("gemmsmith.tuning") / SHIPPED
    return Table(json.loads(file.read_text())["rows"]) if file.is_file() else Table()


_NOTHING = Table()
