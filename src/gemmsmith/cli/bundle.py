"""`gemmsmith bundle`: all kernels of a deployment in one folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from gemmsmith.cli import options
from gemmsmith.cli.progress import progress_bar
from gemmsmith.cli.tables import print_outcome
from gemmsmith.core.errors import ArgumentError

REGISTRY = """// All kernels of this folder. Made by gemmsmith.
#ifndef BUNDLE_HPP
#define BUNDLE_HPP
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
#endif
"""


@click.command()
@click.argument("problems", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--output", type=click.Path(file_okay=False, writable=True, path_type=Path), default=Path("bundle"),
              show_default=True, help="Folder for the files.")  # fmt: skip
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
    (output / "bundle.hpp").write_text(_registry(names), "utf-8")
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
    """Yield the arguments of `gemmsmith export` for one GEMM."""
    for option, value in item.items():
        for x in value if isinstance(value, list) else [value]:
            if option == "shape":
                yield str(x)
            elif x is not False:
                yield f"--{option}" if x is True else f"--{option}={x}"


def _registry(names: Sequence[str]) -> str:
    """Return bundle.hpp."""
    load = "if (!status) {{ {0}_driver d; status = {0}_find_driver(&d, find, context) ? {0}_load(&{0}, &d) : -1; }}"
    return REGISTRY.format(
        includes="\n".join(f'#include "{x}.h"' for x in names),
        members="\n".join(f"    {x}_kernels {x} = {{}};" for x in names),
        loads="\n".join("        " + load.format(x) for x in names),
        unloads="\n".join(f"        {x}_unload(&{x});" for x in names),
    )
