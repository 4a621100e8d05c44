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
@click.option(
    "--rows",
    type=options.GROUP_SIZES,
    metavar="M,M...",
    default=(),
    help="M of further plans. The header chooses by M: each plan serves M up to its own.",
)
@options.as_json
def export(
    sizes: options.PartialSizes, output: Path, name: str, rows: tuple[int, ...], as_json: bool, **choices: Any
) -> None:  # fmt: skip
    """Write a kernel and one C header that launches it, for any M, N and K; needs no GPU.

    The files are NAME.h with the cubin in it, NAME.cu, NAME.cubin, and NAME.json with the arguments. The config is the
    one of the given sizes, by default 4096, and so are the layouts and the alignment.

    \b
    Example: gemmsmith export 64x4096x4096 --epilogue LinCombPerColBiasEltAct --output build
    """
    with progress_bar() as progress:
        progress("choosing a config")
        m, n, k = options.complete_sizes(sizes, (4096,) * 3, choices["groups"])
        plans = [Plan(make_plan(make_request(choices, (rows, n, k)), choices)) for rows in dict.fromkeys((m, *rows))]
        progress("finding what the kernel's arguments depend on")
        header = plans[0].export(output, name, plans[1:])
    files = {x.suffix[1:]: str(x) for x in (header, *(header.with_suffix(f".{y}") for y in ("cu", "cubin", "json")))}
    text = "\n".join(click.style(f"{kind:<6}", bold=True) + path for kind, path in files.items())
    print_outcome({"configs": [str(x.config) for x in plans], "files": files}, text, None, as_json)
