"""The config of a GEMM: the caller's, a tuned one, or the one that a cost model estimates to be fastest.

If an epilogue needs full rows, or blocks to be quantized, in one tile, and none holds them, the error says what works.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice

from gemmsmith.binding.binding import Binding
from gemmsmith.core.chip import Chip
from gemmsmith.core.config import Config
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.errors import ArgumentError, ConfigError
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.core.problem import Problem
from gemmsmith.core.scalars import ceil_div, round_up
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.epilogue_plan import MAX_TILE_N, check_quantize_blocks, min_smem_bytes
from gemmsmith.epilogue.evaluate import row_function_inputs
from gemmsmith.tuning import measured_configs
from gemmsmith.tuning.batch_invariant import batch_invariant_config
from gemmsmith.tuning.candidates import fit_stages, spec_for
from gemmsmith.tuning.choose import choose, rank_configs
from gemmsmith.tuning.choose_sm80 import lookup_sm80, rank_sm80
from gemmsmith.tuning.config_table import M_GRANULARITY, rounds_up_m
from gemmsmith.tuning.gpus import Gpu
from gemmsmith.tuning.grouped import choose_grouped, rank_grouped
from gemmsmith.tuning.measured_configs import key_of
from gemmsmith.tuning.model import covers
from gemmsmith.tuning.tuned_table import lookup_tuned, serve

TILE_N_STEP = 8
"""Granularity of tile N."""


def check_full_rows_fit(spec: KernelSpec) -> None:
    """Raise ConfigError unless shared memory holds two stages and the epilogue's subtiles of full rows.

    Epilogues without row functions, whose subtiles need not have full rows, are not checked.
    """
    if row_function_inputs(spec.epilogue.graph):
        shared_bytes = min_smem_bytes(spec) + 2 * spec.stage_bytes
        if shared_bytes > spec.chip.max_shared_bytes_per_cta:
            raise ConfigError(
                f"tile: got {spec.config.tile}, which takes {shared_bytes} bytes of shared memory, more than the "
                f"{spec.chip.max_shared_bytes_per_cta} of {spec.chip}; use a smaller one"
            )


CostModel = Callable[[Problem, EpilogueSpec], Config]
"""Returns the config with the least estimated time."""


def explain_full_row_limit(
    error: ConfigError, problem: Problem, epilogue: EpilogueSpec, model: CostModel
) -> ConfigError:  # fmt: skip
    """Return a better error than `error`, by which the config that `model` chose was rejected.

    If the epilogue has row functions (which need all columns of a row, or of a quantization block, in one tile), the
    new error says how many columns work: the widest that the model has a valid config for.
    """
    graph = epilogue.graph
    names = dict.fromkeys(graph.nodes[i].op for i in row_function_inputs(graph))
    if not names:
        return error
    needs_full_rows = graph.requires_full_rows
    requested = problem.n
    if not needs_full_rows:
        requested = max(node.attribute[1] for node in graph.nodes if node.op == "quantize")
    for columns in range(min(MAX_TILE_N, (requested - 1) // TILE_N_STEP * TILE_N_STEP), 0, -TILE_N_STEP):
        narrow = problem
        if needs_full_rows:
            narrow = replace(problem, b=replace(problem.b, cols=columns), d=replace(problem.d, cols=columns))
        else:
            epilogue = epilogue.with_graph(_with_block_columns(graph, columns))
        try:
            check_quantize_blocks(epilogue.graph)
            check_full_rows_fit(spec_for(model(narrow, epilogue), narrow, epilogue))
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
    nodes = (replace(x, attribute=(x.attribute[0], columns)) if x.op == "quantize" else x for x in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


@dataclass(frozen=True)
class Choice:
    """A config for a GEMM, with the binding in its orientation, and its origin in words.

    `version`: of the measured configs, if the other M with the same `rounded_rows` have this config, too; else None.
    """

    binding: Binding
    config: Config
    spec: KernelSpec
    origin: str
    version: Hashable = None

    @classmethod
    def of(cls, binding: Binding, config: Config, origin: str = "given", version: Hashable = None) -> Choice:
        """Return the choice of this config. Raises ConfigError if it cannot compute the GEMM."""
        oriented = binding.transposed() if config.swap_ab else binding
        return cls(oriented, config, oriented.kernel_spec(config), origin, version)


def rounded_rows(m: int) -> int:
    """Return the M by which the configs of a GEMM of `m` rows are looked up, or ranked, if `rounds_up_m`."""
    return m if m <= M_GRANULARITY else round_up(m, M_GRANULARITY)


def choose_config(binding: Binding, chip: Chip, gpu: Gpu, *, batch_invariant: bool = False) -> Choice:
    """Return the config for a GEMM on a GPU, with as many stages as fit; ConfigError if none can compute it.

    `batch_invariant`: the config must not make a row of D depend on M.
    """
    if binding.grouping:
        return Choice.of(binding, *choose_grouped(binding, chip, gpu))
    problem, device = binding.problem, binding.a.device_index
    is_covered = covers(problem.a.dtype, chip)

    def model(problem: Problem, epilogue: EpilogueSpec) -> Config:
        if is_covered:
            return choose(problem, epilogue, gpu=gpu)
        return rank_sm80(problem, epilogue, chip, invariant=batch_invariant)[0]

    version = None
    try:
        if is_covered and not batch_invariant:
            version = measured_configs.version(device)
            rounded = problem.with_rows(rounded_rows(problem.m)) if rounds_up_m(problem) else problem
            config, origin = _tuned_or_chosen(rounded, binding.spec, chip, gpu, device, version)
        else:
            config, origin = _by_exact_rows(binding, chip, gpu, model, batch_invariant)
        choice = Choice.of(binding, config, origin, version if rounds_up_m(problem) else None)
        if (fitted := fit_stages(choice.spec)) != config:
            choice = replace(choice, config=fitted, spec=choice.binding.kernel_spec(fitted))
        check_full_rows_fit(choice.spec)
    except ConfigError as error:
        raise explain_full_row_limit(error, problem, binding.spec, model) from None
    return choice


def _by_exact_rows(
    binding: Binding, chip: Chip, gpu: Gpu, model: CostModel, batch_invariant: bool
) -> tuple[Config, str]:  # fmt: skip
    """Return (config, origin) on another chip than Hopper, or for a batch-invariant call; `origin` in words."""
    problem, epilogue, device = binding.problem, binding.spec, binding.a.device_index
    if not covers(problem.a.dtype, chip):
        if not batch_invariant and (tuned := lookup_sm80(problem, epilogue, chip, device)):
            return tuned, f"tuned for {chip}"
        return model(problem, epilogue), f"chosen for {chip}"
    entry = measured_configs.find(key_of(problem, epilogue, chip, batch_invariant), device)
    if entry and (tuned := serve(entry.config, entry.m, problem, epilogue, gpu)):
        return tuned, "tuned"
    return batch_invariant_config(binding, gpu), "batch-invariant"


@lru_cache(maxsize=4096)
def _tuned_or_chosen(
    problem: Problem, epilogue: EpilogueSpec, chip: Chip, gpu: Gpu, device: int, version: Hashable
) -> tuple[Config, str]:
    """Return a tuned config, else the model's choice; `version`: of the measured configs."""
    entry = measured_configs.find(key_of(problem, epilogue, chip), device)
    if entry and (tuned := serve(entry.config, entry.m, problem, epilogue, gpu)):
        return tuned, "tuned"
    if tuned := lookup_tuned(problem, epilogue, gpu, device):
        return tuned, "tuned" if epilogue.graph.is_identity else "tuned without its epilogue"
    return choose(problem, epilogue, gpu=gpu), "chosen by the model"


MAX_RANKED = 512
"""Configs that are ranked to find those that add in one order; chosen."""


def candidates(
    binding: Binding, chip: Chip, gpu: Gpu, untuned: Config, limit: int, any_order: bool
) -> list[Config]:  # fmt: skip
    """Return the configs that are worth measuring for a GEMM, the one that is chosen without measurements first.

    Unless `any_order`, all results have the same bits: the order of sums is that of `untuned`, or from the first k-tile
    to the last if that of `untuned` depends on tiles and waves, as with `splits` and `serpentine`.
    """
    problem, epilogue = binding.problem, binding.spec
    ranked: Iterable[Config]
    if binding.grouping:
        ranked = rank_grouped(binding, chip, gpu)
    elif not covers(problem.a.dtype, chip):
        ranked = rank_sm80(problem, epilogue, chip, invariant=not any_order)
    else:
        ranked = rank_configs(problem, epilogue, limit if any_order else MAX_RANKED, gpu=gpu, any_splits=any_order)
    if any_order:
        return list(dict.fromkeys([untuned, *ranked]))[:limit]
    if untuned.splits != 1 or untuned.serpentine:
        untuned = next((c.replace(serpentine=False) for c in (untuned, *ranked) if c.splits == 1), untuned)
    order = _order_of_sums(untuned, problem, epilogue)
    same = (c for x in ranked if _order_of_sums(c := x.replace(serpentine=False), problem, epilogue) == order)
    return list(islice(dict.fromkeys(chain([untuned], same)), limit))


def _order_of_sums(config: Config, problem: Problem, epilogue: EpilogueSpec) -> Hashable:
    """Return a value that is equal for configs whose results have the same bits.

    See tuning/batch_invariant.py for what the order along K depends on. An epilogue that reduces, or needs full rows,
    adds in an order that its tiles decide.
    """
    parts = config.cluster_splits
    k_per_part = ceil_div(ceil_div(problem.k, config.tile[2]), parts) * config.tile[2] if parts > 1 else problem.k
    tiles = config.tile, config.swap_ab, config.consumers, config.design
    graph = epilogue.graph
    reduces = any(graph.is_reduction(r) for r in graph.results) or bool(row_function_inputs(graph))
    has_own_order = parts > 2 or config.splits != 1 or reduces
    return config.splits, parts, k_per_part, tiles if has_own_order else None
