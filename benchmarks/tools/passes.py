"""Which functions of the library receive an argument of a call: its epilogue, its array a, its config, its offsets.

    python -m benchmarks.tools.passes [--list]

Each call is a first one, simulated. A function counts if an argument of it, or an element of its *args or **kwargs, is
the caller's object, an equal config or a copy of the epilogue. Methods of the object itself do not count.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import ml_dtypes
import numpy as np

import gemmsmith

SOURCES = str(Path(gemmsmith.__file__).parent)


def arguments(frame: FrameType) -> Iterator[Any]:
    """Yield the arguments of a function that is about to run."""
    code, values = frame.f_code, frame.f_locals
    named = code.co_argcount + code.co_kwonlyargcount
    yield from (values[name] for name in code.co_varnames[:named] if name in values)
    if code.co_flags & 0x04:  # CO_VARARGS
        yield from values[code.co_varnames[named]]
    if code.co_flags & 0x08:  # CO_VARKEYWORDS
        yield from values[code.co_varnames[named + bool(code.co_flags & 0x04)]].values()


def is_same(x: Any, y: Any) -> bool:
    """Return whether x is the object y, an equal config or a copy of the function y."""
    if isinstance(y, FunctionType):
        return isinstance(x, FunctionType) and x.__code__ == y.__code__
    return x is y or (isinstance(y, gemmsmith.Config) and isinstance(x, gemmsmith.Config) and x == y)


def receivers(call: Callable[[], Any], objects: dict[str, Any]) -> dict[str, set[CodeType]]:
    """Return the functions of the library that receive each object while `call` runs."""
    found: dict[str, set[CodeType]] = {name: set() for name in objects}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCES):
            values = list(arguments(frame))
            for name, y in objects.items():
                is_method = bool(values) and values[0] is y and hasattr(type(y), frame.f_code.co_name)
                if not is_method and any(is_same(x, y) for x in values):
                    found[name].add(frame.f_code)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def dense() -> dict[str, set[CodeType]]:
    rng = np.random.default_rng()
    a, b = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((256, 128), (128, 256)))
    config = gemmsmith.Config(tile=(128, 128, 64), stages=2)

    def epilogue(acc: Any) -> Any:
        return np.maximum(acc, 0)

    def call() -> None:
        gemmsmith.gemm(a, b, epilogue=epilogue, config=config, backend="sim")

    return receivers(call, {"epilogue": epilogue, "a": a, "config": config})


def grouped() -> dict[str, set[CodeType]]:
    rng = np.random.default_rng()
    a, b = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((256, 128), (2, 128, 256)))
    offsets = np.array([100, 256], np.int32)
    return receivers(lambda: gemmsmith.grouped_gemm(a, b, offsets=offsets, backend="sim"), {"offsets": offsets})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="names the functions")
    is_listed = parser.parse_args().list
    for name, codes in (dense() | grouped()).items():
        files = {code.co_filename for code in codes}
        print(f"{name}: {len(codes)} functions in {len(files)} files")
        if is_listed:
            for code in sorted(codes, key=lambda c: (c.co_filename, c.co_firstlineno)):
                print(f"  {code.co_filename.removeprefix(SOURCES + '/')}:{code.co_firstlineno} {code.co_qualname}")


if __name__ == "__main__":
    main()
