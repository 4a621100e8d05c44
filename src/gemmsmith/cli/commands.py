"""gemmsmith run | show | simulate: forge a kernel for a problem, look at it, execute it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console
from rich.table import Table

from gemmsmith.arrays import Spec
from gemmsmith.cli.execute import Outcome, execute
from gemmsmith.cli.explain import explain
from gemmsmith.cli.raster import raster
from gemmsmith.cli.tune import tune
from gemmsmith.core.config import Config, Design, Eviction
from gemmsmith.core.dtypes import FP16, as_dtype
from gemmsmith.core.errors import GemmsmithError
from gemmsmith.plans import BACKENDS, Plan

GPU_SIZES, CPU_SIZES = (8192, 8192, 8192), (512, 512, 512)
"""m, n, k where none are given: a GPU's ordinary work, and what the simulator ends in seconds."""


class _Sizes(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Integers joined by x: 128x256x64."""

    name = "MxNx…"

    def __init__(self, count: int) -> None:
        self.count = count

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        parts = str(value).lower().split("x")
        if len(parts) != self.count or not all(p.isdigit() for p in parts):
            self.fail(f"{value!r} is not {self.count} integers joined by x", param, ctx)
        return tuple(int(p) for p in parts)


def _problem_options(command: Callable[..., None]) -> Callable[..., None]:
    options = [
        click.option("--m", type=int, help="Rows of A and D."),
        click.option("--n", type=int, help="Columns of B and D."),
        click.option("--k", type=int, help="Columns of A, rows of B."),
        click.option("--dtype", default="bf16", show_default=True, help="Operands: bf16 or fp16."),
        click.option("--out-dtype", help="Output: bf16, fp16 or fp32.  [default: the operands']"),
        click.option("--accumulate", default="fp32", show_default=True, help="fp32, or fp16 for fp16 operands."),
        click.option("--layout", type=click.Choice(["nn", "nt", "tn", "tt"]), default="nt", show_default=True,
                     help="A and B: n row-major, t column-major."),
        click.option("--design", type=click.Choice(get_args(Design)), help="The kernel's design."),
        click.option("--tile", type=_Sizes(3), help="A CTA's tile, MxNxK."),
        click.option("--stages", type=int, help="Pipeline stages."),
        click.option("--consumers", type=int, help="Math warpgroups."),
        click.option("--cluster", type=_Sizes(2), help="CTAs of a cluster, MxN."),
        click.option("--raster", type=click.Choice(["m", "n"]), help="The index consecutive tiles run along."),
        click.option("--swizzle", type=int, help="Width of a raster band, in tiles."),
        click.option("--splits", type=int, help="Clusters that share the K of a tile; 0: stream-K."),
        click.option("--cluster-splits", type=int, help="CTAs of a cluster that share the K of a tile."),
        click.option("--swap/--no-swap", default=None, help="Compute D^T, for few rows."),
        click.option("--evict", nargs=2, type=click.Choice(get_args(Eviction)), help="L2 policies of A, B."),
        click.option("--pdl/--no-pdl", default=None, help="Programmatic dependent launch."),
        click.option("--reuse/--no-reuse", default=None, help="Results leave through the stages of A and B."),
        click.option("--serpentine/--no-serpentine", default=None, help="Every other tile backwards through K."),
        click.option("--lockstep/--no-lockstep", default=None, help="Clusters wait for one another in the mainloop."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gemmsmith")
def main() -> None:
    """Forges GEMM kernels for Hopper GPUs, and executes them on any machine."""


main.add_command(explain)
main.add_command(raster)
main.add_command(tune)


@main.command()
@_problem_options
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="auto",
    show_default=True,
    help="auto: the GPU where there is one, else the simulator.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the data, and of the simulator's schedule.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("gemmsmith-output"),
    show_default=True,
    help="Folder for the CUDA file and the timeline.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")  # fmt: skip
def run(backend: str, seed: int, output: Path, as_json: bool, **choices: Any) -> None:
    """Forges a kernel, executes it on random normal data, and compares with the float64 reference."""
    with _ErrorsInALine():
        resolved = _resolve(backend)
        plan, sizes = _plan(choices, GPU_SIZES if resolved == "cuda" else CPU_SIZES)
        console = Console(stderr=True)
        with console.status(f"{plan.config} on {resolved}"):
            outcome = execute(plan, sizes, choices["layout"], resolved, seed, output)
        _report(plan, outcome, as_json)
        if not outcome.ok:
            raise SystemExit(1)


@main.command()
@_problem_options
@click.option("--source", "what", flag_value="source", default=True, help="The CUDA C++ file.  [default]")
@click.option("--ptx", "what", flag_value="ptx", help="What NVRTC makes of it.")
@click.option("--sass", "what", flag_value="sass", help="Machine code, disassembled.")
@click.option("--resources", "what", flag_value="resources", help="Registers, spills, shared memory.")
def show(what: str, **choices: Any) -> None:
    """Prints a kernel; needs no GPU."""
    with _ErrorsInALine():
        plan, _ = _plan(choices, GPU_SIZES)
        if what == "resources":
            r = plan.resources
            click.echo(f"registers {r.registers}\nspill stores {r.spill_stores}\nspill loads {r.spill_loads}")
            click.echo(f"stack {r.stack}\nshared memory {plan.kernel.shared_bytes}")
            for line in r.advisories:
                click.echo(f"advisory {line}")
        else:
            click.echo(getattr(plan, what))


@main.command()
@_problem_options
@click.option("--seed", type=int, default=0, show_default=True, help="Of the data, and of the schedule.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("gemmsmith-output"),
    show_default=True,
    help="Folder for the timeline's picture and trace.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")  # fmt: skip
def simulate(seed: int, output: Path, as_json: bool, **choices: Any) -> None:
    """Executes a kernel on the CPU, checks every barrier and hazard, and draws its timeline."""
    with _ErrorsInALine():
        plan, sizes = _plan(choices, CPU_SIZES)
        with Console(stderr=True).status(f"{plan.config} in the simulator"):
            outcome = execute(plan, sizes, choices["layout"], "sim", seed, output)
        _report(plan, outcome, as_json)
        if not outcome.ok:
            raise SystemExit(1)


class _ErrorsInALine:
    """A user's error is one line, not a traceback."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, GemmsmithError):
            raise click.ClickException(str(error)) from None


def _resolve(backend: str) -> str:
    if backend != "auto":
        return backend
    from gemmsmith.backends.cuda import driver

    return "cuda" if driver.available() else "sim"


def _plan(choices: dict[str, Any], sizes: tuple[int, int, int]) -> tuple[Plan, tuple[int, int, int]]:
    """The plan for the options; what is not given is the plan's own, on a CPU or beside a given tile the flagship's."""
    m, n, k = (choices[name] if choices[name] is not None else size for name, size in zip("mnk", sizes, strict=True))
    a, b = operand_specs((m, n, k), choices["layout"], choices["dtype"])
    arguments = {"out_dtype": choices["out_dtype"], "accumulate": choices["accumulate"]}
    given = {f.name: choices[f.name] for f in fields(Config) if choices[f.name] is not None}
    own = sizes == GPU_SIZES and "tile" not in given
    config: Config = Plan(a, b, **arguments).config if own else Config()
    if given:
        from gemmsmith.tuning.choose import fitted
        from gemmsmith.tuning.space import fitting

        config = fitted(replace(config, **given), given, fp16=as_dtype(choices["accumulate"]) == FP16)
        if "stages" not in given:
            config = fitting(config, Plan(a, b, config=config, **arguments).spec)
    return Plan(a, b, config=config, **arguments), (m, n, k)


def operand_specs(sizes: tuple[int, int, int], layout: str, dtype: str) -> tuple[Spec, Spec]:
    """Stand-ins for A (m, k) and B (k, n), row-major (n) or column-major (t)."""
    m, n, k = sizes
    a = Spec((m, k), dtype, None if layout[0] == "n" else (1, max(m, 1)))
    b = Spec((k, n), dtype, None if layout[1] == "n" else (1, max(k, 1)))
    return a, b


def _report(plan: Plan, outcome: Outcome, as_json: bool) -> None:
    rows = outcome.rows(plan)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name.replace("_", " "), str(value))
    Console().print(table)
