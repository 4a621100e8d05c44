"""`gemmsmith run | show | simulate`: compile a kernel for a problem, print it, execute it."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from gemmsmith.arrays import Spec
from gemmsmith.backends import BACKENDS
from gemmsmith.backends.cuda.mnemonics import Code
from gemmsmith.backends.sim.execute.counters import Counters
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.cli import options
from gemmsmith.cli.execute import RandomOperands, execute, resources, scale_shapes
from gemmsmith.cli.group import FAILED
from gemmsmith.cli.options import PartialSizes, complete_sizes
from gemmsmith.cli.progress import progress_bar
from gemmsmith.cli.tables import print_outcome, wrapped
from gemmsmith.core.chip import get_chip
from gemmsmith.core.config import Config
from gemmsmith.host.plans import Plan
from gemmsmith.tuning.model import covers_config

GPU_SIZES = (8192, 8192, 8192)
"""Default m, n, k on a GPU."""
CPU_SIZES = (512, 512, 512)
"""Default m, n, k elsewhere: a GEMM that the simulator finishes in seconds."""


@click.command(cls=options.ProblemCommand)
@options.problem
@click.option(
    "--backend",
    type=click.Choice(["auto", *BACKENDS]),
    default="auto",
    show_default=True,
    help="auto: the GPU if there is one, else the simulator.",
)
@options.execution
def run(sizes: PartialSizes, backend: str, seed: int, output: Path, as_json: bool, **choices: Any) -> None:
    """Execute a kernel, and compare D with float64.

    The operands are random, from a normal distribution. The default sizes are 8192 on a GPU and 512 elsewhere. The exit
    code is 1 if D is wrong.

    \b
    Example: gemmsmith run 200x136x96 --tile 64x64x32 --backend sim
    """
    _execute_and_report(_resolve_backend(backend), sizes, seed, output, as_json, choices)


@click.command(cls=options.ProblemCommand)
@options.problem
@click.option("--counters", is_flag=True, help="Count memory accesses by source line, and show the occupancy.")
@click.option(
    "--schedules",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="The most schedules to run, if one does not speak for all.",
)
@options.execution
def simulate(
    sizes: PartialSizes, counters: bool, schedules: int, seed: int, output: Path, as_json: bool, **choices: Any
) -> None:
    """Execute a kernel on the CPU and report hazards.

    Every barrier and every memory access is checked; the timeline is plotted, and written as a trace for
    ui.perfetto.dev. The default sizes are 512. Seeds other than 0 simulate other schedules that are possible on
    hardware; the verdict says whether one run speaks for all of them. The exit code is 1 if D is wrong or there is a
    hazard. --json has each hazard with its places, loops, lines of Python and of CUDA, hint and id. --counters shows,
    per source line and next to the ideal, wavefronts of shared memory (128 bytes each; bank conflicts need more) and
    sectors of global memory (32 bytes).

    \b
    Example: gemmsmith simulate 256x256x128 --design pingpong --seed 3
    """
    _execute_and_report("sim", sizes, seed, output, as_json, choices, Counters() if counters else None, schedules)


@click.command(cls=options.ProblemCommand)
@options.problem
@click.option("--source", "kind", flag_value="source", default=True, help="The CUDA C++ file.  [default]")
@click.option("--ptx", "kind", flag_value="ptx", help="PTX, compiled by NVRTC.")
@click.option("--sass", "kind", flag_value="sass", help="Machine code, disassembled.")
@click.option("--resources", "kind", flag_value="resources", help="Registers, spills, shared memory.")
@click.option("--why", "kind", flag_value="why", help="How its config was chosen, and the cost of repacking.")
@click.option("--annotate", is_flag=True, help="With --ptx, --sass: instruction classes and counts, Python lines.")
@options.as_json
def show(sizes: PartialSizes, kind: str, annotate: bool, as_json: bool, **choices: Any) -> None:
    """Print a kernel's source, PTX, SASS or resources; needs no GPU.

    The default sizes are 8192. An annotated listing marks tensor instructions, loads, stores and barriers, and counts
    them in the whole kernel and in the mainloop.

    \b
    Example: gemmsmith show 512x4096x4096 --resources
    """
    code: Code = "ptx" if kind == "ptx" else "sass"
    if annotate and kind != code:
        raise click.UsageError(f"--annotate: got --{kind}; use --ptx or --sass")
    plan = _make_plan(choices, complete_sizes(sizes, GPU_SIZES))
    if annotate:
        from gemmsmith.backends.cuda.listing import build_listing
        from gemmsmith.cli.tables import format_listing, listing_to_json

        listing = build_listing(plan.kernel, code)
        fields_for_json, text = listing_to_json(listing), format_listing(listing)
    elif kind == "resources":
        r = plan.resources
        fields_for_json = {**resources(plan), "stack_bytes": r.stack_bytes, "advisories": r.advisories}
        text = f"registers {r.registers}\nspill stores {r.spill_store_bytes}\nspill loads {r.spill_load_bytes}\n"
        text += f"stack {r.stack_bytes}\nshared memory {plan.kernel.shared_bytes}"
        text += "".join(f"\nadvisory {line}" for line in r.advisories)
    else:
        text = getattr(plan, kind)
        fields_for_json, text = {kind: text}, wrapped(text) if kind == "why" else text
    print_outcome(fields_for_json, text, None, as_json)


def _execute_and_report(
    backend: str, partial_sizes: PartialSizes, seed: int, output: Path, as_json: bool, choices: dict[str, Any],
    counters: Counters | None = None, schedules: int = 1,
) -> None:  # fmt: skip
    """Execute the kernel, print the outcome, and exit with code FAILED if it is not correct.

    `choices`: the options of the problem and of the config, by name. `output`: folder for the files. `counters` and
    `schedules`: as for `execute`.
    """
    sizes = complete_sizes(partial_sizes, GPU_SIZES if backend == "cuda" else CPU_SIZES)
    plan = _make_plan(choices, sizes)
    operands = RandomOperands(choices["layout"], (choices["scale_a"], choices["scale_b"]), seed)
    with progress_bar() as progress:
        outcome = execute(plan, sizes, operands, backend, output, progress, counters, schedules)
    if as_json:
        click.echo(json.dumps(outcome.to_json(plan), indent=2))
    else:
        for name, value in outcome.to_rows(plan).items():
            click.echo(click.style(f"{name:<9} ", bold=True) + wrapped(value, 10))
        for name, path in outcome.files.items():
            click.echo(click.style(f"{name:<9} ", bold=True) + path)
        for counts in outcome.kernel_counts:
            click.echo(f"\n{counts.to_text()}")
    if not outcome.ok:
        raise SystemExit(FAILED)


def _resolve_backend(backend: str) -> str:
    """Return the backend that "auto" stands for on this machine; others stay."""
    if backend != "auto":
        return backend
    from gemmsmith.backends.cuda import driver

    return "cuda" if driver.is_available() else "sim"


def _make_plan(choices: dict[str, Any], sizes: tuple[int, int, int]) -> Plan:
    """Return the plan of the options of a command (`choices`, by name) for `sizes` (m, n, k).

    Without options for fields of a Config, its config is the one that `gemm` takes. Otherwise the options replace
    fields of that config, or of `Config()` if a tile is given or with --config default; then the fields that are not
    given are adapted (`complete_config`), and as many stages as fit are taken.
    """
    a, b = operand_specs(sizes, choices["layout"], choices["dtype"], choices["dtype_b"])
    shapes = scale_shapes(sizes, (choices["scale_a"], choices["scale_b"]))
    scales = [shape if shape is None else Spec(shape, "fp32") for shape in shapes]
    names = "out_dtype", "accumulate", "precision", "batch_invariant"
    request = Request(a, b, scale_a=scales[0], scale_b=scales[1], **{name: choices[name] for name in names})
    fixed = {f.name: choices[f.name] for f in fields(Config) if choices[f.name] is not None}
    from_defaults = choices["config_base"] == "default" or "tile" in fixed
    if not fixed and not from_defaults:
        return Plan(request)
    from gemmsmith.tuning.choose import complete_config
    from gemmsmith.tuning.dtype_equivalence import config_for_dtype
    from gemmsmith.tuning.stage_count import fit_stages

    config: Config = config_for_dtype(Config(), a.dtype) if from_defaults else Plan(request).config
    fixed_fields, candidate = set(fixed), config.replace(**fixed)
    if "tile" not in fixed and not covers_config(candidate):
        from gemmsmith.tuning.choose_sm80 import rank_sm80

        binding = bind(request)
        config = rank_sm80(binding.problem, binding.spec, get_chip(candidate.chip))[0]
        fixed_fields |= {"design", "tile", "cluster", "consumers"}
    if fixed:
        config = complete_config(replace(config, **fixed), fixed_fields)
    if "stages" not in fixed:
        config = fit_stages(Plan(request._replace(config=config)).spec)
    return Plan(request._replace(config=config))


def plan_of_words(words: list[str]) -> Plan:
    """Return the plan of the arguments `words` of `gemmsmith show`. Raises UsageError if they are not valid."""
    choices = show.make_context("show", words).params
    shape = choices.pop("shape") or tuple(choices[name] for name in "mnk")
    return _make_plan(choices, complete_sizes(shape, GPU_SIZES))


def operand_specs(
    sizes: tuple[int, int, int], layout: str, dtype: str, dtype_b: str | None = None
) -> tuple[Spec, Spec]:
    """Return specs of A (m, k) and B (k, n), for `sizes` (m, n, k).

    `layout`: a letter for A and one for B: row-major (n) or column-major (t). `dtype_b`: B's dtype; None: A's.
    """
    m, n, k = sizes
    a = Spec((m, k), dtype, None if layout[0] == "n" else (1, max(m, 1)))
    b = Spec((k, n), dtype_b or dtype, None if layout[1] == "n" else (1, max(k, 1)))
    return a, b
