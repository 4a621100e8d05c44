"""The config of a batch-invariant plan: a row of D has the same bits whatever M is, and whatever other rows hold.

What decides an element's bits is the order in which its k products are added. A share of K (`splits`) changes with the
number of tiles, and `serpentine` with the tile's number in its CTA: neither is used. Where one CTA sums a tile from its
first k-tile to its last, the order of the tiles, clusters, stages and waits do not matter, nor do the tile, the design
and the orientation (`swap_ab`): wgmma walks K in steps of 16 in all of them. tests/gpu/test_invariant.py compares their
bits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from gemmsmith.binding import Binding
from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import TF32, DType
from gemmsmith.core.errors import ArgumentError, ConfigError
from gemmsmith.core.graph import Graph, over
from gemmsmith.core.problem import SCALE_NAMES, Matrix, Problem, Scale
from gemmsmith.core.spec import EpilogueSpec, KernelSpec
from gemmsmith.epilogue.device.inputs import operand_argument
from gemmsmith.epilogue.device.layout import suits
from gemmsmith.kernels.pack import packed
from gemmsmith.tuning.choose import choose
from gemmsmith.tuning.correction import corrected
from gemmsmith.tuning.depth import for_operands, in_16_bits
from gemmsmith.tuning.gpus import H200, Gpu
from gemmsmith.tuning.l2 import wave_bytes
from gemmsmith.tuning.model import estimate
from gemmsmith.tuning.space import has_one_tile, space
from gemmsmith.tuning.table import suited, tuned

ROWS = (128, 256, 512, 1024, 2048, 4096, 8192)
"""The M over which the one config of a reduction of rows is the fastest in geometric mean."""


def refuse(config: Config | None, epilogue: EpilogueSpec) -> None:
    """Raises ConfigError for a config whose rows depend on M, ArgumentError for sums in no fixed order."""
    if epilogue.atomic:
        raise ArgumentError("atomic: got True with batch_invariant=True; atomic sums have no fixed order, use False")
    if config and config.splits != 1:
        raise ConfigError(
            f"splits: got {config.splits} with batch_invariant=True; which CTA sums which share of K depends on M, "
            "use 1, or cluster_splits"
        )
    if config and config.serpentine:
        raise ConfigError(
            "serpentine: got True with batch_invariant=True; which tiles are summed backwards depends on M, use False"
        )


def invariant(binding: Binding, gpu: Gpu = H200) -> Config:
    """The config of a product that is computed in the orientation of its D. A reduction of rows adds up the columns of
    a tile, then the tiles: it has one config for all M."""
    problem, epilogue = binding.problem, binding.spec
    if not _combines_columns(epilogue.graph):
        found = tuned(problem, epilogue, gpu)
        if found and found.splits == found.cluster_splits == 1:
            return found.replace(serpentine=False)
        return choose(problem, epilogue, in_order=True, gpu=gpu)
    b = replace(problem.b, batch=1, batch_stride=0)
    sums = problem.accumulate, problem.promoted, problem.scales[1]
    config = _one_for_all(b, problem.d.dtype, sums, _worst(binding), gpu)
    if config.can_sync_clusters and not has_one_tile(config, problem):
        config = config.replace(sync_clusters=wave_bytes(problem, config) > gpu.l2_bytes)
    found = suited(config, problem, epilogue, gpu) or config
    return found.replace(streaming_stores=False)  # which depends on M


def _combines_columns(graph: Graph) -> bool:
    """Whether a value of a row is made of several columns."""
    return graph.takes_whole_rows or any(node.op == "reduce" and "n" in over(node.value[1]) for node in graph.nodes)


def _worst(binding: Binding) -> EpilogueSpec:
    """The epilogue as it takes the most registers: what TMA reaches, how a matrix lies, and whether an operand of two
    dimensions is a row or a matrix (scales never are) may be another for M = 1."""
    arguments, graph = binding.arguments, binding.spec.graph
    operands = [
        replace(o, extent=o.extent._replace(height=max(o.extent.height, 1)))
        if o.name not in SCALE_NAMES and len(getattr(arguments[operand_argument(o.name)], "shape", ())) > 1
        else o
        for o in graph.operands
    ]
    spec = replace(binding.spec, graph=replace(graph, operands=tuple(operands)), tma=frozenset())
    return replace(spec, column_major=frozenset(spec.graph.matrices))


@lru_cache(maxsize=1024)
def _one_for_all(
    b: Matrix, output: DType, sums: tuple[DType, bool, Scale | None], epilogue: EpilogueSpec, gpu: Gpu
) -> Config:
    """The config that is the fastest on a GPU for ROWS rows, in geometric mean and by the model. It suits every layout
    of A and D, and epilogues whose matrices TMA reaches. `sums`: their dtype, whether they are promoted, and B's
    scales."""
    accumulate, promoted, of_b = sums

    def problem(rows: int) -> Problem:
        a = Matrix(b.dtype, rows, b.rows, 1, rows)
        d = Matrix(output, rows, b.cols, b.cols, 1, alignment=output.bytes)
        return Problem(a, b, d, accumulate, promoted, (None, of_b), low_parts=promoted and b.dtype == TF32)

    every, matrices = space(epilogue, promoted), frozenset(epilogue.graph.matrices)
    widths = {n: suits(epilogue.graph, matrices, int(n)) for n in set(every.n.tolist())}
    problems = [problem(rows) for rows in ROWS]
    good = (
        every.sensible(in_16_bits(problems[-1]))
        & every.in_order
        & ~every.swap_ab
        & [widths[n] for n in every.n.tolist()]
    )
    some = every.take(np.flatnonzero(good))
    cycles = [np.log(corrected(p, some, estimate(in_16_bits(p), some, epilogue, gpu))) for p in problems]
    for i in np.argsort(np.sum(cycles, axis=0), kind="stable"):
        config = for_operands(some.configs[i], b.dtype)
        try:
            KernelSpec.of(packed(problem(ROWS[-1])), config, epilogue)
        except ConfigError:
            continue
        return config
    return for_operands(Config(), b.dtype)
