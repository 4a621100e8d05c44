"""`gemmsmith export`: a kernel as a cubin and one C header, which launches it for any sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from gemmsmith.cli import options
from gemmsmith.cli.options import PartialSizes, complete_sizes
from gemmsmith.cli.problem import make_plan, make_request
from gemmsmith.host.plans import Plan

SIZES = (4096, 4096, 4096)
"""Default m, n, k, for which the config is chosen."""


@click.command(cls=options.ProblemCommand)
@options.problem
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="The folder to write.")
@click.option("--name", default="gemm", show_default=True, help="The prefix of the header's functions.")
@options.as_json
def export(sizes: PartialSizes, out: Path, name: str, as_json: bool, **choices: Any) -> None:
    """Write a kernel and a C header that launches it for any m, n, k, strides and addresses.

    The config is chosen for the given sizes, by default 4096x4096x4096. Needs no GPU. The folder gets NAME.h, which has
    the cubin in it, NAME.cu, NAME.cubin and NAME.json; `Plan.export` describes them.

    \b
    Example: gemmsmith export 256x8192x4096 --epilogue bias_gelu --out build --name up_projection
    """
    request = make_request(choices, complete_sizes(sizes, SIZES, choices["groups"]))
    path = Plan(make_plan(request, choices)).export(out, name)
    files = [f"{file}" for file in sorted(path.parent.glob(f"{name}.*"))]
    click.echo(json.dumps({"header": f"{path}", "files": files}) if as_json else "\n".join(files))
