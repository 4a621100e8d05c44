"""Find the largest accumulators of kernels without spills, by the class of the epilogue; needs no GPU.

    python -m benchmarks.fit.register_budgets [--write]

For each class, the widest tiles of every design are compiled with some epilogues of the class. What is printed, or with
`--write` replaces the table of core/register_budgets.py, is the fraction of the design's accumulator registers up to
which no kernel spills.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gemmsmith
from gemmsmith import Config, Spec
from gemmsmith.core import register_budgets
from gemmsmith.core.design import get_design
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
        (lambda acc, x, y: ((acc + x) * y).gelu(), {"x": COLUMN, "y": COLUMN}, "bf16"),
    ],
    "several matrices": [
        (lambda acc: (acc, acc.sum(0), acc.amax(0)), {}, "bf16"),
        (lambda acc, c, d: acc * c + d, {"c": MATRIX, "d": MATRIX}, "bf16"),
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
    found = epilogue_class(plan.spec.epilogue)
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
            cluster_splits = 2 if column == "more rows, split" else 1
            config = Config(name, (m, n, 64), (1, 1), 2, consumers, cluster_splits=cluster_splits)
            return not any(spills(kind, witness, config) for witness in WITNESSES[kind])

        low, high = 0, len(widths)  # the first `low` widths do not spill, and width number `high` does
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if is_free(widths[middle]) else (low, middle)
        if low < len(widths):
            least = min(least, rows * widths[low - 1] / 128 / limit if low else 0.0)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the table")
    arguments = parser.parse_args()
    rows = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for kind in WITNESSES:
            found = pool.map(partial(fraction, kind), TILES)
            rows.append(f'    "{kind}": ({", ".join(f"{x:g}" for x in found)}),\n')
            print(rows[-1], end="", flush=True)
    if arguments.write:
        path = Path(register_budgets.__file__)
        path.write_text(re.sub(r"(?s)(?<=# generated\n).*(?=    # end)", lambda _: "".join(rows), path.read_text()))


if __name__ == "__main__":
    main()
