"""NVRTC: CUDA C++ to a cubin or PTX for sm_90a, on any machine; and what ptxas says of the result."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

from gemmsmith.backends.cuda import cache as cubin_cache
from gemmsmith.core.errors import CompileError

OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17", "--ptxas-options=-v")


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of a kernel: registers a thread; spills, stack and static shared memory in bytes."""

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
        """Read from the log."""

        def number(pattern: str) -> int:
            found = re.search(pattern, self.log)
            return int(found[1]) if found else 0

        advisories = [line.strip() for line in self.log.splitlines() if re.search(r"\(C75\d\d\)|warning", line)]
        return Resources(
            number(r"Used (\d+) registers"), number(r"(\d+) bytes spill stores"), number(r"(\d+) bytes spill loads"),
            number(r"(\d+) bytes stack frame"), number(r"(\d+) bytes smem"), tuple(advisories),
        )  # fmt: skip


@lru_cache(maxsize=1)
def nvrtc_version() -> str:
    """As "13.0"."""
    from cuda.bindings import nvrtc

    return ".".join(map(str, _check(nvrtc.nvrtcVersion())))


def compile_source(source: str, name: str, *, cache: bool = True) -> Compiled:
    """The cubin of an `extern "C"` kernel `name`, from the cache if it is there. Raises CompileError."""
    key = cubin_cache.key(source, OPTIONS, nvrtc_version())
    if cache and (found := cubin_cache.load(key)):
        return Compiled(*found, name)
    cubin, log = _compile(source, name, "cubin")
    if cache:
        cubin_cache.store(key, cubin, log)
    return Compiled(cubin, log, name)


def compile_ptx(source: str, name: str) -> str:
    """The PTX of a kernel. Raises CompileError."""
    return _compile(source, name, "ptx")[0].decode().rstrip("\0")


def _compile(source: str, name: str, what: str) -> tuple[bytes, str]:
    from cuda.bindings import nvrtc

    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []))[0]
    try:
        options = OPTIONS if what == "cubin" else ("--gpu-architecture=compute_90a", *OPTIONS[1:2])
        error = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])[0]
        log = _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode(errors="replace")
        log = log.rstrip("\0")
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{name}: {error.name}\n{log}\n{_lines_named(source, log)}")
        if what == "ptx":
            return _text(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX), log
        return _text(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(program: object, size: object, get: object) -> bytes:
    buffer = b" " * _check(size(program))[0]  # type: ignore[operator]
    _check(get(program, buffer))  # type: ignore[operator]
    return buffer


def _check(result: tuple) -> tuple:  # type: ignore[type-arg]
    if int(result[0]):
        raise CompileError(f"NVRTC: {result[0].name}")
    return result[1:]


def _lines_named(source: str, log: str) -> str:
    """The source lines that the log's errors name."""
    lines = source.splitlines()
    numbers = sorted({int(n) for n in re.findall(r"\.cu\((\d+)\): error", log)})
    return "\n".join(f"{n:5}  {lines[n - 1]}" for n in numbers[:10] if n <= len(lines))
