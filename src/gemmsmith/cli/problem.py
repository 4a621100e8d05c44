"""The problem of a command line: its request, in which Specs take the arrays' places, and its plan."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

import gemmsmith
from gemmsmith.arrays import Spec
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.cli.options import OPERAND_KINDS
from gemmsmith.core.chip import get_chip
from gemmsmith.core.config import Config
from gemmsmith.core.errors import ArgumentError, EpilogueError, GemmsmithError
from gemmsmith.core.grouping import Grouping
from gemmsmith.core.problem import SCALE_BLOCK
from gemmsmith.core.scalars import ceil_div
from gemmsmith.graph.frontend.fusions import NAMED_FUSIONS, amax
from gemmsmith.host.planned_gemm import PlannedGemm
from gemmsmith.tuning.model import covers_config

Choices = Mapping[str, Any]
"""Values of the options `options.problem`, by name."""
Sizes = tuple[int, int, int]
"""m, n, k."""
PACKAGE_FOLDER = str(Path(gemmsmith.__file__).parent)
DEFAULT_FACTORY_ARGUMENTS: dict[str, Any] = {"activation": "gelu", "k": 2, "epilogue": amax}
"""Arguments of the factories of predefined epilogues, by parameter name."""


def make_request(choices: Choices, sizes: Sizes) -> Request:
    """Return the request of the options of a command for `sizes`; numbers of its epilogue are 1.

    Raises ArgumentError for options that exclude each other, and EpilogueError if the user's module raises.
    """
    m, n, k = sizes
    batch, groups = choices["batch"], choices["groups"]
    if groups and batch:
        raise ArgumentError("--batch: got it with --groups; use one of them")
    leading_a, leading_b = ((batch,),) * 2 if batch else ((), (len(groups),) if groups else ())
    a = matrix((*leading_a, m, k), choices["dtype"], choices["layout"][0])
    b = matrix((*leading_b, k, n), choices["dtype_b"] or choices["dtype"], choices["layout"][1])
    scale_a = _scale_shape(m, k, choices["scale_a"], leading_a)
    scale_b = _scale_shape(n, k, choices["scale_b"], leading_b)
    epilogue, operands = _epilogue_and_operands(choices, m, n, leading_a)
    if groups:
        operands = {**operands, "sizes": Spec((len(groups),), "int32")}
    return Request(
        a, b, operands=operands, epilogue=epilogue,
        scale_a=None if scale_a is None else Spec(scale_a, "fp32"),
        scale_b=None if scale_b is None else Spec((*scale_b[:-2], *scale_b[:-3:-1]), "fp32"),
        grouping=Grouping("sizes") if groups else None,
        **{name: choices[name] for name in ("out_dtype", "accumulate", "precision", "batch_invariant")},
    )  # fmt: skip


def make_plan(request: Request, choices: Choices) -> PlannedGemm:
    """Return the plan of a request that `make_request` made of the options `choices`.

    Without options for fields of a Config, its config is the one that `gemm` takes. Otherwise the options replace
    fields of that config, or of `Config()` if a tile is given or with --config default; then the fields that are not
    given are adapted (`complete_config`), and as many stages as fit are taken.
    """
    try:
        return _plan_of(request, choices)
    except Exception as error:
        if isinstance(error, GemmsmithError) or not _user_frames(error):
            raise
        raise _user_error(choices["epilogue"], error) from error


def _plan_of(request: Request, choices: Choices) -> PlannedGemm:
    """Return the plan of a request with the config that `make_plan` documents."""
    fixed = {f.name: choices[f.name] for f in fields(Config) if choices.get(f.name) is not None}
    from_defaults = choices.get("config_base") == "default" or "tile" in fixed
    if not fixed and not from_defaults:
        return PlannedGemm(request)
    from gemmsmith.tuning.candidates import fit_stages
    from gemmsmith.tuning.choose import complete_config
    from gemmsmith.tuning.dtype_equivalence import config_for_dtype

    config: Config = config_for_dtype(Config(), request.a.dtype) if from_defaults else PlannedGemm(request).config
    fixed_fields, candidate = set(fixed), config.replace(**fixed)
    if "tile" not in fixed and not covers_config(candidate):
        from gemmsmith.tuning.choose_sm80 import rank_sm80

        binding = bind(request)
        config = rank_sm80(binding.problem, binding.spec, get_chip(candidate.chip))[0]
        fixed_fields |= {"design", "tile", "cluster", "consumers"}
    if fixed:
        config = complete_config(replace(config, **fixed), fixed_fields)
    if "stages" not in fixed:
        config = fit_stages(PlannedGemm(request._replace(config=config)).spec)
    return PlannedGemm(request._replace(config=config))


def matrix(shape: tuple[int, ...], dtype: str, layout: str) -> Spec:
    """Return the Spec of a matrix or a batch of them, row-major ("n") or column-major ("t")."""
    *leading, rows, columns = shape
    strides = (*[max(rows * columns, 1)] * len(leading), 1, max(rows, 1)) if layout == "t" else None
    return Spec(shape, dtype, strides)


def _scale_shape(rows: int, k: int, scale: str | None, leading: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of the scales of an operand seen as (rows, k), of a granularity of options.SCALES, or None."""
    blocks = ceil_div(k, SCALE_BLOCK)
    shapes = {"rows": (rows, 1), "1x128": (rows, blocks), "128x128": (ceil_div(rows, SCALE_BLOCK), blocks)}
    return (*leading, *shapes[scale]) if scale in shapes else () if scale else None


# -- the epilogue ------------------------------------------------------------------------------------------------------
def _epilogue_and_operands(choices: Choices, m: int, n: int, leading: tuple[int, ...]) -> tuple[Any, dict[str, Any]]:
    """Return the function of the option --epilogue, or None, and its operands: Specs, and 1 for numbers."""
    given = [_parse_operand(text) for text in choices["operands"]]
    if twice := [name for name, count in Counter(name for name, _ in given).items() if count > 1]:
        raise click.BadParameter(f"{twice[0]} is given twice; use one kind", param_hint="--operand")
    if not choices["epilogue"]:
        if given:
            raise click.UsageError("--operand: got it without --epilogue, whose operands these are; give one")
        return None, {}
    function, kinds = _load_epilogue(choices["epilogue"])
    shapes = {"scalar": (), "row": (n,), "column": (*leading, m, 1), "matrix": (*leading, m, n)}
    dtype = choices["dtype"] if Spec((1, 1), choices["dtype"]).dtype.bits > 8 else "bf16"
    kinds |= dict(given)
    return function, {name: 1.0 if kind == "number" else Spec(shapes[kind], dtype) for name, kind in kinds.items()}


def _parse_operand(text: str) -> tuple[str, str]:
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
            sys.modules.setdefault(module.__name__, module)  # where dataclasses look for it
            try:
                spec.loader.exec_module(module)
            except BaseException:
                if sys.modules[module.__name__] is module:
                    del sys.modules[module.__name__]
                raise
        else:
            sys.path.insert(0, "")
            module = importlib.import_module(source)
        return getattr(module, name), {}
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise _user_error(text, error) from error


def _user_error(text: str, error: BaseException) -> EpilogueError:
    """Return the error to raise if the user's code raises `error`: it names that and the last line of theirs."""
    location = "".join(f" at {Path(f.filename).name}:{f.lineno}: {f.line}" for f in _user_frames(error)[-1:])
    return EpilogueError(f"--epilogue {text}: {type(error).__name__}: {error}{location}")


def _user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error's traceback that are not gemmsmith's nor importlib's, so the user's."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f for f in frames if not f.filename.startswith(PACKAGE_FOLDER) and "importlib" not in f.filename]
