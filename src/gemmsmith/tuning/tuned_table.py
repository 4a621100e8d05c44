"""Tables of tuned configs: the built-in one, and the user's, which `tune` writes."""

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
from gemmsmith.backends.cuda.cache import read_regular_file, write_atomically
from gemmsmith.core.check_config import check_config
from gemmsmith.core.chip import HOPPER, Chip
from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import E4M3, E5M2
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.integers import round_up
from gemmsmith.core.problem import Problem
from gemmsmith.tuning.candidates import fits_registers, promotion_leaves_registers, with_aliased_epilogue
from gemmsmith.tuning.choose import choose, estimate_us
from gemmsmith.tuning.config_table import has_l2_reuse, is_single_wave, round_up_m
from gemmsmith.tuning.dtype_equivalence import config_for_16bit, config_for_dtype
from gemmsmith.tuning.gpus import H200, Gpu, find_gpu
from gemmsmith.tuning.l2 import prefers_streaming_stores
from gemmsmith.tuning.model import covers_config
from gemmsmith.tuning.packing_cost import packs_needlessly
from gemmsmith.tuning.stage_count import fit_stages, spec_for

BUILTIN_TABLE_FILE = "tuned.json"
"""File of the built-in table, in this folder, measured on an H200: for 16-bit operands by benchmarks/fit/sweep.py, for
FP8 with block scales the fastest in survey-fp8-layers-h200 and fp8-h200."""
VERSION = 7
"""Version of the user's file, whose configs are a Config's fields. A table of another version counts as empty."""
MAX_MODEL_SLOWDOWN = 1.02
"""Maximum ratio of the model's time for an entry of another layout to its time for its own choice; chosen."""
SHARED_ENTRY_MAX_M = 64
"""Entries with M up to this serve every smaller M, since operands with so few rows have one tile; chosen."""


def operand_class(problem: Problem) -> str:
    """Return the operands that a config is tuned for besides the sizes: "16 bits" or a dtype, and promotion."""
    a = problem.a.dtype
    name = "16 bits" if a.bits == 16 else "fp8" if a in (E4M3, E5M2) else str(a)
    return f"{name}, promoted" if problem.promoted else name


def operand_layout(problem: Problem) -> str:
    """Return the layouts of A and of B: "t" if column-major, else "n"."""
    return "".join("t" if x.is_column_major else "n" for x in (problem.a, problem.b))


class Entry(NamedTuple):
    """A config, and the M, the operand layout and the GPU (None: another one) that it was measured for.

    `us`: its microseconds then; None if the row has none.
    """

    m: int
    config: Config
    layout: str
    gpu: Gpu | None
    us: float | None


class TunedTable:
    """Tuned configs: for each (N, K, operand class, chip) a list of entries, in ascending M."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """Build the table of rows of a file.

        Args:
            rows: Each has m, n, k, config (a Config's fields), and optionally operands (the operand class, default "16
                bits"), layout (default "nt"), gpu (default H200) and us (microseconds).

        Raises:
            KeyError, TypeError, ValueError: A row is malformed.
        """
        self._entries: dict[tuple[int, int, str, str], list[Entry]] = {}
        for row in rows:
            m, n, k = (index(row[name]) for name in "mnk")
            config = Config(**row["config"])
            check_config(config)
            gpu, us = find_gpu(row.get("gpu", H200.name)), row.get("us")
            entry = Entry(m, config, row.get("layout", "nt"), gpu, None if us is None else float(us))
            self._entries.setdefault((n, k, row.get("operands", "16 bits"), config.chip), []).append(entry)
        for entries in self._entries.values():
            entries.sort(key=lambda entry: entry.m)

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def get(self, problem: Problem, chip: Chip = HOPPER, gpu: Gpu = H200) -> Config | None:
        """Return the config of `find`, or None."""
        entry = self.find(problem, chip, gpu)
        return entry.config if entry else None

    def find(self, problem: Problem, chip: Chip = HOPPER, gpu: Gpu = H200) -> Entry | None:
        """Return the entry for the problem's N and K, and for the next M that is not smaller, with its config adapted.

        None if there is none. That M is at most twice the problem's. Entries of the problem's layout on this GPU come
        first, then entries of this layout on other GPUs, then entries of other layouts, if the model rates them about
        as fast as its own choice. A config that does not suit the problem is skipped; with a warning if its design does
        not use wgmma.
        """
        if problem.batch != 1 or not self._entries:
            return None
        entries = self._entries.get((problem.n, problem.k, operand_class(problem), chip.name))
        if entries is None:
            return None
        layout = operand_layout(problem)
        same_layout = [entry for entry in entries if entry.layout == layout]
        for group in ([entry for entry in same_layout if entry.gpu == gpu], same_layout):
            if found := _next_entry(group, problem, gpu):
                return found
        found = _next_entry([entry for entry in entries if entry.layout != layout], problem, gpu)
        return found if found and _model_agrees(found.config, problem, gpu) else None


def _next_entry(entries: list[Entry], problem: Problem, gpu: Gpu) -> Entry | None:
    """Return the entry with the next M that is not smaller, its config adapted to the problem.

    None if that M is more than twice the problem's (and more than SHARED_ENTRY_MAX_M), or if the config does not suit
    the problem. `entries` are in ascending M.
    """
    next_index = bisect_left(entries, problem.m, key=lambda entry: entry.m)
    if next_index == len(entries) or entries[next_index].m > max(2 * problem.m, SHARED_ENTRY_MAX_M):
        return None
    entry = entries[next_index]
    config = entry.config
    if covers_config(config):
        adapted = adapt_config(config, round_up_m(problem), None, gpu)
        return entry._replace(config=adapted) if adapted else None
    try:
        spec_for(config, problem)
    except ConfigError as error:
        _warn_once(f"ignoring tuned config for {operand_class(problem)}, {config}: {error}; tune again")
        return None
    return entry


@lru_cache(maxsize=1024)
def _model_agrees(config: Config, problem: Problem, gpu: Gpu) -> bool:
    """Return whether the model, if it covers a config, rates it about as fast as its own choice."""
    if not covers_config(config):
        return True
    if packs_needlessly(config, problem):
        return False
    chosen_us = estimate_us(problem, choose(problem, gpu=gpu), gpu=gpu)
    return estimate_us(problem, config, gpu=gpu) <= MAX_MODEL_SLOWDOWN * chosen_us


@lru_cache(maxsize=4096)
def adapt_config(
    config: Config, problem: Problem, epilogue: EpilogueSpec | None = None, gpu: Gpu = H200
) -> Config | None:
    """Adapt a plain GEMM's config to other sizes and dtypes and to an epilogue; return None if that fails.

    Options that cannot pay for these sizes are removed: `sync_clusters` of a single wave, `serpentine` too if no wave
    reads again what the L2 holds. `alias_epilogue` and the stages are set as shared memory allows.
    """
    config = config_for_16bit(config, problem.a.dtype)
    streaming = prefers_streaming_stores(problem, epilogue or EpilogueSpec.identity(problem.d), gpu)
    config = config.replace(streaming_stores=streaming) if config.streaming_stores != streaming else config
    try:
        if is_single_wave(config, problem):
            config = config.replace(sync_clusters=False) if config.sync_clusters else config
            config = with_aliased_epilogue(epilogue, config) if epilogue else config
        elif not has_l2_reuse(problem) and (config.sync_clusters or config.serpentine):
            config = config.replace(sync_clusters=False, serpentine=False)
        config = config_for_dtype(config, problem.a.dtype)
        spec = spec_for(config, problem, epilogue)
        return fit_stages(spec) if promotion_leaves_registers(spec) else None
    except ConfigError:
        return None


def find_tuned(problem: Problem, gpu: Gpu = H200) -> Entry | None:
    """Return a plain GEMM's entry: of the user's table, else of the built-in table; None if there is none."""
    return user_table().find(problem, gpu=gpu) or builtin_table().find(problem, gpu=gpu)


def lookup_tuned(problem: Problem, epilogue: EpilogueSpec | None = None, gpu: Gpu = H200) -> Config | None:
    """Look up a tuned config: in the user's table, then in the built-in table; None if there is none.

    A GEMM with an epilogue reuses the plain GEMM's entry if the epilogue fits its registers and stages: in the mean of
    29 single-wave GEMMs it is 1.6 % faster than the model's choice (tries-h200). If need be, tile N is rounded up
    to a multiple of 16 for an epilogue that stores halves of it, as gated activations do. Entries with swap_ab are not
    reused.
    """
    entry = find_tuned(problem, gpu)
    config = entry and entry.config
    if config is None or epilogue is None or epilogue.graph.is_identity:
        return config
    if config.swap_ab:
        return None
    problem = round_up_m(problem)
    (m, n, k), fused = config.tile, adapt_config(config, problem, epilogue, gpu)
    fused = fused or adapt_config(config.replace(tile=(m, round_up(n, 16), k)), problem, epilogue, gpu)
    return fused if fused and fits_registers(fused, epilogue, problem.promoted) else None


def save_tuned(problem: Problem, config: Config, us: float, gpu: str) -> None:
    """Save a config in the user's table, in place of an entry for the same sizes, operands, layout, chip and GPU.

    `us`: its measured microseconds. `gpu`: the device's name. Other processes may save at the same time; the last one
    wins. A folder without write access is no error.
    """
    sizes = {"m": problem.m, "n": problem.n, "k": problem.k}
    key = {**sizes, "operands": operand_class(problem), "layout": operand_layout(problem)}

    def is_replaced(row: dict[str, Any]) -> bool:
        """Return whether a row has the same key, GPU and chip; fields that it does not have are defaults."""
        full = {"operands": "16 bits", "layout": "nt", "gpu": ""} | row
        same_gpu = find_gpu(full["gpu"]) == find_gpu(gpu)
        return same_gpu and full == full | key and row["config"].get("chip", HOPPER.name) == config.chip

    rows = [row for row in _read_rows(_user_table_file()) if not is_replaced(row)]
    rows.append({**key, "config": vars(config), "us": us, "gpu": gpu})
    write_atomically(_user_table_file(), json.dumps({"version": VERSION, "rows": rows}).encode())


def user_table() -> TunedTable:
    """Return the user's table, read again if its file has changed."""
    file = _user_table_file()
    try:
        return _load_table(file, file.stat().st_mtime_ns)
    except OSError:
        return _EMPTY_TABLE


def user_table_bytes() -> bytes:
    """Return the content of the user's table file; empty if there is none."""
    try:
        return read_regular_file(_user_table_file())
    except OSError:
        return b""


@lru_cache(maxsize=4)
def _load_table(file: Path, changed: int) -> TunedTable:
    return TunedTable(_read_rows(file))


def _read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; none if there is no file, if its version differs, or, with a warning, if corrupt."""
    try:
        content = json.loads(read_regular_file(file))
        rows = list(content["rows"]) if content["version"] == VERSION else []
        TunedTable(rows)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        _warn_once(f"ignoring corrupt tuning cache {file}: {why}; delete it to silence this warning")
        return []
    return rows


@lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    """Warn of a file or a row that is ignored, once."""
    warnings.warn(f"gemmsmith: {message}", stacklevel=2)


def _user_table_file() -> Path:
    return _file_in(cache_directory())


@lru_cache(maxsize=16)
def _file_in(folder: Path) -> Path:
    return folder / "tuned.json"


@lru_cache(maxsize=1)
def builtin_table() -> TunedTable:
    """Return the built-in table."""
    file = resources.files("gemmsmith.tuning") / BUILTIN_TABLE_FILE
    return TunedTable(json.loads(file.read_text())["rows"]) if file.is_file() else TunedTable()


_EMPTY_TABLE = TunedTable()
