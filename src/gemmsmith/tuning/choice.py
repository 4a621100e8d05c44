"""The config of a GEMM: the caller's, a tuned one, or the one that a cost model estimates to be fastest.

If an epilogue needs full rows, or blocks to be quantized, in one tile, and none holds them, the error says what works.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from gemmsmith.binding.binding import Binding
from gemmsmith.core.chip import Chip
from gemmsmith.core.config import Config
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.errors import ArgumentError, ConfigError
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.epilogue_plan import MAX_TILE_N, check_quantize_blocks, min_smem_bytes
from gemmsmith.epilogue.register_usage import row_function_inputs
from gemmsmith.tuning.batch_invariant import batch_invariant_config
from gemmsmith.tuning.choose import choose
from gemmsmith.tuning.choose_sm80 import choose_sm80, lookup_sm80
from gemmsmith.tuning.gpus import Gpu
from gemmsmith.tuning.grouped import choose_grouped
from gemmsmith.tuning.model import covers
from gemmsmith.tuning.stage_count import fit_stages, spec_for
from gemmsmith.tuning.tuned_table import lookup_tuned

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


CostModel = Callable[[Problem, EpilogueSpec], Config]
"""Returns the config with the least estimated time."""


@dataclass(frozen=True)
class Choice:
    """A config for a GEMM.

    Attributes:
        binding: The GEMM in the config's orientation: transposed if `config.swap_ab`.
        config: The kernel's configuration.
        spec: The kernel's compile-time parameters.
        origin: Where the config comes from, in words.
    """

    binding: Binding
    config: Config
    spec: KernelSpec
    origin: str

    @classmethod
    def of(cls, binding: Binding, config: Config, origin: str = "given") -> Choice:
        """Return the choice of this config. Raises ConfigError if it cannot compute the GEMM."""
        oriented = binding.transposed() if config.swap_ab else binding
        return cls(oriented, config, oriented.kernel_spec(config), origin)


def choose_config(binding: Binding, chip: Chip, gpu: Gpu, *, batch_invariant: bool = False) -> Choice:
    """Return the config for a GEMM on a GPU, with as many stages as fit.

    Raises:
        ConfigError: If no config can compute it.
    """
    if binding.grouping:
        return Choice.of(binding, *choose_grouped(binding, chip, gpu))
    problem, epilogue = binding.problem, binding.spec
    is_sm80 = not covers(problem.a.dtype, chip)
    model: CostModel = partial(choose, gpu=gpu)
    if is_sm80:
        model = partial(choose_sm80, chip=chip, invariant=batch_invariant)
    try:
        if is_sm80:
            config, origin = _sm80_config(binding, chip, model, batch_invariant)
        elif batch_invariant:
            config, origin = batch_invariant_config(binding, gpu), "batch-invariant"
        else:
            config, origin = _hopper_config(binding, gpu, model)
        choice = Choice.of(binding, config, origin)
        if (fitted := fit_stages(choice.spec)) != config:
            choice = Choice.of(binding, fitted, origin)
        check_full_rows_fit(choice.spec)
    except ConfigError as error:
        raise explain_full_row_limit(error, problem, epilogue, model) from None
    return choice


def _hopper_config(binding: Binding, gpu: Gpu, model: CostModel) -> tuple[Config, str]:
    """Return a wgmma config and its origin."""
    if tuned := lookup_tuned(binding.problem, binding.spec, gpu):
        return tuned, "tuned" if binding.graph.is_identity else "tuned without its epilogue"
    return model(binding.problem, binding.spec), "chosen by the model"


def _sm80_config(binding: Binding, chip: Chip, model: CostModel, batch_invariant: bool) -> tuple[Config, str]:
    """Return a config without wgmma, and its origin."""
    tuned = None if batch_invariant else lookup_sm80(binding.problem, binding.spec, chip)
    if tuned:
        return tuned, f"tuned for {chip}"
    return model(binding.problem, binding.spec), f"chosen for {chip}"
