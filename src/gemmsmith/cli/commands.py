"""gemmsmith run | show | simulate: makes a kernel for a problem, prints it, executes it."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from gemmsmith.arrays import Spec
from gemmsmith.backends.cuda.mnemonics import Code
from gemmsmith.backends.sim.counters import Counters
from gemmsmith.cli import options
from gemmsmith.cli.execute import Data, execute, resources, scale_shapes
from gemmsmith.cli.explain import explain
from gemmsmith.cli.group import FAILED, Group
from gemmsmith.cli.ladder import ladder
from gemmsmith.cli.progress import shown
from gemmsmith.cli.raster import raster
from gemmsmith.cli.tune import tune
from gemmsmith.core.chip import HOPPER, find_chip
from gemmsmith.core.config import Config
from gemmsmith.core.design import find
from gemmsmith.plans import BACKENDS, Plan
from gemmsmith.scaling import with_scales

GPU_SIZES, CPU_SIZES = (8192, 8192, 8192), (512, 512, 512)
"""m, n, k where none are given: a large product on a GPU, and one that the simulator finishes in seconds."""


@click.group(
    "gemmsmith", cls=Group, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="gemmsmith")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Makes GEMM kernels for Hopper GPUs, and executes them on any machine.

    \b
    Example: gemmsmith run --m 256 --n 256 --k 256 --backend sim
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


main.add_command(explain)
main.add_command(ladder)
main.add_command(raster)
main.add_command(tune)


@main.command()
@options.problem
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="auto",
    show_default=True,
    help="auto: the GPU where there is one, else the simulator.",
)
@options.execution
def run(backend: str, seed: int, output: Path, as_json: bool, **choices: Any) -> None:
    """Makes a kernel, executes it, and compares D with float64.

    The data are random and normal. Sizes that are not given are 8192 on a GPU and 512 elsewhere. The exit code is 1 if
    D is wrong.

    \b
    Example: gemmsmith run --m 200 --n 136 --k 96 --tile 64x64x32 --backend sim
    """
    _executed(_resolve(backend), seed, output, as_json, choices)


@main.command()
@options.problem
@click.option("--counters", is_flag=True, help="Count accesses to memory by source line, and show the occupancy.")
@options.execution
def simulate(counters: bool, seed: int, output: Path, as_json: bool, **choices: Any) -> None:
    """Executes a kernel on the CPU and looks for hazards.

    Every barrier and every access is checked; the timeline is drawn, and written as a trace for ui.perfetto.dev. Sizes
    that are not given are 512. Seeds other than 0 take other schedules that the hardware may take too. The exit code is
    1 if D is wrong or there is a hazard. --counters shows, for each line and beside the ideal, wavefronts of shared
    memory (128 bytes each, more of them where banks conflict) and sectors of global memory (32 bytes).

    \b
    Example: gemmsmith simulate --m 256 --n 256 --k 128 --design pingpong --seed 3
    """
    _executed("sim", seed, output, as_json, choices, Counters() if counters else None)


@main.command()
@options.problem
@click.option("--source", "what", flag_value="source", default=True, help="The CUDA C++ file.  [default]")
@click.option("--ptx", "what", flag_value="ptx", help="What NVRTC makes of it.")
@click.option("--sass", "what", flag_value="sass", help="Machine code, disassembled.")
@click.option("--resources", "what", flag_value="resources", help="Registers, spills, shared memory.")
@click.option("--why", "what", flag_value="why", help="How its config was chosen, and what packing costs.")
@click.option("--annotate", is_flag=True, help="With --ptx, --sass: classes, their counts, the Python lines.")
@options.as_json
def show(what: str, annotate: bool, as_json: bool, **choices: Any) -> None:
    """Prints a kernel, or what the compiler makes of it; needs no GPU.

    Sizes that are not given are 8192; the kernel is the one that a GPU would run. An annotated listing marks tensor
    instructions, loads, stores and barriers, and counts them in the whole kernel and in the mainloop.

    \b
    Example: gemmsmith show --m 512 --n 4096 --k 4096 --resources
    """
    code: Code = "ptx" if what == "ptx" else "sass"
    if annotate and what != code:
        raise click.UsageError(f"--annotate: got --{what}; use --ptx or --sass")
    plan, _ = _plan(choices, GPU_SIZES)
    if annotate:
        from gemmsmith.backends.cuda.listing import annotated
        from gemmsmith.cli.annotate import facts, text_of

        listing = annotated(plan.kernel, code)
        found, text = facts(listing), text_of(listing)
    elif what == "resources":
        r = plan.resources
        found = {**resources(plan), "stack_bytes": r.stack, "advisories": r.advisories}
        text = f"registers {r.registers}\nspill stores {r.spill_stores}\nspill loads {r.spill_loads}\n"
        text += f"stack {r.stack}\nshared memory {plan.kernel.shared_bytes}"
        text += "".join(f"\nadvisory {line}" for line in r.advisories)
    else:
        text = getattr(plan, what)
        found = {what: text}
    click.echo(json.dumps(found, indent=2) if as_json else text)


def _executed(
    backend: str, seed: int, output: Path, as_json: bool, choices: dict[str, Any], counters: Counters | None = None
) -> None:
    """Executes the kernel and prints the outcome."""
    plan, sizes = _plan(choices, GPU_SIZES if backend == "cuda" else CPU_SIZES)
    data = Data(choices["layout"], (choices["scale_a"], choices["scale_b"]), seed)
    with shown() as tell:
        outcome = execute(plan, sizes, data, backend, output, tell, counters)
    if as_json:
        click.echo(json.dumps(outcome.facts(plan), indent=2))
    else:
        for name, value in outcome.rows(plan).items():
            click.echo(click.style(f"{name:<9} ", bold=True) + value)
        for counted in outcome.counted:
            click.echo(f"\n{counted.text()}")
    if not outcome.ok:
        raise SystemExit(FAILED)


def _resolve(backend: str) -> str:
    if backend != "auto":
        return backend
    from gemmsmith.backends.cuda import driver

    return "cuda" if driver.available() else "sim"


def _plan(choices: dict[str, Any], sizes: tuple[int, int, int]) -> tuple[Plan, tuple[int, int, int]]:
    """The plan for the options. Fields of the config that are not given are the plan's own; of 16-bit operands in the
    simulator, or if a tile is given, those of `Config()`."""
    m, n, k = (choices[name] if choices[name] is not None else size for name, size in zip("mnk", sizes, strict=True))
    a, b = operand_specs((m, n, k), choices["layout"], choices["dtype"], choices["dtype_b"])
    shapes = scale_shapes((m, n, k), (choices["scale_a"], choices["scale_b"]))
    scales = [shape if shape is None else Spec(shape, "fp32") for shape in shapes]
    names = "out_dtype", "accumulate", "precision", "batch_invariant"
    arguments = {name: choices[name] for name in names} | {"operands": with_scales({}, *scales)}
    given = {f.name: choices[f.name] for f in fields(Config) if choices[f.name] is not None}
    own = "tile" not in given and (sizes == GPU_SIZES or a.dtype.bits != 16)
    if own and not given:
        return Plan(a, b, **arguments), (m, n, k)
    from gemmsmith.tuning.depth import for_operands

    config: Config = Plan(a, b, **arguments).config if own else for_operands(Config(), a.dtype)
    chip, settled = find_chip(given.get("chip", HOPPER.name)), set(given)
    without_wgmma = chip != HOPPER or find(given.get("design", config.design)).multiplies != "wgmma"
    if without_wgmma and "tile" not in given:
        from gemmsmith.tuning.multistage import choose_multistage

        binding = Plan(a, b, **arguments).binding
        config = choose_multistage(binding.problem, binding.spec, chip)
        settled |= {"design", "tile", "cluster", "consumers"}
    if given:
        from gemmsmith.tuning.choose import fitted
        from gemmsmith.tuning.fitting import fitting

        config = fitted(replace(config, **given), settled, fp16=choices["accumulate"] == "fp16")
        if "stages" not in given:
            config = fitting(config, Plan(a, b, config=config, **arguments).spec)
    return Plan(a, b, config=config, **arguments), (m, n, k)


def operand_specs(
    sizes: tuple[int, int, int], layout: str, dtype: str, dtype_b: str | None = None
) -> tuple[Spec, Spec]:
    """Stand-ins for A (m, k) and B (k, n), row-major (n) or column-major (t)."""
    m, n, k = sizes
    a = Spec((m, k), dtype, None if layout[0] == "n" else (1, max(m, 1)))
    b = Spec((k, n), dtype_b or dtype, None if layout[1] == "n" else (1, max(k, 1)))
    return a, b
