"""Tuned configs: those measured on this machine (measured_configs.py), and those of the built-in table."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import resources
from operator import index
from typing import Any, NamedTuple

from gemmsmith.core.check_config import check_config
from gemmsmith.core.chip import HOPPER, Chip
from gemmsmith.core.config import Config
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.problem import Problem
from gemmsmith.core.scalars import round_up
from gemmsmith.tuning import measured_configs
from gemmsmith.tuning.candidates import (
    fit_stages,
    fits_registers,
    promotion_leaves_registers,
    spec_for,
    with_aliased_epilogue,
)
from gemmsmith.tuning.choose import choose, estimates_us
from gemmsmith.tuning.config_table import has_l2_reuse, is_single_wave, round_up_m, with_single_wave_raster
from gemmsmith.tuning.costs import packs_needlessly
from gemmsmith.tuning.dtype_equivalence import config_for_16bit, config_for_dtype
from gemmsmith.tuning.gpus import H200, Gpu, find_gpu
from gemmsmith.tuning.l2 import prefers_streaming_stores
from gemmsmith.tuning.measured_configs import key_of, operand_class, operand_layout
from gemmsmith.tuning.model import covers_config

BUILTIN_TABLE_FILE = "tuned.json"
"""File of the built-in table, in this folder: configs by operand class, N x K and M. They are the fastest on an H200:
for 16-bit operands of benchmarks/fit, for FP8 with block scales of survey-fp8-layers-h200 and fp8-h200."""
MAX_MODEL_SLOWDOWN = 1.02
"""Maximum ratio of the model's time for an entry of another layout to its time for its own choice; and maximum growth
of that ratio from the M that an entry was measured for to another M, or by an epilogue. Chosen."""
SHARED_ENTRY_MAX_M = 64
"""Entries with M up to this serve every smaller M, since operands with so few rows have one tile; chosen."""


class Entry(NamedTuple):
    """A config, and the M, the operand layout and the GPU (None: another one) that it was measured for.

    `us`: its microseconds then; None if they are not known.
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
            rows: Each has m, n, k, config (a Config's text), and optionally operands (the operand class, default "16
                bits"), layout (default "nt") and gpu (default H200).

        Raises:
            KeyError, TypeError, ValueError: A row is malformed.
        """
        self._entries: dict[tuple[int, int, str, str], list[Entry]] = {}
        for row in rows:
            m, n, k = (index(row[name]) for name in "mnk")
            config = Config.parse(row["config"])
            check_config(config)
            entry = Entry(m, config, row.get("layout", "nt"), find_gpu(row.get("gpu", H200.name)), None)
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

        None if there is none. That M is at most twice the problem's, and the model expects no loss by the difference.
        Entries of the problem's layout on this GPU come first, then entries of this layout on other GPUs, then entries
        of other layouts, if the model rates them about as fast as its own choice. A config that does not suit the
        problem is skipped.
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
    the problem. `entries`: in ascending M.
    """
    next_index = bisect_left(entries, problem.m, key=lambda entry: entry.m)
    if next_index == len(entries) or entries[next_index].m > max(2 * problem.m, SHARED_ENTRY_MAX_M):
        return None
    entry = entries[next_index]
    config = serve(entry.config, entry.m, problem, None, gpu)
    return entry._replace(config=config) if config else None


def serve(
    config: Config, measured_m: int, problem: Problem, epilogue: EpilogueSpec | None, gpu: Gpu
) -> Config | None:  # fmt: skip
    """Adapt a config that was measured with `measured_m` rows to a problem with as many, or others.

    None if it cannot compute it, or if the model expects that its time, relative to the model's own choice, grows by
    more than MAX_MODEL_SLOWDOWN from that M to this one: tiles of a wave, or rows of a tile, may be others.
    """
    if not covers_config(config):
        return config
    adapted = adapt_config(config, round_up_m(problem), epilogue, gpu)
    if adapted is None or measured_m == problem.m:
        return adapted
    at_measured_m = _slowdown(config, problem.with_rows(measured_m), epilogue, gpu)
    grows = _slowdown(adapted, round_up_m(problem), epilogue, gpu) > MAX_MODEL_SLOWDOWN * at_measured_m
    return None if grows else adapted


@lru_cache(maxsize=4096)
def _slowdown(config: Config, problem: Problem, epilogue: EpilogueSpec | None, gpu: Gpu) -> float:
    """Return the model's time for a config over its time for its own choice, at least 1."""
    us, own_us = estimates_us(problem, [config, choose(problem, epilogue, gpu=gpu)], epilogue, gpu)
    return max(1.0, us / own_us)


def _model_agrees(config: Config, problem: Problem, gpu: Gpu) -> bool:
    """Return whether the model, if it covers a config, rates it about as fast as its own choice."""
    if not covers_config(config):
        return True
    return not packs_needlessly(config, problem) and _slowdown(config, problem, None, gpu) <= MAX_MODEL_SLOWDOWN


@lru_cache(maxsize=4096)
def adapt_config(
    config: Config, problem: Problem, epilogue: EpilogueSpec | None = None, gpu: Gpu = H200
) -> Config | None:
    """Adapt a plain GEMM's config to other sizes and dtypes and to an epilogue; return None if that fails.

    Options that cannot pay for these sizes are removed: `sync_clusters` of a single wave, `serpentine` too if no wave
    reads again what the L2 holds. `alias_epilogue` and the stages are set as shared memory allows, the raster of a
    single wave by `runs_along_m`.
    """
    config = config_for_16bit(config, problem.a.dtype)
    streaming = prefers_streaming_stores(problem, epilogue or EpilogueSpec.identity(problem.d), gpu)
    config = config.replace(streaming_stores=streaming) if config.streaming_stores != streaming else config
    try:
        if is_single_wave(config, problem, gpu.sms):
            config = config.replace(sync_clusters=False) if config.sync_clusters else config
            config = with_single_wave_raster(config, problem)
            config = with_aliased_epilogue(epilogue, config) if epilogue else config
        elif not has_l2_reuse(problem) and (config.sync_clusters or config.serpentine):
            config = config.replace(sync_clusters=False, serpentine=False)
        config = config_for_dtype(config, problem.a.dtype)
        spec = spec_for(config, problem, epilogue)
        return fit_stages(spec) if promotion_leaves_registers(spec) else None
    except ConfigError:
        return None


def find_tuned(problem: Problem, gpu: Gpu = H200, device: int = 0) -> Entry | None:
    """Return a plain GEMM's entry: one that was measured here, else of the built-in table; None if there is none."""
    found = measured_configs.find(key_of(problem, EpilogueSpec.identity(problem.d)), device)
    if found and (config := serve(found.config, found.m, problem, None, gpu)):
        return _as_entry(found, problem, config)
    return builtin_table().find(problem, gpu=gpu)


def _as_entry(found: measured_configs.Entry, problem: Problem, config: Config) -> Entry:
    """Return a measured config as an entry of a table, with its config adapted to the problem."""
    return Entry(found.m, config, operand_layout(problem), find_gpu(found.gpu), found.us)


def find_entry(problem: Problem, epilogue: EpilogueSpec | None, gpu: Gpu = H200, device: int = 0) -> Entry | None:
    """Return the entry that a GEMM's tuned config is from: its own, else the plain GEMM's; None if there is none."""
    found = epilogue and measured_configs.find(key_of(problem, epilogue), device)
    return _as_entry(found, problem, found.config) if found else find_tuned(problem, gpu, device)


def lookup_tuned(
    problem: Problem, epilogue: EpilogueSpec | None = None, gpu: Gpu = H200, device: int = 0
) -> Config | None:  # fmt: skip
    """Look up a tuned config: measured here, then in the built-in table; None if there is none.

    A GEMM with an epilogue reuses the plain GEMM's entry if the epilogue fits its registers and stages: in the mean of
    29 single-wave GEMMs it is 1.6 % faster than the model's choice (tries-h200). If need be, tile N is rounded up
    to a multiple of 16 for an epilogue that stores halves of it, as gated activations do. Not reused are entries with
    swap_ab, and those that the epilogue slows down, relative to the model's choice, by more than MAX_MODEL_SLOWDOWN.
    """
    entry = find_tuned(problem, gpu, device)
    config = entry and entry.config
    if config is None or epilogue is None or epilogue.graph.is_identity:
        return config
    if config.swap_ab:
        return None
    problem = round_up_m(problem)
    (m, n, k), fused = config.tile, adapt_config(config, problem, epilogue, gpu)
    fused = fused or adapt_config(config.replace(tile=(m, round_up(n, 16), k)), problem, epilogue, gpu)
    if fused is None or not fits_registers(fused, epilogue, problem.promoted):
        return None
    if not covers_config(config):
        return fused
    plain = _slowdown(config, problem, None, gpu)
    return fused if _slowdown(fused, problem, epilogue, gpu) <= MAX_MODEL_SLOWDOWN * plain else None


@lru_cache(maxsize=1)
def builtin_table() -> TunedTable:
    """Return the built-in table."""
    return TunedTable(builtin_rows())


def builtin_rows() -> list[dict[str, Any]]:
    """Return the rows of the built-in table."""
    file = resources.files("gemmsmith.tuning") / BUILTIN_TABLE_FILE
    if not file.is_file():
        return []
    return [
        {"m": int(m), "n": n, "k": k, "operands": operands, "config": config}
        for operands, layers in json.loads(file.read_text())["configs"].items()
        for layer, configs in layers.items()
        for n, k in [map(int, layer.split("x"))]
        for m, config in configs.items()
    ]
