"""`gemmsmith run | show | simulate`: compile a kernel for a problem, print it, execute it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from gemmsmith.backends import BACKENDS
from gemmsmith.backends.cuda.listing import Code
from gemmsmith.backends.sim.execute.counters import Counters
from gemmsmith.cli import options
from gemmsmith.cli.execute import execute, resources
from gemmsmith.cli.group import FAILED
from gemmsmith.cli.options import PartialSizes, complete_sizes, progress_bar
from gemmsmith.cli.problem import make_plan, make_request
from gemmsmith.cli.tables import print_outcome, wrapped
from gemmsmith.host.planned_gemm import PlannedGemm
from gemmsmith.host.plans import Plan

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
    help="The most schedules to run, if one does not speak for all. With --html: how many to run and show.",
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="File for a page in which a browser steps through the kernel.",
)
@click.option(
    "--first-step",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="With --html: the first of the 200,000 steps that the page shows.",
)
@options.execution
def simulate(
    sizes: PartialSizes, counters: bool, schedules: int, html: Path | None, first_step: int, seed: int, output: Path,
    as_json: bool, **choices: Any,
) -> None:  # fmt: skip
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
    if first_step and html is None:
        raise click.UsageError(f"--first-step: got {first_step} without --html; give the page's file")
    counts = Counters() if counters else None
    _execute_and_report("sim", sizes, seed, output, as_json, choices, counts, schedules, html, first_step)


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
    with progress_bar() as progress:
        progress("choosing a config")
        plan = _plan_of(sizes, choices)
        progress("printing" if kind in ("source", "why") else "compiling")
        fields_for_json, text = _shown(plan, kind, code if annotate else None)
    print_outcome(fields_for_json, text, None, as_json)


def _shown(plan: PlannedGemm, kind: str, annotated: Code | None) -> tuple[dict[str, Any], str]:
    """Return what `show` prints of a plan, for JSON and as text.

    `kind`: an attribute of Plan. `annotated`: the code to annotate instead, or None.
    """
    if annotated:
        from gemmsmith.backends.cuda.listing import build_listing
        from gemmsmith.cli.tables import format_listing, listing_to_json

        listing = build_listing(plan.kernel, annotated)
        return listing_to_json(listing), format_listing(listing)
    if kind == "resources":
        r = Plan(plan).resources
        text = f"registers {r.registers}\nspill stores {r.spill_store_bytes}\nspill loads {r.spill_load_bytes}\n"
        text += f"stack {r.stack_bytes}\nshared memory {plan.kernel.shared_bytes}"
        text += "".join(f"\nadvisory {line}" for line in r.advisories)
        return {**resources(plan), "stack_bytes": r.stack_bytes, "advisories": r.advisories}, text
    text = getattr(Plan(plan), kind)
    return {kind: text}, wrapped(text) if kind == "why" else text


def _execute_and_report(
    backend: str, partial_sizes: PartialSizes, seed: int, output: Path, as_json: bool, choices: dict[str, Any],
    counters: Counters | None = None, schedules: int = 1, page: Path | None = None, first_step: int = 0,
) -> None:  # fmt: skip
    sizes = complete_sizes(partial_sizes, GPU_SIZES if backend == "cuda" else CPU_SIZES, choices["groups"])
    with progress_bar() as progress:
        plan, outcome = execute(choices, sizes, seed, backend, output, progress, counters, schedules, page, first_step)
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


def plan_of_words(words: list[str]) -> PlannedGemm:
    """Return the plan of the arguments `words` of `gemmsmith show`. Raises UsageError if they are not valid."""
    choices = show.make_context("show", words).params
    shape = choices.pop("shape") or tuple(choices[name] for name in "mnk")
    return _plan_of(shape, choices)


def _plan_of(sizes: PartialSizes, choices: dict[str, Any]) -> PlannedGemm:
    """Return the plan of the options of `show`, by name, whose default sizes are GPU_SIZES."""
    return make_plan(make_request(choices, complete_sizes(sizes, GPU_SIZES, choices["groups"])), choices)
