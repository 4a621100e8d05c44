"""`gemmsmith explain`: an epilogue as a visitor tree, pass by pass."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import gemmsmith
from gemmsmith.arrays import Spec
from gemmsmith.binding.request import Request
from gemmsmith.cli import options
from gemmsmith.cli.tables import print_outcome
from gemmsmith.core.errors import EpilogueError, GemmsmithError
from gemmsmith.graph.frontend.fusions import NAMED_FUSIONS, amax
from gemmsmith.graph.frontend.show import format_tree, plot_graphs
from gemmsmith.graph.passes import optimize, trace_passes
from gemmsmith.host.plans import Plan

PACKAGE_FOLDER = str(Path(gemmsmith.__file__).parent)
OPERAND_KINDS = ("number", "scalar", "row", "column", "matrix")
DEFAULT_FACTORY_ARGUMENTS: dict[str, Any] = {"activation": "gelu", "k": 2, "epilogue": amax}
"""Arguments of the factories of predefined epilogues, by parameter name."""


@click.command()
@click.option("--epilogue", required=True, help="module:function or file.py:function; or the name of a predefined one.")
@click.option("--operand", "operands", multiple=True,
              help=f"name=kind, repeatable; a kind is {', '.join(OPERAND_KINDS)}.")  # fmt: skip
@options.sizes(0)
@options.dtype
@options.picture
@options.as_json
def explain(
    sizes: options.PartialSizes, epilogue: str, operands: tuple[str, ...], dtype: str, precision: str | None,
    picture: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Show an epilogue as a visitor tree, pass by pass.

    It is printed as written, and after each pass that changes it; the picture shows it before and after all passes. A
    predefined epilogue has its own operands, and gelu if it takes an activation. The default sizes are 4096x256x4096.

    \b
    Example: gemmsmith explain --epilogue LinCombPerColBiasEltAct --operand beta=row
    """
    function, kinds = _load_epilogue(epilogue)
    given = [_parse_operand(text) for text in operands]
    if twice := [name for name, count in Counter(name for name, _ in given).items() if count > 1]:
        raise click.BadParameter(f"{twice[0]} is given twice; use one kind", param_hint="--operand")
    kinds |= dict(given)
    m, n, k = options.complete_sizes(sizes, (4096, 256, 4096))
    shapes = {"scalar": (), "row": (n,), "column": (m, 1), "matrix": (m, n)}
    a, b = Spec((m, k), dtype), Spec((k, n), dtype)
    operand_dtype = dtype if a.dtype.bits > 8 else "bf16"
    arrays = {name: 1.0 if kind == "number" else Spec(shapes[kind], operand_dtype) for name, kind in kinds.items()}
    try:
        plan = Plan(Request(a, b, operands=arrays, epilogue=function, precision=precision))
    except Exception as error:
        if isinstance(error, GemmsmithError) or not _user_frames(error):
            raise
        raise _user_error(epilogue, error) from error
    source_graph = plan.binding.source_graph
    graphs = [("as written", source_graph), *trace_passes(source_graph)]
    if picture:
        plot_graphs([graphs[0], ("after the passes", optimize(source_graph))], picture)
    steps = [{"step": name, "tree": format_tree(graph)} for name, graph in graphs]
    text = "\n".join(f"{click.style(x['step'] + ':', bold=True)}\n{x['tree']}\n" for x in steps)
    print_outcome(steps, text, picture, as_json)


def _parse_operand(text: str) -> tuple[str, str]:
    """Return the name and the kind of an operand from "name=kind"."""
    name, _, kind = text.partition("=")
    if not name.isidentifier() or kind not in OPERAND_KINDS:
        expected = f"use name=kind with a kind of {', '.join(OPERAND_KINDS)}"
        raise click.BadParameter(f"{text!r}: {expected}", param_hint="--operand")
    return name, kind


def _load_epilogue(text: str) -> tuple[Callable[..., Any], dict[str, str]]:
    """Return (epilogue function, kinds of its operands by name) for the option --epilogue.

    `text`: module:function or file.py:function, whose operands are not known; or the name of a predefined epilogue,
    which is made with DEFAULT_FACTORY_ARGUMENTS. Raises EpilogueError if the user's module raises.
    """
    if text in NAMED_FUSIONS:
        fusion = NAMED_FUSIONS[text]
        parameters = inspect.signature(fusion.make).parameters
        names = [name for name in DEFAULT_FACTORY_ARGUMENTS if name in parameters]
        return fusion.make(**{name: DEFAULT_FACTORY_ARGUMENTS[name] for name in names}), dict(fusion.operands)
    source, _, name = text.rpartition(":")
    if not source:
        expected = f"use module:function, file.py:function, or one of {', '.join(NAMED_FUSIONS)}"
        raise click.BadParameter(f"{text!r}: {expected}", param_hint="--epilogue")
    try:
        if source.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(source).stem, source)
            assert spec
            assert spec.loader
            module = importlib.util.module_from_spec(spec)
            sys.modules.setdefault(module.__name__, module)
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, "")
            module = importlib.import_module(source)
        return getattr(module, name), {}
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise _user_error(text, error) from error


def _user_error(text: str, error: BaseException) -> EpilogueError:
    """Return the error to raise if the user's code raises `error`: it names the exception and the last line of theirs.

    `text`: the option --epilogue.
    """
    location = "".join(f" at {Path(f.filename).name}:{f.lineno}: {f.line}" for f in _user_frames(error)[-1:])
    return EpilogueError(f"--epilogue {text}: {type(error).__name__}: {error}{location}")


def _user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error's traceback that are not gemmsmith's nor importlib's, so the user's."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f for f in frames if not f.filename.startswith(PACKAGE_FOLDER) and "importlib" not in f.filename]
