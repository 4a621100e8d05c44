"""gemmsmith explain: an epilogue as a visitor tree, pass by pass."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gemmsmith.arrays import Spec
from gemmsmith.core.errors import GemmsmithError

KINDS = ("number", "scalar", "row", "column", "matrix")


@click.command()
@click.option("--epilogue", required=True, help="module:function or file.py:function; or the name of a ready-made one.")
@click.option("--operand", "operands", multiple=True, help="name=kind; a kind is " + ", ".join(KINDS) + ".")
@click.option("--m", default=4096, show_default=True, help="Rows of the product.")
@click.option("--n", default=4096, show_default=True, help="Columns of the product.")
@click.option("--k", default=4096, show_default=True, help="What is summed.")
@click.option("--dtype", default="bf16", show_default=True, help="Of A, B and the operands.")
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), help="Draws the graph before and after.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def explain(
    epilogue: str, operands: tuple[str, ...], m: int, n: int, k: int, dtype: str, picture: Path | None, as_json: bool
) -> None:
    """Shows an epilogue as a visitor tree: as written, and after each pass that changes it."""
    from gemmsmith.epilogue.passes import optimise, steps
    from gemmsmith.epilogue.show import pictures, tree
    from gemmsmith.plans import Plan

    try:
        given = dict(_operand(text, m, n, dtype) for text in operands)
        plan = Plan(Spec((m, k), dtype), Spec((k, n), dtype), epilogue=_function(epilogue), operands=given)
    except GemmsmithError as error:
        raise click.ClickException(str(error)) from None
    assert plan.bound
    written = plan.bound.written
    shown = [("as written", written), *steps(written)]
    if picture:
        pictures([shown[0], ("after the passes", optimise(written))], picture)
    if as_json:
        click.echo(json.dumps([{"step": name, "tree": tree(graph)} for name, graph in shown], indent=1))
        return
    for name, graph in shown:
        click.secho(f"{name}:", bold=True)
        click.echo(tree(graph) + "\n")
    if picture:
        click.echo(f"picture: {picture}")


def _operand(text: str, m: int, n: int, dtype: str) -> tuple[str, Any]:
    name, _, kind = text.partition("=")
    shapes = {"scalar": (), "row": (n,), "column": (m, 1), "matrix": (m, n)}
    if not name.isidentifier() or kind not in KINDS:
        raise click.BadParameter(f"{text!r}: use name=kind with a kind of {', '.join(KINDS)}", param_hint="--operand")
    return name, 1.0 if kind == "number" else Spec(shapes[kind], dtype)


def _function(text: str) -> Callable[..., Any]:
    """The function that `module:function`, `file.py:function` or a ready-made name means."""
    from gemmsmith.epilogue.fusions import FUSIONS

    if text in FUSIONS:
        return FUSIONS[text].make()
    where, _, name = text.rpartition(":")
    if not where:
        raise click.BadParameter(
            f"{text!r}: use module:function, file.py:function, or one of {', '.join(FUSIONS)}", param_hint="--epilogue"
        )
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules.setdefault(module.__name__, module)
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, "")
            module = importlib.import_module(where)
        function: Callable[..., Any] = getattr(module, name)
    except (ImportError, OSError, AttributeError) as error:
        raise click.BadParameter(f"{text!r}: {error}", param_hint="--epilogue") from None
    return function
