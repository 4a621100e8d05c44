"""Count the instructions of each elementwise function, compiled alone for Hopper; needs no GPU.

    python -m benchmarks.fit.function_costs [--write]

`--write` replaces the table in graph/function_costs.py.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

from gemmsmith import hw
from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.backends.cuda.disassembler import disassemble
from gemmsmith.graph import function_costs
from gemmsmith.graph.approximations import select
from gemmsmith.graph.function_costs import Cost, Precision
from gemmsmith.graph.functions import FUNCTIONS, Function, Lowering
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import F32, U64
from gemmsmith.lang.values import Value

ELEMENTS = 16
"""Elements of a thread, over which loads of constants are spread."""


def costs_of(function: Function) -> dict[Precision, Cost]:
    """Return the cost in each precision for which the function has a lowering of its own."""
    return {precision: cost(function, precision) for precision in function.lowerings}


def cost(function: Function, precision: Precision) -> Cost:
    """Return what the function adds to a kernel that loads its inputs, compares those that are predicates, combines
    them by maxima, and stores the result."""
    predicates, lower = function.num_predicates, function.lowerings[precision]

    def compute(*inputs: Value) -> Value:
        result = lower(*(x > 0.0 for x in inputs[:predicates]), *inputs[predicates:])
        return select(result, 1.0, 0.0) if function.is_predicate else result

    def combine(*inputs: Value) -> Value:
        result, *rest = inputs
        for x in rest:
            result = hw.maximum_nan(result, x)
        return result

    found, base = (_opcodes(f, function.arity) for f in (compute, combine))
    added = (found.total() - base.total()) / ELEMENTS + function.arity - 1
    special, branches = (found[op] / ELEMENTS for op in ("MUFU", "BSSY"))
    return Cost(*(round(x, 1) for x in (max(added, 0), special, branches)))


def _opcodes(function: Lowering, arity: int) -> Counter[str]:
    """Count the opcodes of a kernel that computes a function of ELEMENTS elements per thread."""
    with Builder("function", threads=32) as k:
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
        kernel = k.finish()
    cubin = compile_source(kernel.source, kernel.name, kernel.chip.target).cubin
    opcodes = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@\S+ )?(\w+)", disassemble(cubin), re.MULTILINE)
    return Counter(x for x in opcodes if x not in ("NOP", "BRA", "EXIT"))


def table() -> str:
    def row(name: str, function: Function) -> str:
        costs = (f'"{p}": Cost({", ".join(f"{x:g}" for x in cost)})' for p, cost in costs_of(function).items())
        return f'    "{name}": {{{", ".join(costs)}}},'

    rows = [row(name, function) for name, function in FUNCTIONS.items()]
    return "\n".join(["COSTS: dict[str, dict[Precision, Cost]] = {", *rows, "}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    found = table()
    if parser.parse_args().write:
        path = Path(function_costs.__file__)
        text = path.read_text()
        path.write_text(re.sub(r"(?s)(?<=# generated\n).*(?=\n# end)", lambda _: found, text))
    else:
        print(found)


if __name__ == "__main__":
    main()
