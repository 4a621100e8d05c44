"""Options that several commands have, and the types of their values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from gemmsmith.core.chip import CHIPS
from gemmsmith.core.config import Eviction
from gemmsmith.core.design import names

PICTURES = (".png", ".svg", ".pdf")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Sizes(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Integers from 1 joined by x: 128x256x64."""

    name = "sizes"

    def __init__(self, count: int, example: str) -> None:
        self.count, self.example = count, example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        parts = str(value).lower().split("x")
        if len(parts) != self.count or not all(p.isdecimal() and len(p) < 20 and int(p) for p in parts):
            wanted = f"{self.count} integers joined by x, at least 1 each, such as {self.example}"
            self.fail(f"{value!r} is not {wanted}", param, ctx)
        return tuple(int(p) for p in parts)


class Picture(click.Path):
    """A path to draw into: its suffix is one of PICTURES, and its folder exists."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        super().convert(value, param, ctx)
        path = Path(value)
        if path.suffix.lower() not in PICTURES:
            self.fail(f"{str(path)!r}: use a file that ends in {', '.join(PICTURES)}", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"{str(path)!r}: there is no folder {str(path.parent)!r}; make it, or use another", param, ctx)
        return path


def every(*options: Decorator) -> Decorator:
    """Several options as one decorator, in order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def sizes(least: int = 0, **defaults: int) -> Decorator:
    """--m, --n, --k."""
    meaning = {"m": "Rows of A and D.", "n": "Columns of B and D.", "k": "Columns of A, rows of B: what is summed."}
    return every(
        *(
            click.option(f"--{name}", type=click.IntRange(min=least), default=defaults.get(name),
                         show_default=name in defaults, help=text)
            for name, text in meaning.items()
        )
    )  # fmt: skip


OPERANDS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "fp32")
dtype = every(
    click.option("--dtype", type=click.Choice(OPERANDS), default="bf16", show_default=True, help="Of the operands."),
    click.option(
        "--precision", type=click.Choice(["tf32", "3xtf32"]), help="Of products of fp32, which are in fp32 without."
    ),
)
accumulate = click.option(
    "--accumulate", type=click.Choice(["fp32", "fp16", "promoted", "fast", "int32"]),
    help="What sums are kept in: fp16 for fp16 only; promoted or fast for fp8.  [default: fp32, promoted, int32]",
)  # fmt: skip
SCALES = ("tensor", "rows", "1x128", "128x128")
picture = click.option("--picture", type=Picture(), help=f"Draws it into a file: {', '.join(PICTURES)}.")
as_json = click.option("--json", "as_json", is_flag=True, help="JSON instead of text; errors too.")

problem = every(
    sizes(),
    dtype,
    click.option("--dtype-b", type=click.Choice(OPERANDS), help="Of B, where it is another: one of fp8."),
    click.option("--out-dtype", type=click.Choice(["bf16", "fp16", "fp32", "int32"]),
                 help="Of D.  [default: the operands'; bf16 for fp8, int32 for int8]"),
    accumulate,
    *(click.option(f"--scale-{x}", type=click.Choice(SCALES), help=f"What shares a scale of {y}; blocks for fp8 only.")
      for x, y in (("a", "A"), ("b", "B, seen as N x K"))),
    click.option("--layout", type=click.Choice(["nn", "nt", "tn", "tt"]), default="nt", show_default=True,
                 help="A and B: n row-major, t column-major."),
    click.option("--design", type=click.Choice(names()), help="The kernel's design."),
    click.option("--tile", type=Sizes(3, "128x256x64"), metavar="MxNxK", help="A CTA's tile."),
    click.option("--stages", type=int, help="Pipeline stages."),
    click.option("--consumers", type=int, help="Math warpgroups."),
    click.option("--cluster", type=Sizes(2, "2x1"), metavar="MxN", help="CTAs of a cluster."),
    click.option("--raster", type=click.Choice(["m", "n"]), help="The index consecutive tiles run along."),
    click.option("--raster-group", type=int, help="Width of a raster band, in tiles."),
    click.option("--splits", type=int, help="Clusters that share the K of a tile; 0: stream-K."),
    click.option("--cluster-splits", type=int, help="CTAs of a cluster that share the K of a tile."),
    click.option("--swap-ab/--no-swap-ab", default=None, help="Compute D^T, for few rows."),
    click.option("--evict", nargs=2, type=click.Choice(get_args(Eviction)), help="L2 policies of A, B."),
    click.option("--streaming-stores/--no-streaming-stores", default=None, help="The L2 evicts D first."),
    click.option("--pdl/--no-pdl", default=None, help="Programmatic dependent launch."),
    click.option("--alias-epilogue/--no-alias-epilogue", default=None, help="Results leave through A and B's stages."),
    click.option("--serpentine/--no-serpentine", default=None, help="Every other tile backwards through K."),
    click.option("--chip", type=click.Choice(list(CHIPS)), help="What the kernel is compiled for."),
    click.option("--batch-invariant", is_flag=True, help="Rows of D do not depend on M."),
    click.option("--sync-clusters/--no-sync-clusters", default=None, help="Clusters wait for one another."),
)  # fmt: skip
"""What is computed, and by which kernel: the fields of a Config."""

execution = every(
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True,
                 help="Of the data, and of the simulator's schedule."),
    click.option("--output", type=click.Path(file_okay=False, writable=True, path_type=Path),
                 default=Path("gemmsmith-output"), show_default=True,
                 help="Folder for the CUDA file, the timeline's picture and its trace."),
    as_json,
)  # fmt: skip
