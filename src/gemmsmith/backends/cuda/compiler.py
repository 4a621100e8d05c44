"""Compilation of CUDA C++ to a cubin or PTX by NVRTC, which needs no GPU, and the resources that ptxas reports."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gemmsmith.backends.cuda import cache as cubin_cache
from gemmsmith.core.chip import HOPPER
from gemmsmith.core.errors import CompileError
from gemmsmith.core.frozen import cached_property

_LOGGER = logging.getLogger("gemmsmith")
_PTXAS_ERROR_LINE = r"ptx input, line (\d+); error"
OPTIONS = ("--std=c++17", "--fmad=false", "--minimal", "--ptxas-options=-v")
"""--fmad=false: no implicit FMA contraction, so that results match the simulator; kernels use explicit FMAs.
--minimal: omits unused declarations (textures, surfaces, the device runtime), which take 5 ms to read."""
LINE_INFO_FLAG = "--generate-line-info"


@dataclass(frozen=True)
class Resources:
    """Resource usage of a kernel: registers per thread; spills, stack and shared memory in bytes.

    ptxas, and so `Compiled`, reports static shared memory only; `Plan.resources` adds dynamic shared memory.
    """

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int
    advisories: tuple[str, ...]


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel: the cubin, the compiler's log, and `name`, the kernel's symbol in the cubin."""

    cubin: bytes
    log: str
    name: str

    @cached_property
    def resources(self) -> Resources:
        """The resources of this kernel, parsed from the compiler's log.

        `advisories`: the log's lines with warnings, or with ptxas's advisories C75xx, of the whole source.
        """
        entries = re.split(r"Compiling entry function '(\w+)'", self.log)
        log_of_kernel = dict(zip(entries[1::2], entries[2::2], strict=True)).get(self.name, self.log)

        def parse(pattern: str) -> int:
            match = re.search(pattern, log_of_kernel)
            return int(match[1]) if match else 0

        advisory_pattern = r"\bC75\d\d\b|\bwarning\b(?!-number)"  # excludes the hint on how to suppress warnings
        advisories = [line.strip() for line in self.log.splitlines() if re.search(advisory_pattern, line)]
        return Resources(
            parse(r"Used (\d+) registers"), parse(r"(\d+) bytes spill stores"), parse(r"(\d+) bytes spill loads"),
            parse(r"(\d+) bytes stack frame"), parse(r"(\d+) bytes smem"), tuple(advisories),
        )  # fmt: skip


@lru_cache(maxsize=1)
def _nvrtc() -> Any:
    """Return the NVRTC bindings, imported at first use, since the import takes 50 ms. Raises CompileError."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as missing:
        raise CompileError(f"NVRTC was not found ({missing}): pip install cuda-bindings nvidia-cuda-nvrtc") from missing
    return nvrtc


def is_available() -> bool:
    """Return whether NVRTC is installed; a simulation does not need it."""
    try:
        return bool(_nvrtc())
    except CompileError:
        return False


@lru_cache(maxsize=1)
def nvrtc_version() -> str:
    """Return NVRTC's version, such as "13.0". Raises CompileError if NVRTC is not installed."""
    return ".".join(map(str, _check(_nvrtc().nvrtcVersion())))


def compile_source(
    source: str, name: str, target: str = HOPPER.target, *, cache: bool = True, line_info: bool = False
) -> Compiled:
    """Return the compiled `extern "C"` kernel `name` for an architecture such as "sm_90a". Raises CompileError.

    `cache`: whether to read and write the cache on disk.
    """
    if cache and (found := find_compiled(source, name, target, line_info=line_info)):
        _LOGGER.debug("read %s for %s from the cache folder", name, target)
        return found
    start = time.perf_counter()
    cubin, log = _compile(source, name, target, "cubin", line_info)
    _LOGGER.info("compiled %s for %s in %.2f s", name, target, time.perf_counter() - start)
    if cache:
        cubin_cache.store(_cache_key(source, target, line_info), cubin, log)
    return Compiled(cubin, log, name)


def is_cached(source: str, target: str) -> bool:
    """Return whether `compile_source` would find a kernel in the cache. Raises CompileError if there is no NVRTC."""
    return cubin_cache.contains(_cache_key(source, target))


def find_compiled(source: str, name: str, target: str, *, line_info: bool = False) -> Compiled | None:
    """Return the kernel that `compile_source` compiled before, from the cache; None if it is not there."""
    entry = cubin_cache.load(_cache_key(source, target, line_info))
    return Compiled(*entry, name) if entry else None


def _cache_key(source: str, target: str, line_info: bool = False) -> str:
    return cubin_cache.make_key(source, (target, *OPTIONS, *[LINE_INFO_FLAG] * line_info), nvrtc_version())


def compile_ptx(source: str, name: str, target: str = HOPPER.target, *, line_info: bool = False) -> str:
    """Return the PTX of the kernel `name`. Raises CompileError."""
    return _compile(source, name, target, "ptx", line_info)[0].decode().rstrip("\0")


def _compile(source: str, name: str, target: str, output: str, line_info: bool) -> tuple[bytes, str]:
    """Compile a kernel by NVRTC; return (cubin or PTX, compiler's log), by `output`: "cubin" or "ptx".

    Raises CompileError with the log and the source lines that it names. ptxas names lines of PTX, so these are quoted.
    """
    nvrtc = _nvrtc()
    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []))[0]
    try:
        architecture = target if output == "cubin" else target.replace("sm", "compute")
        general = OPTIONS if output == "cubin" else OPTIONS[:-1]  # without ptxas options
        options = f"--gpu-architecture={architecture}", *general, *([LINE_INFO_FLAG] if line_info else [])
        error = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])[0]
        log = _read_output(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode(errors="replace")
        log = log.rstrip("\0")
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            quoted_lines = _quote_lines(source, log, r"\.cu\((\d+)\): (?:catastrophic )?error")
            if output == "cubin" and re.search(_PTXAS_ERROR_LINE, log):  # ptxas failed: it names lines of PTX
                quoted_lines = _quote_lines(compile_ptx(source, name, target), log, _PTXAS_ERROR_LINE)
            raise CompileError(f"{name}: {error.name}\n{log}\n{quoted_lines}")
        if output == "ptx":
            return _read_output(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX), log
        return _read_output(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read_output(program: Any, size: Callable[..., Any], get: Callable[..., Any]) -> bytes:
    buffer = bytearray(_check(size(program))[0])  # not bytes: NVRTC writes into it, and short bytes are interned
    _check(get(program, buffer))
    return bytes(buffer)


def _check(result: tuple[Any, ...]) -> tuple[Any, ...]:
    if int(result[0]):
        raise CompileError(f"NVRTC: {result[0].name}")
    return result[1:]


def _quote_lines(source: str, log: str, pattern: str) -> str:
    """Return the source lines of the first ten errors; `pattern` finds their line numbers in the log."""
    lines = source.split("\n")
    numbers = sorted({int(n) for n in re.findall(pattern, log)})
    return "\n".join(f"{n:5}  {lines[n - 1]}" for n in numbers[:10] if n <= len(lines))
