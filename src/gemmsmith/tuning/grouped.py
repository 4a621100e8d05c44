"""Choice of a config for a grouped GEMM: that of a batch of equal groups, as far as it can compute groups.

The table is on the device, so the choice may depend on the number of rows and of groups only.
"""

from __future__ import annotations

from dataclasses import replace

from gemmsmith.binding.bind import Binding
from gemmsmith.core.chip import Chip
from gemmsmith.core.config import Config
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.integers import ceil_div
from gemmsmith.core.problem import Problem
from gemmsmith.tuning.choose import rank_configs
from gemmsmith.tuning.choose_sm80 import rank_sm80
from gemmsmith.tuning.gpus import Gpu
from gemmsmith.tuning.model import covers
from gemmsmith.tuning.stage_count import fit_stages

MAX_CONFIGS = 256
"""Configs that are ranked, of which the first that can compute groups is taken."""


def choose_grouped(binding: Binding, chip: Chip, gpu: Gpu) -> tuple[Config, str]:
    """Return a config and its origin. Raises ConfigError if there is none."""
    problem, grouping = equal_groups(binding.problem), binding.problem.grouping
    if covers(problem.a.dtype, chip):
        ranked, origin = (
            rank_configs(problem, binding.spec, MAX_CONFIGS, gpu=gpu),
            "chosen by the model for equal groups",
        )
    else:
        ranked, origin = rank_sm80(problem, binding.spec, chip), f"chosen for {chip} and equal groups"
    rejection = ConfigError("config: no config can compute this grouped GEMM")
    for config in ranked:
        if config.splits != 1 or config.cluster_splits != 1:
            continue
        plain = config.replace(serpentine=False, sync_clusters=False)
        if grouping and grouping.along == "k":
            plain = plain.replace(alias_epilogue=False)
        try:
            spec = (binding.transposed() if plain.swap_ab else binding).kernel_spec(plain)
            fitted = fit_stages(spec)
            if fitted.stages > 2:
                return fitted, origin
        except ConfigError as error:
            rejection = error
    raise rejection


def equal_groups(p: Problem) -> Problem:
    """Return the batched product of groups of equal sizes."""
    grouping, groups = p.grouping, p.groups
    assert grouping
    if grouping.along == "m" and grouping.role == "b":
        return equal_groups(p.T).T
    a, b, d = p.a, p.b, p.d
    if grouping.along == "k":
        k = ceil_div(p.k, groups)
        a = replace(a, cols=k, batch=groups, batch_stride=k * a.col_stride)
        b = replace(b, rows=k, batch=groups, batch_stride=k * b.row_stride)
    elif not grouping.is_masked:
        m = ceil_div(p.m, groups)
        a = replace(a, rows=m, batch=groups, batch_stride=m * a.row_stride)
        d = replace(d, rows=m, batch=groups, batch_stride=m * d.row_stride)
    return replace(p.with_matrices(a, b, d, p.scales), extents=None, grouping=None, groups=0)
