"""Find the largest accumulators of kernels without spills, by the class of the epilogue; needs no GPU.

    python -m benchmarks.fit.register_budgets

For each class, the tiles of every design are compiled with some epilogues of the class, by bisection of their widths: a
narrower tile may spill all the same. Printed is, for each column of MAX_ACCUMULATOR_FRACTIONS, the table's fraction and
the one up to which none of these kernels spills; 1: none does. The table's may be smaller, for epilogues that need more
than these.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import gemmsmith
from gemmsmith import Config, Spec
from gemmsmith.core.design import get_design
from gemmsmith.core.register_budgets import MAX_ACCUMULATOR_FRACTIONS
from gemmsmith.tuning.candidates import epilogue_class

SIZE = 4096
COLUMN, MATRIX, UNALIGNED = Spec((SIZE,), "fp32"), Spec((SIZE, SIZE), "bf16"), Spec((SIZE, SIZE - 1), "bf16")
Witness = tuple[Callable[..., Any] | None, dict[str, Spec], str]
"""An epilogue, its operands, and the dtype of D."""
WITNESSES: dict[str, list[Witness]] = {
    "plain": [(None, {}, "bf16"), (lambda acc: acc.exp(), {}, "bf16"), (lambda acc, x: acc + x, {"x": COLUMN}, "bf16")],
    "plain, 32 bits stored by threads": [(None, {}, "fp32")],
    "functions": [
        (lambda acc: acc.gelu(), {}, "bf16"), (lambda acc, c: acc + c, {"c": MATRIX}, "bf16"),
        (lambda acc: acc.erf(), {}, "bf16"), (lambda acc: acc.expm1(), {}, "bf16"), (lambda acc: acc.elu(), {}, "bf16"),
        (lambda acc, x, y: ((acc + x) * y).gelu(), {"x": COLUMN, "y": COLUMN}, "bf16"),
    ],
    "several matrices": [
        (lambda acc: (acc, acc.sum(0), acc.amax(0)), {}, "bf16"),
        (lambda acc, c, d: acc * c + d, {"c": MATRIX, "d": MATRIX}, "bf16"),
        (lambda acc, c: (acc * c, acc.gelu(), acc.sum(0), acc.sum(1)), {"c": MATRIX}, "bf16"),
    ],
    "several matrices, by threads or of 32 bits": [(lambda acc: (acc, acc.exp(), acc.sum(0)), {}, "fp32")],
    "matrix loaded by threads": [(lambda acc, c: acc + c, {"c": UNALIGNED}, "bf16")],
}  # fmt: skip
"""Some epilogues of each class of `epilogue_class`."""
RAGGED = {"plain, 32 bits stored by threads", "matrix loaded by threads"}
"""Classes of a D that TMA cannot store, or whose matrices it cannot load."""
TILES = {
    "up to 64 rows": [("cooperative", 128, 2), ("cooperative", 192, 3), ("pingpong", 64, 2), ("pingpong", 64, 3)],
    "more rows": [("cooperative", 256, 2), ("pingpong", 128, 2), ("pingpong", 128, 3)],
    "more rows, split": [("cooperative", 256, 2)],
}
"""Design, tile M and consumers of the tiles of each column of the table."""
WIDTHS = range(16, 257, 16)


def spills(kind: str, witness: Witness, config: Config) -> bool:
    """Return whether a kernel of the class spills; one that a config cannot have does not."""
    function, operands, out = witness
    n = SIZE - 1 if kind in RAGGED else SIZE
    a, b = Spec((SIZE, SIZE), "bf16"), Spec((SIZE, n), "bf16", (1, SIZE))
    operands = {name: Spec((n,), "fp32") if x is COLUMN else x for name, x in operands.items()}
    try:
        plan = gemmsmith.plan(a, b, epilogue=function, operands=operands, out_dtype=out, config=config)
    except gemmsmith.ConfigError:
        return False
    found = epilogue_class(plan._planned.spec.epilogue)
    assert found == kind, f"{kind}: the epilogue is of the class {found}"
    return plan.resources.spill_store_bytes > 0


def fraction(kind: str, column: str) -> float:
    """Return the fraction of the accumulator's registers up to which no tile of a column spills."""
    least = 1.0
    for name, m, consumers in TILES[column]:
        design = get_design(name)
        limit, rows = design.max_accumulator_registers[consumers], m // design.warpgroups(consumers)[0]
        widths = [n for n in WIDTHS if rows * n // 128 <= limit]

        def is_free(n: int, name: str = name, m: int = m, consumers: int = consumers) -> bool:
            splits = 2 if column == "more rows, split" else 1
            config = Config(name, (m, n, 64), (1, 1), 2, consumers, splits=splits)
            return not any(spills(kind, witness, config) for witness in WITNESSES[kind])

        low, high = 0, len(widths)  # the first `low` widths do not spill, and width number `high` does
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if is_free(widths[middle]) else (low, middle)
        if low < len(widths):
            least = min(least, rows * widths[low - 1] / 128 / limit if low else 0.0)
    return least


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for kind, fractions in MAX_ACCUMULATOR_FRACTIONS.items():
            found = pool.map(partial(fraction, kind), TILES)
            cells = (f"{title} {x:g}, {y:.2f}" for title, x, y in zip(TILES, fractions, found, strict=True))
            print(f"{kind}: {'; '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
