"""Choice of the config of a batch-invariant plan: each row of D is bitwise independent of M and of the other rows.

An element's bits depend only on the order of its K additions. `splits` and `serpentine` make that order depend on M, so
they are excluded. If one CTA accumulates a tile from its first k-tile to its last, the bits do not depend on the order
of the tiles, the cluster, the stages, the tile, the design or the orientation (`swap_ab`): wgmma adds steps of 16 along
K in all of them. tests/gpu/test_invariant.py compares their bits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from gemmsmith.binding.binding import Binding
from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import TF32, DType
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.errors import ArgumentError, ConfigError
from gemmsmith.core.graph import EpilogueGraph, reduced_dims
from gemmsmith.core.make_spec import make_spec
from gemmsmith.core.problem import SCALE_NAMES, Matrix, Problem, Scale
from gemmsmith.epilogue.epilogue_plan import supports_tile_n
from gemmsmith.epilogue.inputs import operand_argument
from gemmsmith.kernels.pack import with_packed_operands
from gemmsmith.tuning.choose import choose
from gemmsmith.tuning.config_table import configs_for_epilogue, is_single_wave
from gemmsmith.tuning.dtype_equivalence import as_16bit_problem, config_for_dtype
from gemmsmith.tuning.gpus import H200, Gpu
from gemmsmith.tuning.l2 import wave_bytes
from gemmsmith.tuning.model import estimate
from gemmsmith.tuning.tuned_table import adapt_config, lookup_tuned

REPRESENTATIVE_M = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Values of M over which the config of an epilogue that reduces along N minimizes the geometric mean of the times;
chosen, not measured."""


def check_batch_invariant(config: Config | None, epilogue: EpilogueSpec) -> None:
    """Check that a config and an epilogue are batch-invariant.

    Raises:
        ConfigError: The config adds along K in an order that depends on M.
        ArgumentError: The epilogue's sums have no fixed order.
    """
    if not epilogue.deterministic:
        raise ArgumentError(
            "deterministic: got False with batch_invariant=True; sums by atomics have no fixed order, use True"
        )
    if config and config.splits != 1:
        raise ConfigError(
            f"splits: got {config.splits} with batch_invariant=True; the split of K would depend on M, "
            "use 1, or cluster_splits"
        )
    if config and config.serpentine:
        raise ConfigError(
            "serpentine: got True with batch_invariant=True; the order along K would depend on M, use False"
        )


def batch_invariant_config(binding: Binding, gpu: Gpu = H200) -> Config:
    """Return the config of a batch-invariant GEMM.

    If the epilogue reduces along N, the tile width decides the order of its sums, so one config, which is not swapped,
    serves all M.
    """
    problem, epilogue = binding.problem, binding.spec
    if not _reduces_within_row(epilogue.graph):
        tuned = lookup_tuned(problem, epilogue, gpu)
        if tuned and tuned.splits == tuned.cluster_splits == 1:
            return tuned.replace(serpentine=False)
        return choose(problem, epilogue, fixed_k_order=True, gpu=gpu)
    b = replace(problem.b, batch=1, batch_stride=0)
    config = _best_config_for_all_m(
        b, problem.d.dtype, problem.accumulator_dtype, problem.promoted, problem.scales[1],
        _worst_case_epilogue(binding), gpu,
    )  # fmt: skip
    # The waves of several tiles are kept in step along K if what they read exceeds the L2; no element's bits change.
    if config.can_sync_clusters and not is_single_wave(config, problem, gpu.sms):
        config = config.replace(sync_clusters=wave_bytes(problem, config, gpu.sms) > gpu.l2_bytes)
    adapted = adapt_config(config, problem, epilogue, gpu) or config
    return adapted.replace(streaming_stores=False, raster=config.raster)  # both are chosen by M


def _reduces_within_row(graph: EpilogueGraph) -> bool:
    """Return whether the epilogue combines several columns of a row."""
    return graph.requires_full_rows or any(
        node.op == "reduce" and "n" in reduced_dims(node.attribute[1]) for node in graph.nodes
    )


def _worst_case_epilogue(binding: Binding) -> EpilogueSpec:
    """Return the epilogue in the form that needs most registers, so that the config does not depend on M.

    At M = 1 strides are ambiguous, so an operand may count as eligible for TMA or as column-major at one M only, and a
    matrix of one row looks like a row broadcast. Here no matrix is eligible for TMA, all are column-major, and
    operands with two dimensions are matrices.
    """
    arguments, graph = binding.arguments, binding.spec.graph
    operands = [
        replace(o, broadcast_dims=o.broadcast_dims._replace(rows_per_value=o.broadcast_dims.row_divisor))
        if o.name not in SCALE_NAMES.values() and len(getattr(arguments[operand_argument(o.name)], "shape", ())) > 1
        else o
        for o in graph.operands
    ]
    spec = replace(binding.spec, graph=replace(graph, operands=tuple(operands)), tma_eligible=frozenset())
    return replace(spec, column_major=frozenset(spec.graph.matrix_names))


@lru_cache(maxsize=1024)
def _best_config_for_all_m(
    b: Matrix, output: DType, accumulator_dtype: DType, promoted: bool, scale_b: Scale | None, epilogue: EpilogueSpec,
    gpu: Gpu,
) -> Config:  # fmt: skip
    """Return the fastest config over REPRESENTATIVE_M, in geometric mean and by the model.

    It suits every layout of A and D, and epilogues whose matrices TMA accesses.
    """

    def problem(m: int) -> Problem:
        a = Matrix(b.dtype, m, b.rows, 1, m)
        d = Matrix(output, m, b.cols, b.cols, 1, alignment=output.bytes)
        is_3xtf32 = promoted and b.dtype == TF32
        return Problem(a, b, d, accumulator_dtype, promoted, (None, scale_b), is_3xtf32=is_3xtf32)

    # Configs and the model are those of 16-bit operands (dtype_equivalence.py).
    all_configs, matrices = (
        configs_for_epilogue(epilogue, promoted, False, gpu.sms),
        frozenset(epilogue.graph.matrix_names),
    )
    problems = [problem(m) for m in REPRESENTATIVE_M]
    is_valid = all_configs.valid_for(as_16bit_problem(problems[-1])) & all_configs.fixed_k_order & ~all_configs.swap_ab
    is_valid &= [supports_tile_n(epilogue.graph, matrices, c.tile[1]) for c in all_configs.configs]
    valid_configs = all_configs.select(np.flatnonzero(is_valid))
    log_cycles = [np.log(estimate(as_16bit_problem(p), valid_configs, epilogue, gpu).cycles) for p in problems]
    for i in np.argsort(np.sum(log_cycles, axis=0), kind="stable"):
        config = config_for_dtype(valid_configs.configs[i], b.dtype)
        try:
            make_spec(with_packed_operands(problems[-1]), config, epilogue)
            return config
        except ConfigError:
            continue
    return config_for_dtype(Config(), b.dtype)
