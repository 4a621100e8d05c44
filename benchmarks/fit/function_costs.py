"""Count the instructions of each elementwise function, compiled alone for Hopper; needs no GPU.

    python -m benchmarks.fit.function_costs [--write]

`--write` replaces the table in graph/function_costs.py.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from functools import reduce
from pathlib import Path

from gemmsmith import hw
from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.backends.cuda.listing import disassemble
from gemmsmith.graph import function_costs
from gemmsmith.graph.approximations import select
from gemmsmith.graph.function_costs import Cost, Precision
from gemmsmith.graph.functions import FUNCTIONS, Function, Lowering
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32, U64
from gemmsmith.lang.values import Value

ELEMENTS = 16
"""Elements of a thread, over which loads of constants are spread."""


def costs() -> dict[tuple[str, Precision], Cost]:
    """Return the cost of each function, in each precision for which it has a lowering of its own.

    It is what the function adds to a kernel that loads its inputs, compares those that are predicates, combines them by
    maxima, and stores the result.
    """
    found = {
        (name, precision): (function, lower)
        for name, function in FUNCTIONS.items()
        for precision, lower in function.lowerings.items()
    }
    of_functions = [_kernel(f"f{i}", _computing(*x), x[0].arity) for i, x in enumerate(found.values())]
    arities = sorted({function.arity for function, _ in found.values()})
    opcodes = _opcodes([*of_functions, *(_kernel(f"base{arity}", _maximum, arity) for arity in arities)])
    return {
        key: _difference(opcodes[f"f{i}"], opcodes[f"base{function.arity}"], function.arity)
        for i, (key, (function, _)) in enumerate(found.items())
    }


def _difference(found: Counter[str], base: Counter[str], arity: int) -> Cost:
    added = (found.total() - base.total()) / ELEMENTS + arity - 1
    special, branches = (found[op] / ELEMENTS for op in ("MUFU", "BSSY"))
    return Cost(*(round(x, 1) for x in (max(added, 0), special, branches)))


def _computing(function: Function, lower: Lowering) -> Lowering:
    predicates = function.num_predicates

    def compute(*inputs: Value) -> Value:
        result = lower(*(x > 0.0 for x in inputs[:predicates]), *inputs[predicates:])
        return select(result, 1.0, 0.0) if function.is_predicate else result

    return compute


def _maximum(*inputs: Value) -> Value:
    return reduce(hw.maximum_nan, inputs)


def _kernel(name: str, function: Lowering, arity: int) -> Kernel:
    """Return a kernel that computes a function of ELEMENTS elements per thread."""
    with Builder(name, threads=32) as k:
        pointers = [k.pointer(f"x{i}") for i in range(arity)]
        out = k.pointer("out")
        inputs = [[k.registers(F32, 4, f"x{i}") for _ in range(ELEMENTS // 4)] for i in range(arity)]
        results = [k.registers(F32, 4, "y") for _ in range(ELEMENTS // 4)]
        address = (k.thread * (4 * ELEMENTS)).to(U64)
        for pointer, parts in zip(pointers, inputs, strict=True):
            for i, part in enumerate(parts):
                hw.load_global(part, pointer + (address + 16 * i), k.thread >= 0)
        for i in range(ELEMENTS):
            results[i // 4][i % 4] = function(*(parts[i // 4][i % 4] for parts in inputs))
        for i, part in enumerate(results):
            hw.store_global(part, out + (address + 16 * i), k.thread >= 0)
        return k.finish()


def _opcodes(kernels: list[Kernel]) -> dict[str, Counter[str]]:
    """Count the opcodes of each kernel, by name. They are one program, since nvdisasm takes 0.3 s to start."""
    source = "\n".join(f"namespace of_{kernel.name} {{\n{kernel.source}\n}}" for kernel in kernels)
    text = disassemble(compile_source(source, kernels[0].name, kernels[0].chip.target).cubin)
    _, *sections = re.split(r"^\.text\.(\w+):$", text, flags=re.MULTILINE)
    found = {
        name: re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@\S+ )?(\w+)", code, re.MULTILINE)
        for name, code in zip(sections[::2], sections[1::2], strict=True)
    }
    return {name: Counter(x for x in opcodes if x not in ("NOP", "BRA", "EXIT")) for name, opcodes in found.items()}


def table() -> str:
    rows: dict[str, list[str]] = {}
    for (name, precision), found in costs().items():
        rows.setdefault(name, []).append(f'"{precision}": Cost({", ".join(f"{x:g}" for x in found)})')
    lines = [f'    "{name}": {{{", ".join(of_precisions)}}},' for name, of_precisions in rows.items()]
    return "\n".join(["COSTS: dict[str, dict[Precision, Cost]] = {", *lines, "}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    is_written = parser.parse_args().write
    found = table()
    if is_written:
        path = Path(function_costs.__file__)
        text = path.read_text()
        path.write_text(re.sub(r"(?s)(?<=# generated\n).*(?=\n# end)", lambda _: found, text))
    else:
        print(found)


if __name__ == "__main__":
    main()
