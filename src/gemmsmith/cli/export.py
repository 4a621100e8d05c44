"""`gemmsmith export`: a kernel and a C header that launches it without Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gemmsmith.cli import options
from gemmsmith.cli.problem import make_plan, make_request
from gemmsmith.cli.progress import progress_bar
from gemmsmith.cli.tables import print_outcome
from gemmsmith.host.plans import Plan


@click.command(cls=options.ProblemCommand)
@options.problem
@click.option("--output", type=click.Path(file_okay=False, writable=True, path_type=Path), default=Path("."),
              show_default=True, help="Folder for the files.")  # fmt: skip
@click.option("--name", default="gemm", show_default=True, help="Prefix of the header's functions, a C identifier.")
@options.as_json
def export(sizes: options.PartialSizes, output: Path, name: str, as_json: bool, **choices: Any) -> None:
    """Write a kernel and one C header that launches it, for any M, N and K; needs no GPU.

    The files are NAME.h with the cubin in it, NAME.cu, NAME.cubin, and NAME.json with the arguments. The config is the
    one of the given sizes, by default 4096, and so are the layouts and the alignment.

    \b
    Example: gemmsmith export 64x4096x4096 --epilogue LinCombPerColBiasEltAct --output build
    """
    with progress_bar() as progress:
        progress("choosing a config")
        plan = make_plan(make_request(choices, options.complete_sizes(sizes, (4096,) * 3, choices["groups"])), choices)
        progress("finding what the kernel's arguments depend on")
        header = Plan(plan).export(output, name)
    files = {x.suffix[1:]: str(x) for x in (header, *(header.with_suffix(f".{y}") for y in ("cu", "cubin", "json")))}
    text = "\n".join(click.style(f"{kind:<6}", bold=True) + path for kind, path in files.items())
    print_outcome({"config": str(plan.config), "files": files}, text, None, as_json)
