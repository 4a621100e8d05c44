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
from typing import Any, NamedTuple

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
from gemmsmith.tuning.choose import choose, microseconds
from gemmsmith.tuning.copies import copies_needlessly
from gemmsmith.tuning.depth import for_16_bits, for_operands
from gemmsmith.tuning.fitting import fitting, spec_for
from gemmsmith.tuning.gpus import H200, Gpu, named
from gemmsmith.tuning.l2 import streaming_stores
from gemmsmith.tuning.space import has_one_tile, in_steps, reads_again

SHIPPED = "tuned.json"
"""The package's table, in this folder, all measured on an H200: of 16 bits by benchmarks/sweep.py, of FP8 with block
scales the fastest in benchmarks/results/survey-fp8-layers-h200.json and fp8-h200.json."""
VERSION, READABLE = 6, (1, 2, 3, 4, 5, 6)
"""Of the user's file: its configs are a Config's fields, of which older ones have fewer, and may have other names. Up
to 5 all were for operands of 16 bits."""
AGREED = 1.02
"""How much slower than its own choice the model may say that an entry is which was measured in another layout."""
FEW_ROWS = 64
"""Entries with M up to this serve every smaller M: operands of that many rows take one tile."""


def operands(problem: Problem) -> str:
    """What a config is tuned for besides sizes: operands, those of 16 bits alike, and whether sums are promoted."""
    a = problem.a.dtype
    name = "16 bits" if a.bits == 16 else "fp8" if a in (E4M3, E5M2) else str(a)
    return f"{name}, promoted" if problem.promoted else name


def layout(problem: Problem) -> str:
    """Of A, then of B: "t" if it is column-major, else "n"."""
    return "".join("t" if x.column_major else "n" for x in (problem.a, problem.b))


class Entry(NamedTuple):
    """A config, the M and the layout that it was measured for, and the name of the GPU."""

    m: int
    config: Config
    layout: str
    gpu: str


class Table:
    """Configs by (N, K, operands, chip), and for each by M."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """rows: m, n, k, the `operands`, by default of 16 bits, the `layout`, by default nt, the `gpu`, by default an
        H200, and config, a Config's fields as they are called now or were once. Raises KeyError, TypeError or
        ValueError for others."""
        self._found: dict[tuple[int, int, str, str], list[Entry]] = {}
        for row in rows:
            m, n, k = (index(row[name]) for name in "mnk")
            config = Config.stored(row["config"])
            check(config)
            entry = Entry(m, config, row.get("layout", "nt"), row.get("gpu", H200.name))
            self._found.setdefault((n, k, row.get("operands", "16 bits"), config.chip), []).append(entry)
        for entries in self._found.values():
            entries.sort(key=lambda entry: entry.m)

    def get(self, problem: Problem, chip: Chip = HOPPER, gpu: Gpu = H200) -> Config | None:
        """The chip's config of that N and K and the next M that was tuned, up to twice as many rows: for the problem's
        layout, on this GPU or else on another; or else for another layout, if the model agrees. None where there is
        none, where it is of a wgmma design and does not suit the problem's layouts, and, with a warning, where it is
        of another and does not suit the problem."""
        entries = self._found.get((problem.n, problem.k, operands(problem), chip.name))
        if entries is None or problem.batch != 1:
            return None
        wanted = layout(problem)
        own = [entry for entry in entries if entry.layout == wanted]
        for some in ([entry for entry in own if named(entry.gpu) == gpu], own):
            if found := _next(some, problem, gpu):
                return found
        found = _next([entry for entry in entries if entry.layout != wanted], problem, gpu)
        return found if found and _agreed(found, problem, gpu) else None


def _next(entries: list[Entry], problem: Problem, gpu: Gpu) -> Config | None:
    """The config of the next M, as it suits the problem."""
    index_of_next = bisect_left(entries, problem.m, key=lambda entry: entry.m)
    if index_of_next == len(entries) or entries[index_of_next].m > max(2 * problem.m, FEW_ROWS):
        return None
    found = entries[index_of_next].config
    if find(found.design).multiplies == "wgmma":
        return suited(found, in_steps(problem), None, gpu)
    try:
        spec_for(found, problem)
    except ConfigError as error:
        _passed_over(found, operands(problem), str(error))
        return None
    return found


@lru_cache(maxsize=1024)
def _agreed(config: Config, problem: Problem, gpu: Gpu) -> bool:
    """Whether the model says that a config is about as fast as its own choice. It knows wgmma alone."""
    if find(config.design).multiplies != "wgmma":
        return True
    if copies_needlessly(config, problem):
        return False
    own = choose(problem, gpu=gpu)
    return microseconds(problem, config, gpu=gpu) <= AGREED * microseconds(problem, own, gpu=gpu)


@lru_cache(maxsize=4096)
def suited(config: Config, problem: Problem, epilogue: EpilogueSpec | None = None, gpu: Gpu = H200) -> Config | None:
    """A bare product's config for one that may have an epilogue, other sizes and dtypes: no `sync_clusters` where CTAs
    have one tile, `alias_epilogue` and stages as the results leave room; None where it cannot be."""
    config = for_16_bits(config, problem.a.dtype)
    streaming = streaming_stores(problem, epilogue or EpilogueSpec.bare(problem.d), gpu)
    config = config.replace(streaming_stores=streaming) if config.streaming_stores != streaming else config
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


def tuned(problem: Problem, epilogue: EpilogueSpec | None = None, gpu: Gpu = H200) -> Config | None:
    """The user's config for the bare product, else the package's, else None. A fused one takes it where its epilogue
    leaves that tile room: it is 1.6 % faster than what the model chooses in the mean of 29 products of one tile a CTA
    (tries-h200.json). Tiles whose halves are of no whole 8 columns are widened for an epilogue that stores halves, as
    gated activations do. Where D is computed transposed, the model is used instead."""
    found = kept().get(problem, gpu=gpu) or shipped().get(problem, gpu=gpu)
    if found is None or epilogue is None or epilogue.graph.is_bare:
        return found
    if found.swap_ab:
        return None
    problem = in_steps(problem)
    fused = suited(found, problem, epilogue, gpu) or suited(_in_halves(found), problem, epilogue, gpu)
    return fused if fused and has_room(fused, epilogue, problem.promoted) else None


def _in_halves(config: Config) -> Config:
    """The config with a tile whose halves are whole groups of 8 columns, which a store of 16 bytes takes."""
    m, n, k = config.tile
    return config.replace(tile=(m, -(-n // 16) * 16, k))


def keep(problem: Problem, config: Config, us: float, gpu: str) -> None:
    """Enters a config in the user's table, instead of an older one for the same sizes, layout, chip and row of
    GPUS; other processes may do so too, and the last one wins. A folder that cannot be written to is no error."""
    sizes = {"m": problem.m, "n": problem.n, "k": problem.k, "operands": operands(problem), "layout": layout(problem)}

    def is_older(row: dict[str, Any]) -> bool:
        own = {"operands": "16 bits", "layout": "nt", "gpu": ""} | row
        same_gpu = named(own["gpu"]) == named(gpu)
        return same_gpu and own == own | sizes and row["config"].get("chip", HOPPER.name) == config.chip

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
