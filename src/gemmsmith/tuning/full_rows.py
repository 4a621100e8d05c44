"""Errors for epilogues that need full rows, or blocks to be quantized, in one tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gemmsmith.core.config import Config
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.errors import ArgumentError, ConfigError
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.epilogue_plan import MAX_TILE_N, check_quantize_blocks, min_smem_bytes
from gemmsmith.epilogue.register_usage import row_function_inputs
from gemmsmith.tuning.stage_count import spec_for

TILE_N_STEP = 8
"""Granularity of tile N."""


def check_full_rows_fit(spec: KernelSpec) -> None:
    """Check that shared memory holds two stages and the epilogue's subtiles of full rows.

    Raises:
        ConfigError: It does not.
    """
    if row_function_inputs(spec.epilogue.graph):
        shared_bytes = min_smem_bytes(spec) + 2 * spec.stage_bytes
        if shared_bytes > spec.chip.max_shared_bytes_per_cta:
            raise ConfigError(
                f"tile: got {spec.config.tile}, which takes {shared_bytes} bytes of shared memory, more than the "
                f"{spec.chip.max_shared_bytes_per_cta} of {spec.chip}; use a smaller one"
            )


def explain_full_row_limit(
    error: ConfigError,
    problem: Problem,
    epilogue: EpilogueSpec,
    choose_config: Callable[[Problem, EpilogueSpec], Config],
) -> ConfigError:
    """Return the error for a GEMM whose chosen config was rejected.

    If its epilogue has row functions (which need all columns of a row, or of a block of it), the error says how many
    columns work instead; else it is `error`.
    """
    graph = epilogue.graph
    names = dict.fromkeys(graph.nodes[i].op for i in row_function_inputs(graph))
    if not names:
        return error
    needs_full_rows = graph.requires_full_rows
    requested = (
        problem.n if needs_full_rows else max(node.attribute[1] for node in graph.nodes if node.op == "quantize")
    )
    for columns in range(min(MAX_TILE_N, (requested - 1) // TILE_N_STEP * TILE_N_STEP), 0, -TILE_N_STEP):
        narrow = problem
        if needs_full_rows:
            narrow = replace(problem, b=replace(problem.b, cols=columns), d=replace(problem.d, cols=columns))
        else:
            epilogue = epilogue.with_graph(_with_block_columns(graph, columns))
        try:
            check_quantize_blocks(epilogue.graph)
            check_full_rows_fit(spec_for(choose_config(narrow, epilogue), narrow, epilogue))
        except (ArgumentError, ConfigError):
            continue
        what = f"rows of {requested} columns" if needs_full_rows else f"blocks of {requested} columns"
        kind = "3xtf32" if problem.is_3xtf32 else problem.a.dtype
        return ConfigError(
            f"{' and '.join(names)}: got {what}, and no tile of a {kind} GEMM with these operands and "
            f"results holds them; use up to {columns}"
        )
    return error


def _with_block_columns(graph: EpilogueGraph, columns: int) -> EpilogueGraph:
    """Return the graph with quantization blocks of `columns` columns."""
    nodes = (replace(x, attribute=(x.attribute[0], columns)) if x.op == "quantize" else x for x in graph.nodes)
    return replace(graph, nodes=tuple(nodes))
