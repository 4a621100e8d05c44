"""The results of a tensor-core instruction, bit for bit, on chosen and on random vectors of each floating-point type.

    python -m benchmarks.probe.mma --instruction mma --out mma.npz  # on a GPU, in less than a minute; or wmma, wgmma
    python -m benchmarks.probe.mma --instruction mma --out mma.npz --backend sim
    python -m benchmarks.probe.mma --instruction wgmma --read benchmarks/results/wgmma-h200.npz.xz

Prints what the vectors show, then a table: for each type, how many sums of the chip differ from the simulator's
(gemmsmith.hw.mma), and which models of models.py reproduce every stored bit. The file has the bits of the
vectors of each instruction, named like f32_e4m3_e5m2: all chosen ones, as `a` and `b` (vectors, k), `c` and `d`
(vectors,) and their `name`; and of the random tiles as `random_a` (tiles, 64, k), `random_b` (tiles, COLUMNS, k),
`random_c` and `random_d` (tiles, 64, COLUMNS). tests/hw/test_fused_sum.py replays results/<instruction>-h200.npz.xz.
"""

from __future__ import annotations

import argparse
import time
import traceback
from pathlib import Path

import numpy as np

from benchmarks.probe.findings import Measured, differing, hexadecimal, show
from benchmarks.probe.kernels import KINDS, Runner, title
from benchmarks.probe.models import ranked
from benchmarks.probe.vectors import SPREADS, random_tiles, selected_vectors
from benchmarks.rows import read_arrays, write_arrays
from gemmsmith.core.mma import Mma

SHOWN = 3
"""Models per type in the table, at most."""


def measured(runner: Runner, mma: Mma, rng: np.random.Generator, tiles: int) -> Measured:
    p = selected_vectors(mma)
    a, b, c = p.arrays()
    x, y, z = random_tiles(mma, rng, tiles)
    of_vectors, of_tiles = runner.vectors(mma, a, b, c), runner.tiles(mma, x, y, z)
    return Measured(mma, p.names, (a, b, c, of_vectors), (x, y, z, of_tiles))


def chain(runner: Runner, m: Measured, rng: np.random.Generator) -> str:
    """Compare two consecutive instructions with two separate ones.

    They differ if an accumulator has more bits than its registers.
    """
    a, b, c, d = m.random
    x, y, _ = random_tiles(m.mma, rng, len(a))
    together = runner.tiles(m.mma, np.concatenate([a, x], 2), np.concatenate([b, y], 2), c)
    unstored = differing(together, runner.tiles(m.mma, x, y, d))
    return f"{unstored.sum()} of {unstored.size}"


def compared(m: Measured) -> list[str]:
    """Return cells of the table: whether the simulator's sums are equal, and how many differ."""
    of_vectors, of_tiles = m.simulated()
    d, random = m.selected[3], differing(m.random[3], of_tiles)
    wrong = np.nonzero(differing(d, of_vectors))[0]
    for i in wrong[:12]:
        print(f"  {m.names[i]}: {hexadecimal(d[i])}, the simulator's {hexadecimal(of_vectors[i])}")
    if random.any():
        by_tile = random.reshape(len(random), -1).sum(1)
        print(f"  random, by spread: {[int(by_tile[i :: len(SPREADS)].sum()) for i in range(len(SPREADS))]}")
    verdict = "differs" if len(wrong) or random.any() else "equal"
    return [verdict, f"{len(wrong)} of {len(d)}", f"{random.sum()} of {random.size}"]


def fitting(m: Measured) -> list[str]:
    """Return the models that reproduce every stored bit, or those that come closest."""
    a, b, c, d = m.sums()
    ranking = ranked(a, b, c, d, m.mma)
    right = [model.text(m.mma) for wrong, model in ranking if wrong == 0]
    if right:
        return right[:SHOWN] + [f"and {len(right) - SHOWN} more"] * (len(right) > SHOWN)
    return [f"none; {wrong} of {len(d)} differ: {model.text(m.mma)}" for wrong, model in ranking[:SHOWN]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instruction", choices=list(KINDS), required=True)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--out", type=Path, help="the file to write")
    source.add_argument("--read", type=Path, help="a file that was written: nothing is run")
    parser.add_argument("--backend", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--tiles", type=int, help="random tiles of 4096 sums a type; by default 28, sim 7")
    parser.add_argument("--only", default="", help="the types whose names contain this")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    runner, saved = Runner(arguments.instruction, arguments.backend), {}
    tiles = arguments.tiles or (28 if arguments.backend == "cuda" else 7)
    begin, rows = time.perf_counter(), []
    for mma in KINDS[arguments.instruction]:
        if arguments.only not in title(mma):
            continue
        rng = np.random.default_rng(arguments.seed)
        if arguments.read:
            m, unstored = Measured.read(read_arrays(arguments.read), mma), "not stored"
        else:
            m = measured(runner, mma, rng, tiles)
            saved |= m.saved()
            write_arrays(arguments.out, saved)
            unstored = chain(runner, m, rng)
        try:
            show(m)
        except Exception:  # unexpected results: the file has them
            traceback.print_exc()
        rows.append(([title(mma), *compared(m), unstored], fitting(m)))
    print(f"\n{arguments.instruction}: sums that differ from the simulator's, of chosen vectors and of random ones; of "
          "two in a row, from one\nafter the other; and below them the models that give every stored bit")  # fmt: skip
    for cells, fits in [(["", "simulator", "chosen", "random", "in a row"], []), *rows]:
        print("  ".join(f"{cell:<15}" for cell in cells).rstrip())
        print("".join(f"    {line}\n" for line in fits), end="")
    print(f"{time.perf_counter() - begin:.1f} s, of which on the backend {runner.seconds:.1f}")


if __name__ == "__main__":
    main()
