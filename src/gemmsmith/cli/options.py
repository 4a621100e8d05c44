"""Options shared by several commands, the types of their values, and the progress of long commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Protocol, get_args

import click

from gemmsmith.core.chip import CHIPS
from gemmsmith.core.config import Config, Eviction
from gemmsmith.core.design import design_names
from gemmsmith.core.errors import ArgumentError

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Integers(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Click's type of integers joined by a separator, for which `is_valid` holds.

    `expected` describes valid values in error messages.
    """

    name = "integers"

    def __init__(self, separator: str, expected: str, is_valid: Callable[[tuple[int, ...]], bool]) -> None:
        self.separator, self.expected, self.is_valid = separator, expected, is_valid

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        parts = str(value).lower().split(self.separator)
        numbers = tuple(int(p) for p in parts if p.isdecimal() and len(p) < 20)
        if len(numbers) < len(parts) or not self.is_valid(numbers):
            self.fail(f"{value!r} is not {self.expected}", param, ctx)
        return numbers


def joined_sizes(count: int, example: str, minimum: int = 1) -> Integers:
    """Return the type of `count` integers joined by x: 128x256x64."""
    expected = f"{count} integers joined by x, at least {minimum} each, such as {example}"
    return Integers("x", expected, lambda numbers: len(numbers) == count and min(numbers) >= minimum)


GROUP_SIZES = Integers(",", "integers joined by commas, not all 0, such as 100,0,257", any)
"""Rows of groups: 100,0,257."""


class Picture(click.Path):
    """Path of a picture to write: its suffix is one of PICTURE_SUFFIXES, and its folder exists."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        super().convert(value, param, ctx)
        path = Path(value)
        if path.suffix.lower() not in PICTURE_SUFFIXES:
            self.fail(f"{str(path)!r}: use a file that ends in {', '.join(PICTURE_SUFFIXES)}", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"{str(path)!r}: there is no folder {str(path.parent)!r}; create it, or use another", param, ctx)
        return path


def combine_options(*options: Decorator) -> Decorator:
    """Return several options as one decorator, in order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def sizes(minimum: int) -> Decorator:
    """Return a decorator that adds the argument MxNxK, and the options --m, --n and --k to give its parts.

    The command receives `sizes`, (m, n, k), each None where it is not given.
    """
    type_ = joined_sizes(3, "512x4096x4096", minimum)
    argument = click.argument("shape", required=False, type=type_, metavar="[MxNxK]")
    descriptions = {"m": "Rows of A and D.", "n": "Columns of B and D.", "k": "Columns of A, rows of B."}
    parts = combine_options(
        *(click.option(f"--{name}", type=click.IntRange(min=minimum), help=x) for name, x in descriptions.items())
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_sizes(*args: Any, shape: PartialSizes | None, m: Any, n: Any, k: Any, **options: Any) -> Any:
            if shape and (m, n, k) != (None, None, None):
                raise click.UsageError("MxNxK: got it beside --m, --n or --k; use either")
            return command(*args, sizes=shape or (m, n, k), **options)

        return parts(argument(with_sizes))

    return decorate


PartialSizes = tuple[int | None, int | None, int | None]
"""M, N and K of a command line; None where it leaves the command's default."""


def complete_sizes(
    sizes: PartialSizes, default: tuple[int, int, int], groups: tuple[int, ...] | None = None
) -> tuple[int, int, int]:
    """Return m, n, k: those of `sizes` that are given; else m is the sum of `groups`, others are those of `default`.

    `groups`: rows of each group. Raises ArgumentError if they have more rows than m.
    """
    if groups:
        default = sum(groups), *default[1:]
    m, n, k = (x if given is None else given for given, x in zip(sizes, default, strict=True))
    if groups and sum(groups) > m:
        raise ArgumentError(f"--groups: got {sum(groups)} rows in all, and --m {m}; use a larger --m")
    return m, n, k


OPERANDS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "fp32")
dtype = combine_options(
    click.option("--dtype", type=click.Choice(OPERANDS), default="bf16", show_default=True,
                 help="Data type of A and B."),
    click.option("--precision", type=click.Choice(["tf32", "3xtf32"]),
                 help="Tensor-core precision for fp32 operands; without it they are multiplied in fp32."),
)  # fmt: skip
accumulate = click.option(
    "--accumulate", type=click.Choice(["fp32", "fp16", "promoted", "fast", "int32"]),
    help="Accumulation: fp16 (fp16 only), promoted or fast (fp8 only).  [default: fp32, promoted, int32]",
)  # fmt: skip
layout = click.option("--layout", type=click.Choice(["nn", "nt", "tn", "tt"]), default="nt", show_default=True,
                      help="A and B: n row-major, t column-major. C-contiguous arrays in Python are nn.")  # fmt: skip
SCALES = ("tensor", "rows", "1x128", "128x128")
picture = click.option("--picture", type=Picture(), help=f"Plot into a file: {', '.join(PICTURE_SUFFIXES)}.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text, errors included.")

OPERAND_KINDS = ("number", "scalar", "row", "column", "matrix")
kind = combine_options(
    click.option("--batch", type=click.IntRange(1), help="How many products: A is (batch, M, K), B (batch, K, N)."),
    click.option("--groups", type=GROUP_SIZES, metavar="ROWS,ROWS...",
                 help="Rows of each group of a grouped GEMM; M is their sum unless given."),
    dtype,
    click.option("--dtype-b", type=click.Choice(OPERANDS), help="Data type of B if it differs from A (fp8 only)."),
    click.option("--out-dtype", type=click.Choice(["bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2", "int32"]),
                 help="Data type of D.  [default: that of A and B; bf16 for fp8, int32 for int8]"),
    accumulate,
    *(click.option(f"--scale-{x}", type=click.Choice(SCALES),
                   help=f"Granularity of the scales of {y}; block scales for fp8 only.")
      for x, y in (("a", "A"), ("b", "B, seen as N x K"))),
    layout,
    click.option("--epilogue", help="module:function or file.py:function; or the name of a predefined one."),
    click.option("--operand", "operands", multiple=True,
                 help=f"An operand of the epilogue, name=kind, repeatable; a kind is {', '.join(OPERAND_KINDS)}."),
    click.option("--batch-invariant", is_flag=True, help="Make rows of D independent of M."),
)  # fmt: skip
"""The problem but for its sizes."""
gemm = combine_options(sizes(0), kind)
"""The problem: what `gemmsmith.cli.problem` makes a request of."""
problem = combine_options(
    gemm,
    click.option("--config", "config_base", type=click.Choice(["auto", "default"]), default="auto", show_default=True,
                 help="What the options below change. auto: the config that gemm takes, or the default one if there is "
                      "a --tile; default: gemmsmith.Config()."),
    click.option("--design", type=click.Choice(design_names()), help="The kernel's design."),
    click.option("--tile", type=joined_sizes(3, "128x256x64"), metavar="MxNxK", help="A CTA's tile."),
    click.option("--stages", type=int, help="Pipeline stages."),
    click.option("--consumers", type=int, help="Math warpgroups."),
    click.option("--cluster", type=joined_sizes(2, "2x1"), metavar="MxN", help="CTAs of a cluster."),
    click.option("--raster", type=click.Choice(["m", "n"]), help="Dimension along which consecutive tiles run."),
    click.option("--raster-group", type=int, help="Width of a raster band, in tiles."),
    click.option("--splits", type=int, help="Clusters that share the K of a tile; 0: stream-K."),
    click.option("--cluster-splits", type=int, help="CTAs of a cluster that share the K of a tile."),
    click.option("--swap-ab/--no-swap-ab", default=None, help="Compute D^T, for few rows."),
    click.option("--evict", nargs=2, type=click.Choice(get_args(Eviction)), help="L2 policies of A, B."),
    click.option("--streaming-stores/--no-streaming-stores", default=None,
                 help="Store D with the L2 policy evict_first."),
    click.option("--alias-epilogue/--no-alias-epilogue", default=None,
                 help="Reuse the mainloop's shared memory in the epilogue."),
    click.option("--serpentine/--no-serpentine", default=None, help="Traverse K in reverse for every other tile."),
    click.option("--chip", type=click.Choice(list(CHIPS)), help="Architecture that the kernel is compiled for."),
    click.option("--sync-clusters/--no-sync-clusters", default=None, help="Synchronize clusters every few k-tiles."),
)  # fmt: skip
"""The problem, and the fields of a Config."""


class ProblemCommand(click.Command):
    """A command with the options of `problem`: its --help has sections for the problem, the config and the others."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Problem": [], "Config (see gemmsmith.Config)": [], "Options": []}
        of_problem, of_config, others = sections.values()
        of_decorator = {parameter.name for parameter in problem(lambda: None).__click_params__}  # type: ignore[attr-defined]
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record and isinstance(parameter, click.Option):
                is_config = parameter.name in Config.__dataclass_fields__ or parameter.name == "config_base"
                (of_config if is_config else of_problem if parameter.name in of_decorator else others).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


execution = combine_options(
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True,
                 help="Seed of the random operands and of the simulated schedule."),
    click.option("--output", type=click.Path(file_okay=False, writable=True, path_type=Path),
                 default=Path("gemmsmith-output"), show_default=True,
                 help="Folder for the CUDA file, the plot of the timeline, and its trace."),
    as_json,
)  # fmt: skip


class ProgressCallback(Protocol):
    """Progress callback: the current step, and the completed fraction if known."""

    def __call__(self, step: str, fraction: float | None = None) -> None:
        """Report progress."""


@contextmanager
def progress_bar() -> Iterator[ProgressCallback]:
    """Display one line per step, with its percentage; nothing if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda step, fraction=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as display:
        tasks = {}

        def progress(step: str, fraction: float | None = None) -> None:
            if step not in tasks:
                tasks[step] = display.add_task(step, total=None if fraction is None else 1)
            display.update(tasks[step], completed=fraction)

        yield progress
