"""The measurements of one instruction, the file that stores them, and what the chosen vectors show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.probe.kernels import title
from benchmarks.probe.vectors import SPREADS, Probe, numbers
from gemmsmith.core.dtypes import FP16
from gemmsmith.core.mma import Mma
from gemmsmith.hw.mma import fused_mma, fused_sum

COLUMNS = 8
"""Stored columns of a random tile."""
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""A, B, C and D."""


@dataclass(frozen=True)
class Measured:
    """Measured vectors and tiles of one instruction.

    The chosen vectors are a and b (vectors, k), c and d (vectors,), and their names; the random tiles a (tiles, 64, k),
    b (tiles, columns, k), c and d (tiles, 64, columns).
    """

    mma: Mma
    names: list[str]
    selected: Arrays
    random: Arrays

    @classmethod
    def read(cls, file: Mapping[str, np.ndarray], mma: Mma) -> Measured:
        def arrays(prefix: str) -> Any:
            types = zip("abcd", (mma.a, mma.b, mma.d, mma.d), strict=True)
            return tuple(file[f"{title(mma)}_{prefix}{key}"].view(dtype.numpy) for key, dtype in types)

        return cls(mma, str(file[f"{title(mma)}_name"]).split("\n"), arrays(""), arrays("random_"))

    def saved(self) -> dict[str, np.ndarray]:
        """Return the bits, by their names in the file."""
        arrays_by_name = {f"{title(self.mma)}_name": np.array("\n".join(self.names))}
        for prefix, arrays in (("", self.selected), ("random_", self.stored_random())):
            for key, x in zip("abcd", arrays, strict=True):
                arrays_by_name[f"{title(self.mma)}_{prefix}{key}"] = raw(x)
        return arrays_by_name

    def stored_random(self) -> Arrays:
        a, b, c, d = (x[: len(SPREADS)] for x in self.random)
        return a, b[:, :COLUMNS], c[..., :COLUMNS], d[..., :COLUMNS]

    def simulated(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the simulator's D of the chosen vectors and of the random tiles."""
        (a, b, c), tiles = self._numbers(self.selected), self._numbers(self.random)
        return fused_sum(a.T, b.T, c, self.mma), fused_mma(*tiles, self.mma)

    def sums(self) -> Arrays:
        """Return all sums of the file: a and b (k, sums), c (sums,), in float64, and d (sums,)."""
        a, b, c = self._numbers(self.selected)
        tiles_a, tiles_b, tiles_c = self._numbers(self.stored_random())
        shape = (*tiles_c.shape, self.mma.k)
        flat_a = np.broadcast_to(tiles_a[:, :, None], shape).reshape(-1, self.mma.k)
        flat_b = np.broadcast_to(tiles_b[:, None], shape).reshape(-1, self.mma.k)
        d = np.concatenate([self.selected[3], self.stored_random()[3].reshape(-1)])
        return np.vstack([a, flat_a]).T, np.vstack([b, flat_b]).T, np.concatenate([c, tiles_c.reshape(-1)]), d

    def _numbers(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        a, b, c, _ = arrays
        return numbers(a, self.mma.a), numbers(b, self.mma.b), c.astype(float)

    def results_of(self, prefix: str) -> dict[str, np.generic]:
        """Return the results of the vectors whose names are `prefix` and a suffix, by the suffix."""
        return {
            name.removeprefix(prefix).strip(): d
            for name, d in zip(self.names, self.selected[3], strict=True)
            if name.startswith(prefix + " ")
        }


def raw(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(BITS[x.dtype.itemsize])


def differing(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.asarray(raw(x) != raw(y))


# -- what the chosen vectors show ---------------------------------------------------------------------------------


def survived(sums: dict[str, Any]) -> str:
    """Return the largest j for which the small term changes the result."""
    numbers = {int(j): float(d) for j, d in sums.items()}
    seen = [j for j, d in numbers.items() if d != 0]
    return f"{max(seen)}{'' if set(seen) == set(range(1, max(seen) + 1)) else ' with gaps'}" if seen else "none"


def told_apart(sums: dict[str, Any], whole: float) -> str:
    seen = [int(j) for j, d in sums.items() if float(d) != whole]
    return str(max(seen)) if seen else "none"


def rounding(sums: dict[str, dict[str, Any]], top: int, j: int) -> str:
    """Return the results of 0.75, 1.25 and 1.75 units of 2^(top-j), in such units."""
    return "/".join(f"{float(d[str(j)]) / 2.0 ** (top - j):g}" if str(j) in d else "-" for d in sums.values())


def groups(p: Measured) -> str:
    """Return the positions that are added together, by which small terms survive."""
    rows = surviving(p, "group")
    return f"X at 0, -X at row, lost at column, survives:{rows}" if rows else f"one group of {p.mma.k}"


def accumulator(p: Measured) -> str:
    """Return with which positions C is added, by which small terms survive."""
    rows = surviving(p, "group-c")
    return f"C = X, -X at row, lost at column, survives:{rows}" if rows else "in the alignment of all"


def surviving(p: Measured, kind: str) -> str:
    """Return a line for each position of -X, with an X for each position whose product survives; none if none does."""
    survives = np.zeros((p.mma.k, p.mma.k), bool)
    for name, d in p.results_of(kind).items():
        j, last = map(int, name.split())
        survives[j, last] = float(d) != 0
    return "".join("\n      " + "".join(".X"[int(s)] for s in row) for row in survives) if survives.any() else ""


def final(p: Measured, top: int, j: int, name: str) -> str:
    """Return the results of 2X + m 2^(top-j), m = 0..15, less 2X, in units of 2^(top-j)."""
    sign = -1 if "negative" in name else 1
    return " ".join(f"{(sign * float(d) - 2.0 ** (top + 1)) / 2.0 ** (top - j):g}"
                    for d in p.results_of(f"{name}-{j}").values())  # fmt: skip


def hexadecimal(d: Any) -> str:
    return f"{float(d):.6g} ({int(d.view(BITS[d.dtype.itemsize])):#x})"


def show(p: Measured) -> None:
    top, (a, b, c, sums) = Probe(p.mma).top, p.selected
    products_kept = survived(p.results_of("kept-products"))
    stored = told_apart(p.results_of("stored"), 2.0 ** (top + 1))
    print(f"\n{title(p.mma)}  k {p.mma.k}  X = 2^{top}")
    print(f"  bits kept below X: products {products_kept}, apart {survived(p.results_of('kept-apart'))}, negative "
          f"{survived(p.results_of('kept-negative'))}, beside C {survived(p.results_of('kept-beside-c'))} and "
          f"{survived(p.results_of('kept-beside-c-last'))}, of C {survived(p.results_of('kept-of-c'))}, below 2.25 X "
          f"{survived(p.results_of('kept-carried'))}")  # fmt: skip
    print(f"  bits stored: of 2X {stored}, of C + small {told_apart(p.results_of('stored-c'), 2.0**top)}, of C alone "
          f"{told_apart(p.results_of('stored-c-alone'), 2.0**top)}")  # fmt: skip
    j = int(products_kept.split()[0]) if products_kept[0].isdigit() else 10
    for at in (j, j + 1):
        shown = [rounding({up: p.results_of(f"{name}{up}") for up in (3, 5, 7)}, top, at)
                 for name in ("round-products", "round-negative", "round-c", "round-negative-c")]  # fmt: skip
        print(f"  0.75/1.25/1.75 units of 2^-{at} X become: products {shown[0]}, negative {shown[1]}, C {shown[2]}, "
              f"negative C {shown[3]}")  # fmt: skip
    if stored.isdigit():
        for at in sorted({min(int(stored), 26), min(int(stored) + 2, 26)}):
            print(f"  2X + m 2^-{at} X, m = 0..15: {final(p, top, at, 'final')}")
            print(f"     the same, negative:      {final(p, top, at, 'final-negative')}")
    print(f"  places: {groups(p)}\n  accumulator: {accumulator(p)}")
    for name in ("carry", "carry-c"):
        exact = [i for i, key in enumerate(p.names) if key.startswith(name + " ")]
        off = []
        for i in exact:
            want = float(a[i].astype(float) @ b[i].astype(float) + float(c[i]))
            off.append((float(sums[i]) - want) / abs(want))
        print(f"  {name}: relative error of sums of 1..{p.mma.k} largest products: {min(off):.3g} to {max(off):.3g}")
    for name in ("subnormal-exponent", "zero-exponent"):
        print(
            f"  {name}: survives to {survived({str(int(j) + 1): d for j, d in p.results_of(name).items()})} (one more)"
        )
    for name in ("subnormal", "zero", "limit", "special"):
        results = {key: d for key, d in p.results_of(name).items() if not key.startswith("rounded")}
        print(f"  {name}: " + "; ".join(f"{key} {hexadecimal(d)}" for key, d in results.items()))
    if p.mma.d == FP16:
        over = [int(m) for m, d in p.results_of("limit rounded").items() if np.isinf(float(d))]
        print(f"  limit: C = 65504 plus m is inf from m = {min(over, default=None)}")
