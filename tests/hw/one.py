"""One instruction at a time: the PTX that it prints, and what it computes in the simulator."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from tests.conformance.case import at, poisoned, words

from gemmsmith import hw
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import F32, PRED, U32, ScalarType
from gemmsmith.lang.values import RegisterArray, Value

Forms = dict[str, Callable[[Builder], object]]
"""What an instruction prints -> what records it."""


def ptx(record: Callable[[Builder], object], threads: int = 128) -> str:
    """The templates of the inline PTX of the kernel that `record` records, on one line; %n is its n-th operand."""
    with Builder("k", threads=threads) as k:
        result = record(k)
        if isinstance(result, Value) and result.type != PRED:  # of a pure instruction, which must have a use
            with k.when(result == 0):
                hw.sync_warp()
        source = k.finish().source
    templates = re.findall(r'asm(?: volatile)?\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+):', source)
    texts = ["".join(re.findall(r'"((?:[^"\\]|\\.)*)"', template)) for template in templates]
    return " ".join(" ".join(texts).replace("\\n", " ").replace("\\t", " ").split())


def registers(k: Builder, count: int, type: ScalarType = U32) -> RegisterArray:
    """A register array that holds zeros."""
    array = k.registers(type, count, "values")
    for i in range(count):
        array[i] = 0
    return array


def computed(record: Callable[..., Value], *inputs: np.ndarray) -> np.ndarray:
    """The u32 or fp32 that `record(*values)` gives for each element of the inputs, words of 128 threads or fewer."""
    count = len(inputs[0])
    with Builder("k", threads=-(-count // 32) * 32) as k:
        out, sources = k.pointer("out"), [k.pointer(f"x{i}") for i in range(len(inputs))]
        inside = k.thread < count
        values = []
        for source, x in zip(sources, inputs, strict=True):
            word = k.registers(F32 if x.dtype == np.float32 else U32, 1, "word")
            hw.load_global(word, at(source, k.thread, 4), inside)
            values.append(word[0])
        result = record(*values)
        held = words(hw.as_unsigned(result) if result.type == F32 else result.to(U32))
        hw.store_global(held, at(out, k.thread, 4), inside)
        kernel = k.finish()
    memory, found = GlobalMemory(), poisoned((count,), np.uint32)
    places = {f"x{i}": memory.add_buffer(x, f"x{i}", writable=False) for i, x in enumerate(inputs)}
    done = simulate(kernel, 1, {"out": memory.add_buffer(found, "out"), **places}, memory)
    assert not done.hazards, "\n".join(map(str, done.hazards))
    return found.view(np.float32) if result.type == F32 else found
