"""Configs that were measured on a GPU: a JSON file for each problem, which `tune` and `autotune` write, and plans read.

The files are in the folder `tuned` of the cache folder, in a folder for each combination of what makes times differ:
GPU, driver, compiler, version of the library. A file that cannot be read counts as missing. GEMMSMITH_TABLE names
exported tables, which serve what has no file.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import warnings
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from gemmsmith.backends.cuda import driver
from gemmsmith.backends.cuda.cache import directory as cache_directory
from gemmsmith.backends.cuda.cache import read_regular_file, write_atomically
from gemmsmith.backends.cuda.compiler import nvrtc_version
from gemmsmith.core.check_config import check_config
from gemmsmith.core.chip import HOPPER, Chip
from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import E4M3, E5M2, FP16, INT8
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.errors import ArgumentError, GemmsmithError
from gemmsmith.core.problem import Problem
from gemmsmith.core.scalars import round_up
from gemmsmith.core.version import __version__

_LOGGER = logging.getLogger("gemmsmith")
FORMAT = 1
"""Version of the files. Files of another version count as missing."""
FINE_BUCKETS, FINE_STEP = range(65, 513), 64
"""Rows between which M has a bucket for every FINE_STEP rows, since one tile more or less matters most there; elsewhere
buckets are powers of two. Chosen, not measured."""


def operand_class(problem: Problem) -> str:
    """Return the operands that a config is tuned for besides the sizes: "16 bits" or a dtype, and promotion."""
    a = problem.a.dtype
    name = "16 bits" if a.bits == 16 else "fp8" if a in (E4M3, E5M2) else str(a)
    return f"{name}, promoted" if problem.promoted else name


def operand_layout(problem: Problem) -> str:
    """Return the layouts of A and of B: "t" if column-major, else "n"."""
    return "".join("t" if x.is_column_major else "n" for x in (problem.a, problem.b))


def bucket(m: int) -> int:
    """Return the most rows of the problems that share a measurement with one of m rows."""
    return round_up(m, FINE_STEP) if m in FINE_BUCKETS else 1 << max(0, m - 1).bit_length()


class Key(NamedTuple):
    """What a config is measured for.

    Attributes:
        m: The most rows (`bucket`).
        operands: The operand class; whether fp16 is summed in fp16; the granularity of block scales.
        layout: The layouts of A, B and D ("t": column-major; with an asterisk if TMA cannot access it).
        epilogue: A digest of the epilogue; empty for the plain GEMM, whose D has the default dtype's bits.
        groups: The number and kind of the groups; empty if there are none.
        batch_invariant: Whether rows must not depend on M.
    """

    m: int
    n: int
    k: int
    batch: int
    operands: str
    layout: str
    epilogue: str
    groups: str
    batch_invariant: bool
    chip: str

    @property
    def name(self) -> str:
        """The name of the entry's file, without a suffix."""
        return hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:32]

    @property
    def plain(self) -> Key:
        """The key of the GEMM without its epilogue and its scales."""
        return self._replace(epilogue="", operands=self.operands.partition(", scales")[0], batch_invariant=False)


def key_of(problem: Problem, epilogue: EpilogueSpec, chip: Chip = HOPPER, batch_invariant: bool = False) -> Key:
    """Return the key of a GEMM and its epilogue, in the caller's orientation."""
    operands = operand_class(problem)
    if problem.accumulator_dtype == FP16:
        operands += ", fp16 sums"
    if any(problem.scales):
        operands += ", scales of {} and {}".format(*(x.granularity if x else 0 for x in problem.scales))
    layout = "".join(
        ("t" if x.is_column_major else "n") + "*" * (not x.is_tma_compatible) for x in (problem.a, problem.b, problem.d)
    )
    groups = f"{problem.groups} groups, {problem.grouping}" if problem.grouping else ""
    plain_bits = 32 if problem.a.dtype == INT8 else max(16, problem.a.dtype.bits)
    is_plain = epilogue.graph.is_identity and problem.d.dtype.bits == plain_bits
    digest = "" if is_plain else _digest(epilogue)
    m, n, k = bucket(problem.m), problem.n, problem.k
    return Key(m, n, k, problem.batch, operands, layout, digest, groups, batch_invariant, chip.name)


@lru_cache(maxsize=1024)
def _digest(epilogue: EpilogueSpec) -> str:
    """Return a digest of an epilogue that is the same in every process: sets are sorted."""
    parts = (
        epilogue.graph, sorted(epilogue.tma_eligible), sorted(epilogue.column_major), epilogue.fast_math,
        epilogue.deterministic,
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


class Entry(NamedTuple):
    """A measured config: for which key, with how many rows, its microseconds per GEMM, and the GPU's name."""

    key: Key
    m: int
    config: Config
    us: float
    gpu: str

    def to_json(self) -> dict[str, Any]:
        """Return the entry for JSON."""
        return {
            "format": FORMAT, "key": self.key._asdict(), "m": self.m, "config": str(self.config), "us": self.us,
            "gpu": self.gpu,
        }  # fmt: skip

    @staticmethod
    def from_json(row: Any) -> Entry:
        """Return the entry. Raises ValueError, KeyError, TypeError or ConfigError if it is malformed."""
        if row["format"] != FORMAT:
            raise ValueError(f"format {row['format']}, not {FORMAT}")
        config = Config.parse(row["config"])
        check_config(config)
        key = Key(**row["key"])
        if not all(type(x) is kind for x, kind in zip(key, _KEY_TYPES, strict=True)) or type(row["m"]) is not int:
            raise TypeError("a field of the key has another type")
        return Entry(key, row["m"], config, float(row["us"]), str(row["gpu"]))


_KEY_TYPES = int, int, int, int, str, str, str, str, bool, str
_MALFORMED = OSError, ValueError, KeyError, TypeError, RecursionError, GemmsmithError


def folder(device: int = 0) -> Path | None:
    """Return the folder of the entries that were measured on a device like this one; None if there is no GPU."""
    return _folder(cache_directory(), device) if driver.is_available() else None


@lru_cache(maxsize=64)
def _folder(cache: Path, device: int) -> Path:
    return cache / "tuned" / _generation(device)


@lru_cache(maxsize=64)
def _generation(device: int) -> str:
    """Return a digest of what makes times differ."""
    return hashlib.sha256(json.dumps(_about(device)).encode()).hexdigest()[:16]


def _about(device: int) -> dict[str, Any]:
    """Return what makes times differ, by name."""
    gpu = driver.device_attributes(device)
    versions = {"driver": driver.driver_version(), "nvrtc": nvrtc_version(), "gemmsmith": __version__, "format": FORMAT}
    return {"gpu": gpu.name, "sms": gpu.sm_count, **versions}


_SAVED: dict[tuple[Path, Key], Entry] = {}
"""Entries that this process has saved, so that they serve it even if the folder cannot be written."""
_SAVES = itertools.count(1)
_last_save = 0


def save(entries: Iterable[Entry], device: int = 0) -> None:
    """Save entries of a device in place of those with the same keys.

    Other processes may save at the same time; the last one wins. A folder that cannot be written is no error.
    """
    global _last_save
    into = folder(device)
    if into is None:
        return
    for entry in entries:
        _SAVED[into, entry.key] = entry
        write_atomically(into / f"{entry.key.name}.json", json.dumps(entry.to_json()).encode())
    _last_save = next(_SAVES)
    if not (about := into / "about.json").exists():
        write_atomically(about, json.dumps(_about(device)).encode())


def find(key: Key, device: int = 0) -> Entry | None:
    """Return the entry of a key: of this device, or of a table that GEMMSMITH_TABLE names; None if there is none."""
    if (within := folder(device)) is not None:
        if saved := _SAVED.get((within, key)):
            return saved
        try:
            entry = Entry.from_json(json.loads(read_regular_file(within / f"{key.name}.json")))
            if entry.key == key:
                return entry
        except FileNotFoundError:
            pass
        except _MALFORMED as error:
            _LOGGER.info("ignoring %s: %s", within / f"{key.name}.json", error)
    if tables := os.environ.get("GEMMSMITH_TABLE"):
        gpu = driver.device_attributes(device).name if driver.is_available() else None
        for name in tables.split(os.pathsep):
            for entry in _table(Path(name)).get(key, ()):
                if gpu in (None, entry.gpu):
                    return entry
    return None


def entries(device: int = 0) -> list[Entry]:
    """Return the entries in a device's folder, by name of their files; those that cannot be read are left out."""
    within, result = folder(device), []
    for file in sorted(within.glob("*.json")) if within else ():
        try:
            result.append(Entry.from_json(json.loads(read_regular_file(file))))
        except _MALFORMED:  # about.json, too
            continue
    return result


def read_table(file: Path) -> list[Entry]:
    """Return the entries of an exported table. Raises ArgumentError if it is not one."""
    try:
        return [Entry.from_json(row) for row in json.loads(read_regular_file(file))["entries"]]
    except _MALFORMED as error:
        why = f"{type(error).__name__}: {error}"
        raise ArgumentError(f"{file}: {why}; use a table that `gemmsmith table export` has written") from None


def write_table(file: Path, rows: Sequence[Entry]) -> None:
    """Write entries to a file that `read_table` reads, an entry a line. Raises OSError."""
    lines = ",\n".join(json.dumps(entry.to_json()) for entry in rows)
    file.write_text(f'{{"entries": [\n{lines}\n]}}\n')


def _table(file: Path) -> dict[Key, list[Entry]]:
    """Return the entries of a table by key, one for each GPU; none, with a warning, if the file is no table.

    It is read again if it has changed.
    """
    try:
        return _read_once(file, file.stat().st_mtime_ns)
    except OSError as error:
        _warn_once(f"ignoring GEMMSMITH_TABLE: {error}")
        return {}


@lru_cache(maxsize=16)
def _read_once(file: Path, changed: int) -> dict[Key, list[Entry]]:
    """Return the entries of a file that was changed then."""
    try:
        by_key: dict[Key, list[Entry]] = {}
        for entry in read_table(file):
            by_key.setdefault(entry.key, []).append(entry)
        return by_key
    except ArgumentError as error:
        _warn_once(f"ignoring GEMMSMITH_TABLE: {error}")
        return {}


@lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    warnings.warn(f"gemmsmith: {message}", stacklevel=2)


def version(device: int = 0) -> tuple[Hashable, ...]:
    """Return a value that changes if an entry that `find` returns is added or replaced."""
    tables = os.environ.get("GEMMSMITH_TABLE")
    files = tables.split(os.pathsep) if tables else []
    within = folder(device)
    changed = [_changed(x) for x in (*files, *([f"{within}"] if within else []))]
    return f"{within}", _last_save, tables, *changed


def _changed(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def state() -> bytes:
    """Return what changes if an entry or a table is added or replaced, for keys of caches of compiled graphs."""
    names = (os.environ.get("GEMMSMITH_TABLE") or "").split(os.pathsep)
    files = [Path(name) for name in names if name]
    if within := folder():
        files += sorted(within.glob("*.json"))
    return repr([(str(x), x.stat().st_mtime_ns) for x in files if x.exists()]).encode()
