"""Rows that pages show and that are of an earlier choice: which there are, and measuring them again.

A row is stale if its GEMM gets another config today. --run removes a GPU's stale rows, and measures what is missing
with each file's benchmark, in turn, until the time is over.

    python -m benchmarks.refresh
    python -m benchmarks.refresh --run --seconds 560 [--only kinds --only layers]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from docs import figures

from benchmarks.rows import RESULTS, Row, find, load, names, read, write

GPUS = ("h200", "h100")


class Rows(NamedTuple):
    """The command that measures a file's rows, and how a row's GEMM is planned."""

    command: str
    planned: Callable[[Row], figures.gemmsmith.Plan]


FILES = {
    "dense-suite": Rows("benchmarks.speed.dense --suite all", figures.plain),
    "dense-half": Rows("benchmarks.speed.dense --dtype float16 --half", figures.plain),
    "autotuned": Rows("benchmarks.speed.autotuned", figures.plain),
    "grid": Rows("benchmarks.speed.autotuned --grid", figures.plain),
    "kinds": Rows("benchmarks.speed.kinds", figures.plain),
    "layers": Rows("benchmarks.speed.layers", figures.plain),
    "fp8": Rows("benchmarks.speed.fp8", figures.block_scaled),
    "epilogues": Rows("benchmarks.speed.epilogues", figures.fused),
}
"""By the file's name without its GPU."""


def kept(name: str, gpu: str) -> tuple[list[Row], int]:
    """Return the rows of a file that are current, and how many it has."""
    file = f"{name}-{gpu}"
    if file not in names():
        return [], 0
    return figures.current(file, FILES[name].planned), len(load(file)["rows"])


def measure(name: str, gpu: str, seconds: float) -> None:
    """Remove a file's stale rows, and run its benchmark for what is missing."""
    rows, count = kept(name, gpu)
    path = find(f"{name}-{gpu}") if count else RESULTS / f"{name}-{gpu}.json.xz"
    if len(rows) < count:
        write(path, {**read(path), "rows": rows})
    words = [*FILES[name].command.split(), "--json", str(path), "--resume", "--seconds", str(int(seconds))]
    print(f"python -m {' '.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", *words], cwd=Path(__file__).parents[1], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="measure, on this machine's GPU")
    parser.add_argument("--only", action="append", choices=list(FILES), help="instead of all; may be repeated")
    parser.add_argument("--seconds", type=float, default=560, help="begin nothing after so many")
    arguments = parser.parse_args()
    chosen, until = arguments.only or list(FILES), time.monotonic() + arguments.seconds
    for name in chosen:
        for gpu in GPUS:
            rows, count = kept(name, gpu)
            if count:
                print(f"{name}-{gpu}: {count - len(rows)} of {count} rows are stale")
    if arguments.run:
        from benchmarks.timing import queried

        gpu = next(x for x in GPUS if x.upper() in queried("name"))
        for name in chosen:
            if (left := until - time.monotonic()) > 0:
                measure(name, gpu, left)


if __name__ == "__main__":
    main()
