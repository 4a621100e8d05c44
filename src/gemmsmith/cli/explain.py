"""gemmsmith explain: an epilogue as a visitor tree, pass by pass."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import gemmsmith
from gemmsmith.arrays import Spec
from gemmsmith.cli import options
from gemmsmith.core.errors import EpilogueError, GemmsmithError
from gemmsmith.epilogue.frontend.fusions import FUSIONS, amax
from gemmsmith.epilogue.frontend.show import pictures, tree
from gemmsmith.epilogue.passes import optimize, steps
from gemmsmith.plans import Plan

PACKAGE = str(Path(gemmsmith.__file__).parent)
KINDS = ("number", "scalar", "row", "column", "matrix")
CHOICES: dict[str, Any] = {"activation": "gelu", "k": 2, "epilogue": amax}
"""Arguments for the factories of ready-made epilogues, by parameter name."""


@click.command()
@click.option("--epilogue", required=True, help="module:function or file.py:function; or the name of a ready-made one.")
@click.option("--operand", "operands", multiple=True,
              help=f"name=kind, again for each; a kind is {', '.join(KINDS)}.")  # fmt: skip
@options.sizes(m=4096, n=256, k=4096)
@options.dtype
@options.picture
@options.as_json
def explain(
    epilogue: str, operands: tuple[str, ...], m: int, n: int, k: int, dtype: str, precision: str | None,
    picture: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Shows an epilogue as a visitor tree, pass by pass.

    It is printed as written, and after each pass that changes it; the picture shows it before and after all of them. A
    ready-made one has its own operands, and gelu where it takes an activation.

    \b
    Example: gemmsmith explain --epilogue LinCombPerColBiasEltAct --operand beta=row
    """
    function, kinds = _found(epilogue)
    kinds |= dict(_operand(text) for text in operands)
    shapes = {"scalar": (), "row": (n,), "column": (m, 1), "matrix": (m, n)}
    a, b = Spec((m, k), dtype), Spec((k, n), dtype)
    stored = dtype if a.dtype.bits > 8 else "bf16"
    given = {name: 1.0 if kind == "number" else Spec(shapes[kind], stored) for name, kind in kinds.items()}
    try:
        plan = Plan(a, b, epilogue=function, operands=given, precision=precision)
    except GemmsmithError:
        raise
    except Exception as error:
        if not _frames(error):
            raise
        raise _raised(epilogue, error) from error
    written = plan.binding.written
    shown = [("as written", written), *steps(written)]
    if picture:
        pictures([shown[0], ("after the passes", optimize(written))], picture)
    if as_json:
        click.echo(json.dumps([{"step": name, "tree": tree(graph)} for name, graph in shown], indent=2))
        return
    for name, graph in shown:
        click.secho(f"{name}:", bold=True)
        click.echo(tree(graph) + "\n")
    if picture:
        click.echo(f"picture: {picture}")


def _operand(text: str) -> tuple[str, str]:
    name, _, kind = text.partition("=")
    if not name.isidentifier() or kind not in KINDS:
        raise click.BadParameter(f"{text!r}: use name=kind with a kind of {', '.join(KINDS)}", param_hint="--operand")
    return name, kind


def _found(text: str) -> tuple[Callable[..., Any], dict[str, str]]:
    """The function that `module:function`, `file.py:function` or a ready-made name means, and its operands' kinds where
    they are known."""
    if text in FUSIONS:
        fusion = FUSIONS[text]
        taken = inspect.signature(fusion.make).parameters
        chosen = {name: x for name, x in CHOICES.items() if name in taken and name in fusion.meaning}
        return fusion.make(**chosen), dict(fusion.operands)
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
        return getattr(module, name), {}
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise _raised(text, error) from error


def _raised(text: str, error: BaseException) -> EpilogueError:
    """An error message with what the user's code raised, and at which line."""
    where = "".join(f" at {Path(f.filename).name}:{f.lineno}: {f.line}" for f in _frames(error)[-1:])
    return EpilogueError(f"--epilogue {text}: {type(error).__name__}: {error}{where}")


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The user's frames that an error went through."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f for f in frames if not f.filename.startswith(PACKAGE) and "importlib" not in f.filename]
