"""NVRTC: CUDA C++ to a cubin or PTX for a chip, with or without a GPU; and the resources that ptxas reports."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from gemmsmith.backends.cuda import cache as cubin_cache
from gemmsmith.core.chip import HOPPER
from gemmsmith.core.errors import CompileError

_PTX_LINE = r"ptx input, line (\d+); error"
OPTIONS = ("--std=c++17", "--fmad=false", "--minimal", "--ptxas-options=-v")
"""Without contraction of products and sums, which would depend on what else a kernel computes: they are fused where the
kernel says so, and there the simulator fuses them too. Without textures, surfaces and the device runtime, which no
kernel uses and whose declarations take 5 ms to read."""
LINES = "--generate-line-info"


@dataclass(frozen=True)
class Resources:
    """What a kernel takes: registers a thread; spills, stack and shared memory in bytes, of which ptxas, and so
    `Compiled`, knows the static part; a plan's kernels have theirs at launch, which `Plan.resources` counts too."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    advisories: tuple[str, ...]


@dataclass(frozen=True)
class Compiled:
    """A cubin, its kernel's symbol, and the compiler's log."""

    cubin: bytes
    log: str
    name: str

    @cached_property
    def resources(self) -> Resources:
        """Read from the log: numbers of this kernel, advisories (warnings, ptxas C75xx) of the whole source."""
        entries = re.split(r"Compiling entry function '(\w+)'", self.log)
        of_kernel = dict(zip(entries[1::2], entries[2::2], strict=True)).get(self.name, self.log)

        def number(pattern: str) -> int:
            found = re.search(pattern, of_kernel)
            return int(found[1]) if found else 0

        said = r"\bC75\d\d\b|\bwarning\b(?!-number)"  # not the remark on how to suppress warnings
        advisories = [line.strip() for line in self.log.splitlines() if re.search(said, line)]
        return Resources(
            number(r"Used (\d+) registers"), number(r"(\d+) bytes spill stores"), number(r"(\d+) bytes spill loads"),
            number(r"(\d+) bytes stack frame"), number(r"(\d+) bytes smem"), tuple(advisories),
        )  # fmt: skip


@lru_cache(maxsize=1)
def _nvrtc() -> Any:
    """The NVRTC bindings, if they find their library. Imported at first use, since the import takes 50 ms."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as missing:
        raise CompileError(f"NVRTC was not found ({missing}): pip install cuda-bindings nvidia-cuda-nvrtc") from missing
    return nvrtc


@lru_cache(maxsize=1)
def nvrtc_version() -> str:
    """NVRTC's version, such as "13.0". Raises CompileError if NVRTC is not installed."""
    return ".".join(map(str, _check(_nvrtc().nvrtcVersion())))


def compile_source(
    source: str, name: str, target: str = HOPPER.target, *, cache: bool = True, lines: bool = False
) -> Compiled:
    """The cubin for `target` of an `extern "C"` kernel `name`, from the cache if it is there; `lines`: with line
    information. Raises CompileError."""
    key = cubin_cache.key(source, (target, *OPTIONS, *[LINES] * lines), nvrtc_version())
    if cache and (found := cubin_cache.load(key)):
        return Compiled(*found, name)
    cubin, log = _compile(source, name, target, "cubin", lines)
    if cache:
        cubin_cache.store(key, cubin, log)
    return Compiled(cubin, log, name)


def compile_ptx(source: str, name: str, target: str = HOPPER.target, *, lines: bool = False) -> str:
    """The PTX of a kernel; `lines`: with line information. Raises CompileError."""
    return _compile(source, name, target, "ptx", lines)[0].decode().rstrip("\0")


def _compile(source: str, name: str, target: str, what: str, lines: bool) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []))[0]
    try:
        architecture = target if what == "cubin" else target.replace("sm", "compute")
        general = OPTIONS if what == "cubin" else OPTIONS[:-1]  # without ptxas's
        options = f"--gpu-architecture={architecture}", *general, *[LINES] * lines
        error = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])[0]
        log = _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode(errors="replace")
        log = log.rstrip("\0")
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            named = _lines_named(source, log, r"\.cu\((\d+)\): (?:catastrophic )?error")
            if what == "cubin" and re.search(_PTX_LINE, log):  # ptxas failed: it names lines of PTX
                named = _lines_named(compile_ptx(source, name, target), log, _PTX_LINE)
            raise CompileError(f"{name}: {error.name}\n{log}\n{named}")
        if what == "ptx":
            return _text(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX), log
        return _text(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(program: Any, size: Callable[..., Any], get: Callable[..., Any]) -> bytes:
    buffer = bytearray(_check(size(program))[0])  # not bytes: they are shared, b" " * 1 with all Python code
    _check(get(program, buffer))
    return bytes(buffer)


def _check(result: tuple[Any, ...]) -> tuple[Any, ...]:
    if int(result[0]):
        raise CompileError(f"NVRTC: {result[0].name}")
    return result[1:]


def _lines_named(source: str, log: str, pattern: str) -> str:
    """The source lines of the log's errors, the first ten."""
    lines = source.split("\n")
    numbers = sorted({int(n) for n in re.findall(pattern, log)})
    return "\n".join(f"{n:5}  {lines[n - 1]}" for n in numbers[:10] if n <= len(lines))
