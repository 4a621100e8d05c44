"""What is said where no chosen config holds a row, or a block to be quantized, in one tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gemmsmith.core.config import Config
from gemmsmith.core.errors import ArgumentError, ConfigError
from gemmsmith.core.graph import Graph
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import EpilogueSpec, KernelSpec
from gemmsmith.epilogue.device.held import sources
from gemmsmith.epilogue.device.layout import MOST_COLUMNS, check_blocks, least_bytes
from gemmsmith.tuning.fitting import spec_for

STEP = 8


def check_rows(spec: KernelSpec) -> None:
    """ConfigError where shared memory does not hold two stages beside whole rows, whose pieces are as wide."""
    graph = spec.epilogue.graph
    if sources(graph):
        taken = least_bytes(graph, spec.tma, spec.config) + 2 * spec.stage_bytes
        if taken > spec.chip.shared_bytes:
            raise ConfigError(
                f"tile: got {spec.config.tile}, which takes {taken} bytes of shared memory, more than the "
                f"{spec.chip.shared_bytes} of {spec.chip}; use a smaller one"
            )


def explained(
    error: ConfigError, problem: Problem, epilogue: EpilogueSpec, choose: Callable[[Problem, EpilogueSpec], Config]
) -> ConfigError:
    """The error for a product whose chosen config was refused: where its epilogue has functions of whole rows, one that
    says how many columns work instead; `choose` is how the config was."""
    graph = epilogue.graph
    names = dict.fromkeys(graph.nodes[i].op for i in sources(graph))
    if not names:
        return error
    of_rows = graph.takes_whole_rows
    asked = problem.n if of_rows else max(node.value[1] for node in graph.nodes if node.op == "quantize")
    for columns in range(min(MOST_COLUMNS, (asked - 1) // STEP * STEP), 0, -STEP):
        narrow = problem
        if of_rows:
            narrow = replace(problem, b=replace(problem.b, cols=columns), d=replace(problem.d, cols=columns))
        else:
            epilogue = epilogue.with_graph(_in_blocks(graph, columns))
        try:
            check_blocks(epilogue.graph)
            check_rows(spec_for(choose(narrow, epilogue), narrow, epilogue))
        except (ArgumentError, ConfigError):
            continue
        what = f"rows of {asked} columns" if of_rows else f"blocks of {asked} columns"
        kind = "3xtf32" if problem.low_parts else problem.a.dtype
        return ConfigError(
            f"{' and '.join(names)}: got {what}, and no tile of a {kind} product with these operands and "
            f"results holds them; use up to {columns}"
        )
    return error


def _in_blocks(graph: Graph, columns: int) -> Graph:
    """The graph with blocks of so many columns."""
    nodes = (replace(x, value=(x.value[0], columns)) if x.op == "quantize" else x for x in graph.nodes)
    return replace(graph, nodes=tuple(nodes))
