"""`gemmsmith doctor`: what of gemmsmith works on this machine, and what to do about what does not."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import click
from rich.filesize import decimal

import gemmsmith
from gemmsmith.cli import options
from gemmsmith.cli.group import FAILED
from gemmsmith.cli.tables import print_outcome
from gemmsmith.core.errors import GemmsmithError


class Finding(NamedTuple):
    """What was found of one thing that is checked.

    Attributes:
        what: The thing, such as "compiler".
        state: "ok", "absent" (something optional), or "broken".
        detail: Its version, name or path, or what is wrong.
        advice: What to do, or what the thing would add; "" for nothing.
    """

    what: str
    state: str
    detail: str
    advice: str = ""


@click.command()
@options.as_json
def doctor(as_json: bool) -> None:
    """Check the driver, the GPUs, the compiler, optional packages, the cache folder and the table of tuned configs.

    The exit code is 1 if something is broken. What is absent is optional, and the line says what it would add.

    \b
    Example: gemmsmith doctor
    """
    findings = list(examine())
    lines = [f"{x.state:<7} {x.what:<12} {x.detail}" + (f"\n{'':20} {x.advice}" if x.advice else "") for x in findings]
    print_outcome([x._asdict() for x in findings], "\n".join(lines), None, as_json)
    if any(x.state == "broken" for x in findings):
        raise SystemExit(FAILED)


def examine() -> Iterator[Finding]:
    """Yield the findings, the most basic first."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("numpy", "ml_dtypes"))
    yield Finding("gemmsmith", "ok", f"{gemmsmith.__version__}, Python {platform.python_version()}, {versions}")
    yield from _gpus()
    yield _attempt("compiler", _compile)
    yield _attempt("nvdisasm", _find_nvdisasm)
    yield _package("torch", "gemmsmith.torch, gradients and torch.compile need it: pip install torch")
    yield _package("transformers", "its models' experts as gemmsmith kernels need it: pip install transformers")
    yield _package("matplotlib", "pictures need it: pip install matplotlib")
    yield _cache()
    yield _tables()


def _gpus() -> Iterator[Finding]:
    """Yield what is found of the driver and of each GPU."""
    from gemmsmith.backends.cuda import driver

    if not driver.is_available():
        advice = "the simulator, the compiler and the reference work without one"
        yield Finding("GPU", "absent", "no CUDA driver, or no GPU", advice)
        return
    yield Finding("driver", "ok", f"CUDA {driver.driver_version()}")
    for i in range(driver.device_count()):
        gpu = driver.device_attributes(i)
        chip, capability = driver.newest_supported_chip(gpu), "{}.{}".format(*gpu.capability)
        detail = f"{gpu.name}, compute capability {capability}, {gpu.sm_count} SMs"
        if chip is None:
            yield Finding(f"GPU {i}", "broken", detail, "gemmsmith's kernels need compute capability 8.0 or later")
        elif not chip.has_wgmma:
            yield Finding(f"GPU {i}", "ok", detail, f"runs kernels of {chip}; TMA and WGMMA need an H100 or H200")
        else:
            yield Finding(f"GPU {i}", "ok", detail)


def _attempt(what: str, check: Callable[[], str]) -> Finding:
    """Return what `check` returns as an ok Finding; if it raises, a broken one with the first line of the error."""
    try:
        return Finding(what, "ok", check())
    except GemmsmithError as error:
        return Finding(what, "broken", f"{error}".splitlines()[0])


def _compile() -> str:
    from gemmsmith.backends.cuda.compiler import compile_source, nvrtc_version

    compile_source('extern "C" __global__ void doctor() {}', "doctor", cache=False)
    return f"NVRTC {nvrtc_version()} compiles for Hopper"


def _find_nvdisasm() -> str:
    from gemmsmith.backends.cuda.listing import find_nvdisasm

    return find_nvdisasm()


def _package(name: str, advice: str) -> Finding:
    """Return the version of an optional package, or that it is absent."""
    try:
        return Finding(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, "absent", "not installed", advice)


def _cache() -> Finding:
    """Return where compiled kernels are kept, how many there are, and whether the folder can be written."""
    from gemmsmith.backends.cuda import cache

    folder, entries = cache.directory(), cache.entries()
    detail = f"{folder}, {len(entries)} kernels, {decimal(sum(x.bytes for x in entries))}"
    try:
        tempfile.TemporaryFile(dir=cache.create()).close()
    except OSError as error:
        advice = "kernels are compiled by each process anew; set GEMMSMITH_CACHE_DIR to a folder that can be written"
        return Finding("cache", "broken", f"{folder}: {error.strerror}", advice)
    given = " (GEMMSMITH_CACHE_DIR)" if os.environ.get("GEMMSMITH_CACHE_DIR") else ""
    return Finding("cache", "ok", detail + given)


def _tables() -> Finding:
    """Return how many configs were tuned, and which file of GEMMSMITH_TABLE is no table."""
    from gemmsmith.tuning import measured_configs
    from gemmsmith.tuning.tuned_table import builtin_table

    detail = f"{len(builtin_table())} configs shipped, {len(measured_configs.entries())} measured here"
    if not (files := os.environ.get("GEMMSMITH_TABLE")):
        return Finding("tables", "ok", detail)
    try:
        count = sum(len(measured_configs.read_table(Path(file))) for file in files.split(os.pathsep))
    except GemmsmithError as error:
        return Finding("tables", "broken", f"GEMMSMITH_TABLE: {error}", "plans ignore this file")
    return Finding("tables", "ok", f"{detail}, {count} in GEMMSMITH_TABLE")
