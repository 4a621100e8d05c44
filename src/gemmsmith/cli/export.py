"""`gemmsmith export | bundle`: kernels and C headers that launch them without Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from gemmsmith.cli import options
from gemmsmith.cli.options import progress_bar
from gemmsmith.cli.problem import make_plan, make_request
from gemmsmith.cli.tables import print_outcome
from gemmsmith.core.errors import ArgumentError
from gemmsmith.host.plans import Plan

output_folder = click.option("--output", type=click.Path(file_okay=False, writable=True, path_type=Path),
                             default=Path("."), show_default=True, help="Folder for the files.")  # fmt: skip
REGISTRY = """// All kernels of this folder. Made by gemmsmith.
#pragma once
{includes}

struct bundle {{
{members}

    // Loads the kernels into the current context; find(context, name) finds the driver's functions. Returns the first
    // status that is not 0: NAME_error(status) has its text; -1 if a function of the driver is missing.
    int load(void *(*find)(void *, const char *), void *context) {{
        int status = 0;
{loads}
        return status;
    }}
    // No launch may be running.
    void unload() {{
{unloads}
    }}
}};
"""
"""bundle.hpp."""


@click.command(cls=options.ProblemCommand)
@options.problem
@output_folder
@click.option("--name", default="gemm", show_default=True, help="Prefix of the header's functions, a C identifier.")
@click.option(
    "--rows",
    type=options.GROUP_SIZES,
    metavar="M,M...",
    default=(),
    help="M of further plans. The header chooses by M: each plan serves M up to its own.",
)
@click.option("--tvm-ffi", is_flag=True, help="Also write NAME_tvm_ffi.cc, a function for PyTorch and JAX.")
@options.as_json
def export(
    sizes: options.PartialSizes, output: Path, name: str, rows: tuple[int, ...], tvm_ffi: bool, as_json: bool,
    **choices: Any,
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
        plans = [Plan(make_plan(make_request(choices, (x, n, k)), choices)) for x in dict.fromkeys((m, *rows))]
        progress("finding what the kernel's arguments depend on")
        header = plans[0].export(output, name, plans[1:], tvm_ffi=tvm_ffi)
    files = {x.suffix[1:]: str(x) for x in (header, *(header.with_suffix(f".{y}") for y in ("cu", "cubin", "json")))}
    if tvm_ffi:
        files["cc"] = str(header.with_name(f"{name}_tvm_ffi.cc"))
    text = "\n".join(click.style(f"{kind:<6}", bold=True) + path for kind, path in files.items())
    print_outcome({"configs": [str(x.config) for x in plans], "files": files}, text, None, as_json)


@click.command()
@click.argument("problems", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@output_folder
@options.as_json
def bundle(problems: Path, output: Path, as_json: bool) -> None:
    """Export all GEMMs of a file into one folder, compiled in parallel; needs no GPU.

    PROBLEMS is a JSON list of objects. Each has "shape" ("MxNxK"), "name", and other options of `gemmsmith export` by
    their names, such as {"rows": "16,256", "operand": ["bias=row"], "swap-ab": true}. bundle.hpp has a struct of all
    kernels, which loads them. The folder cache inside is one that Python finds its kernels in: GEMMSMITH_CACHE_DIR.

    \b
    Example: gemmsmith bundle problems.json --output build
    """
    items = _read(problems)
    environment = {**os.environ, "GEMMSMITH_CACHE_DIR": str(output.absolute() / "cache")}
    found = []
    with progress_bar() as progress, ThreadPoolExecutor(os.cpu_count()) as pool:
        progress("exporting", 0.0)
        for x in pool.map(lambda item: _exported(item, output, environment), items):
            found.append(x)
            progress("exporting", len(found) / len(items))
    names = [x["name"] for x in items]
    load = "if (!status) {{ {0}_driver d; status = {0}_find_driver(&d, find, context) ? {0}_load(&{0}, &d) : -1; }}"
    lines = {"includes": '#include "{0}.h"', "members": "    {0}_kernels {0} = {{}};", "loads": f"        {load}",
             "unloads": "        {0}_unload(&{0});"}  # fmt: skip
    parts = {part: "\n".join(line.format(x) for x in names) for part, line in lines.items()}
    (output / "bundle.hpp").write_text(REGISTRY.format(**parts), "utf-8")
    outcome = dict(zip(names, found, strict=True))
    text = "\n".join(f"{click.style(name, bold=True)}  {', '.join(x['configs'])}" for name, x in outcome.items())
    print_outcome(outcome, f"{text}\n{output / 'bundle.hpp'}", None, as_json)


def _read(file: Path) -> list[dict[str, Any]]:
    """Return the file's list. Raises ArgumentError if it is none of objects with names of their own."""
    try:
        items = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ArgumentError(f"{file}: got no JSON: {error}") from None
    if not isinstance(items, list) or not items or not all(isinstance(x, dict) and "name" in x for x in items):
        raise ArgumentError(f'{file}: use a list of objects such as {{"name": "up", "shape": "64x4096x4096"}}')
    names = [str(x["name"]) for x in items]
    if twice := {x for x in names if names.count(x) > 1}:
        raise ArgumentError(f"{file}: got the name {min(twice)!r} twice; use a name for each")
    return items


def _exported(item: Mapping[str, Any], output: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what `gemmsmith export --json` says of one GEMM. Raises ArgumentError with its message if it fails."""
    command = [sys.executable, "-m", "gemmsmith", "export", "--json", "--output", str(output), *_words(item)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    try:
        result: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise ArgumentError(f"{item['name']}: {done.stderr.strip() or f'exit code {done.returncode}'}") from None
    if "error" in result:
        raise ArgumentError(f"{item['name']}: {result['error']['message']}")
    return result


def _words(item: Mapping[str, Any]) -> Iterator[str]:
    for option, value in item.items():
        for x in value if isinstance(value, list) else [value]:
            if option == "shape":
                yield str(x)
            elif x is not False:
                yield f"--{option}" if x is True else f"--{option}={x}"
