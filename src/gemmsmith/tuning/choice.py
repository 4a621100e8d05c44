"""The config of a GEMM: the caller's, a tuned one, or the one that a cost model estimates to be fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gemmsmith.binding.binding import Binding
from gemmsmith.core.chip import Chip
from gemmsmith.core.config import Config
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import KernelSpec
from gemmsmith.tuning.batch_invariant import batch_invariant_config
from gemmsmith.tuning.choose import choose
from gemmsmith.tuning.choose_sm80 import choose_sm80, lookup_sm80
from gemmsmith.tuning.full_rows import check_full_rows_fit, explain_full_row_limit
from gemmsmith.tuning.gpus import Gpu
from gemmsmith.tuning.grouped import choose_grouped
from gemmsmith.tuning.model import covers
from gemmsmith.tuning.stage_count import fit_stages
from gemmsmith.tuning.tuned_table import lookup_tuned

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
