"""Learned correction of the cost model: ridge regression on nine features of a config and their products.

An estimate is multiplied by exp(x^T C x + c^T x). benchmarks/fit/fit.py --correction fits the coefficients and writes
them to correction.json: to the GEMMs of survey-h200 and survey-??-h100 that are not power-limited, to the power-limited
ones of the third, fourth, fifth, seventh and eighth sweep, and to sweep-layouts-h100 and sweep-choice-h100.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from gemmsmith.core.problem import Problem
from gemmsmith.tuning.config_table import Array, ConfigTable
from gemmsmith.tuning.model import Estimate

COEFFICIENTS_FILE = Path(__file__).parent / "correction.json"
MAX_LOG_CORRECTION = 0.2
"""Maximum absolute logarithm of a correction, since a shape may be unlike all measured ones; chosen, not measured."""
FEATURE_NAMES = (
    "rows per warpgroup", "tile N", "tile per warpgroup", "swapped: tiles along M", "CTAs that share B",
    "CTAs that share A", "tiles along M", "copies / k-tile", "power / cycles",
)  # fmt: skip
"""The nine features. A, B and M are the problem's, also with swap_ab; all but the third are logarithms."""
FEATURE_PAIRS = np.triu_indices(len(FEATURE_NAMES))


def features(problem: Problem, table: ConfigTable, estimate: Estimate) -> Array:
    """Return the nine features of each config and all pairwise products, squares included: (configs, 54)."""
    warpgroups = np.where(table.tile_per_warpgroup, 1, table.consumers)
    log2_tiles_m = np.log2(np.maximum(1, np.ceil(problem.m / np.where(table.swap_ab, table.tile_n, table.tile_m))))
    x = np.stack([
        np.log2(table.tile_m / warpgroups / 64), np.log2(table.tile_n / 128), table.tile_per_warpgroup,
        table.swap_ab * log2_tiles_m,
        np.log2(np.where(table.swap_ab, table.cluster_shape_n, table.cluster_shape_m)),
        np.log2(np.where(table.swap_ab, table.cluster_shape_m, table.cluster_shape_n)),
        log2_tiles_m, np.log(estimate.copy_cycles / estimate.k_tile_cycles),
        np.log(estimate.power_limited_cycles / estimate.cycles),
    ], axis=1)  # fmt: skip
    i, j = FEATURE_PAIRS
    return np.concatenate([x, x[:, i] * x[:, j]], axis=1)


def corrected_cycles(problem: Problem, table: ConfigTable, estimate: Estimate) -> Array:
    """Return the corrected cycles of each config.

    Only GEMMs of 16-bit operands are corrected, since the correction was fitted to nothing else.
    """
    if problem.a.dtype.bits != 16 or problem.promoted or 0 in (problem.batch, problem.m, problem.n, problem.k):
        return estimate.cycles
    return np.asarray(
        estimate.cycles
        * np.exp(np.clip(features(problem, table, estimate) @ coefficients(), -MAX_LOG_CORRECTION, MAX_LOG_CORRECTION))
    )


@cache
def coefficients() -> np.ndarray[Any, Any]:
    """Return one coefficient per feature."""
    return np.array(json.loads(COEFFICIENTS_FILE.read_text()))
