"""What wgmma computes, bit for bit: single instructions on chosen and on random vectors, for each floating-point one.

    python benchmarks/probe_wgmma.py --out probe.npz               # on a Hopper GPU, in less than a minute
    python benchmarks/probe_wgmma.py --out probe.npz --backend sim

Prints a table, what it shows, and where the simulator's sums (gemmsmith.hw.fused_sum) differ from the chip's. The file
holds the bits of vectors of each instruction, named like f32_e4m3_e5m2: all chosen ones, as `a` and `b` (vectors, k),
`c` and `d` (vectors,) and their `name`; and of the random tiles as `random_a` (tiles, 64, k), `random_b` (tiles,
COLUMNS, k), `random_c` and `random_d` (tiles, 64, COLUMNS). tests/hw/test_fused_sum.py replays
results/wgmma-h200.npz.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from gemmsmith import hw
from gemmsmith.backends.reference.product import as_tf32
from gemmsmith.backends.sim import GlobalMemory, simulate
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.collective.operand import Operand
from gemmsmith.core.dtypes import FP16, INT32, TF32
from gemmsmith.core.mma import WGMMA, Mma, fragment_column, fragment_row
from gemmsmith.core.tensor_map import TensorMap
from gemmsmith.core.tile import Tile
from gemmsmith.hw.fused_sum import fused_sum
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import I32, U64
from gemmsmith.lang.values import Constant

N = 64
"""Rows of A, rows of B, and so the sums on a tile's diagonal, which are independent."""
COLUMNS = 8
"""Of a random tile that are stored."""
KINDS = [mma for mma in WGMMA if mma.d != INT32]
SPREADS = ((-1, 0), (-2, 1), (-4, 2), (-6, 4), (-9, 7), (-31, 30), (-76, -60))
"""Of the exponents of a random tile's factors, as far as their types have them. The last ones' sums are subnormal."""
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def title(mma: Mma) -> str:
    return f"{mma.d.ptx}_{mma.a.ptx}_{mma.b.ptx}"


# -- one instruction, or a chain of them ----------------------------------------------------------------------------


def kernel_of(mma: Mma, steps: int) -> Kernel:
    """CTA i: tile i of `out` = A B^T + C by `steps` instructions in a row, without a wait between them."""
    half, depth = mma.d == FP16, steps * mma.k
    size, count = (2, 1) if half else (4, 2)

    def unbound(problem: object) -> NoReturn:
        raise AssertionError

    with Builder(f"probe_{title(mma)}_{steps}", threads=128) as k:
        out, c = k.pointer("out"), k.pointer("c")
        a = Operand("a_map", Tile(mma.a, N, depth, "K"), 1, unbound)
        b = Operand("b_map", Tile(mma.b, N, depth, "K"), 1, unbound)
        full = k.shared(8, stages=1, alignment=8, name="barrier")[0]
        row = (hw.block_index() * N).named("row")
        with k.when(k.thread == 0):
            hw.mbarrier_init(full, 1)
            hw.fence_mbarrier_init()
        hw.sync_threads()
        with k.when(k.thread == 0):
            hw.mbarrier_arrive_expect_tx(full, a.tile.bytes + b.tile.bytes)
            for operand in (a, b):
                operand.load(Constant(I32, 0), full, row, k.lane * 0, k.lane * 0)
        hw.mbarrier_wait(full, 0)
        first = (row + fragment_row(k.warp_index % 4, k.lane)) * N + fragment_column(k.lane)
        places = [(i * count, (first + (i // 2 * 8 + i % 2 * 8 * N)).to(U64) * size) for i in range(N // 4)]
        (d,) = Accumulator(mma, N, N).blocks
        for register, place in places:
            pair = k.registers(d.type, count, "pair")
            hw.load_global(pair, c + place, True)
            for i in range(count):
                d[register + i] = pair[i]
        hw.wgmma_fence()
        for step in range(steps):
            hw.wgmma_mma(d, hw.descriptor(a.stages[0], step), hw.descriptor(b.stages[0], step), True, N, mma, "K", "K")
        hw.wgmma_commit()
        hw.wgmma_wait(0)
        hw.compiler_fence(d)
        for register, place in places:
            pair = k.registers(d.type, count, "pair")
            for i in range(count):
                pair[i] = d[register + i]
            hw.store_global(pair, out + place, True)
        return k.finish()


def map_of(tile_dtype: Any, address: int, rows: int, depth: int) -> TensorMap:
    tile = Tile(tile_dtype, N, depth, "K")
    pitch = depth * tile_dtype.bytes
    return TensorMap(
        address, tile_dtype, (depth, rows, 1), (pitch, 0), (tile.box_inner, tile.outer, 1), tile.swizzle
    )  # fmt: skip


class Runner:
    """Runs tiles on a backend; `seconds` is what that took, compilation included."""

    def __init__(self, backend: str) -> None:
        self.backend, self.kernels, self.seconds = backend, {}, 0.0

    def tiles(self, mma: Mma, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        """a and b (tiles, 64, steps * k), c (tiles, 64, 64): D, (tiles, 64, 64)."""
        begin = time.perf_counter()
        depth = a.shape[2]
        if (mma, depth) not in self.kernels:
            self.kernels[mma, depth] = kernel_of(mma, depth // mma.k)
        kernel, run = self.kernels[mma, depth], self._cuda if self.backend == "cuda" else self._simulated
        arrays = {
            "a": np.ascontiguousarray(a, mma.a.numpy), "b": np.ascontiguousarray(b, mma.b.numpy),
            "c": np.ascontiguousarray(c, mma.d.numpy), "out": np.zeros(c.shape, mma.d.numpy),
        }  # fmt: skip
        rows = a.shape[0] * N

        def bound(addresses: dict[str, int]) -> dict[str, Any]:
            maps = {"a_map": map_of(mma.a, addresses["a"], rows, depth),
                    "b_map": map_of(mma.b, addresses["b"], rows, depth)}  # fmt: skip
            return {**addresses, **maps}

        out = run(kernel, a.shape[0], arrays, bound)
        self.seconds += time.perf_counter() - begin
        return out

    def vectors(self, mma: Mma, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        """a and b (vectors, k), c (vectors,): D, (vectors,), on the diagonals of tiles."""
        count, tiles = len(a), -(-len(a) // N)
        spread_a, spread_b = (np.zeros((tiles * N, x.shape[1]), x.dtype) for x in (a, b))
        spread_a[:count], spread_b[:count] = a, b
        spread_c = np.zeros((tiles, N, N), mma.d.numpy)
        diagonal = np.arange(tiles * N) // N, np.arange(tiles * N) % N, np.arange(tiles * N) % N
        spread_c[tuple(x[:count] for x in diagonal)] = c
        found = self.tiles(mma, spread_a.reshape(tiles, N, -1), spread_b.reshape(tiles, N, -1), spread_c)
        return found[diagonal][:count]

    @staticmethod
    def _simulated(kernel: Kernel, grid: int, arrays: dict[str, np.ndarray], bound: Callable) -> np.ndarray:
        memory = GlobalMemory()
        addresses = {name: memory.place(x, name, writable=name == "out") for name, x in arrays.items()}
        result = simulate(kernel, grid, bound(addresses), memory)
        assert not result.hazards, result.hazards[0]
        return arrays["out"]

    @staticmethod
    def _cuda(kernel: Kernel, grid: int, arrays: dict[str, np.ndarray], bound: Callable) -> np.ndarray:
        from gemmsmith.backends.cuda.launcher import device_guard, load
        from gemmsmith.backends.cuda.memory import DeviceArray
        from gemmsmith.backends.cuda.prepared import Prepared

        with device_guard(0):
            loaded = load(
                kernel.source, kernel.name, 0, 0, threads=kernel.threads, cluster=kernel.cluster,
                shared_bytes=kernel.shared_bytes, parameter_kinds=kernel.parameter_kinds,
            )  # fmt: skip
            device = {name: DeviceArray.from_numpy(x) for name, x in arrays.items()}
            arguments = bound({name: x.address for name, x in device.items()})
            Prepared(loaded, grid, [arguments[p.name or ""] for p in kernel.parameters], pdl=False).launch({}, 0)
            return device["out"].numpy()


# -- chosen vectors ---------------------------------------------------------------------------------------------------


class Probe:
    """Chosen vectors for one instruction: collected by name, then run all at once."""

    def __init__(self, mma: Mma) -> None:
        self.mma, self.rows, self.names = mma, [], []
        self.of_a, self.of_b = ml_dtypes.finfo(mma.a.numpy), ml_dtypes.finfo(mma.b.numpy)
        lowest = -14 if mma.d == FP16 else -126
        self.top = 12 if mma.d == FP16 else min(12, self.exponents()[1])
        self.bottom = max(self.exponents()[0], lowest - 8)
        """Exponents of the powers of two that are added."""

    def exponents(self) -> tuple[int, int]:
        """Of the least and the largest product of powers of two, none of them subnormal."""
        return int(self.of_a.minexp + self.of_b.minexp), int(self.of_a.maxexp + self.of_b.maxexp - 2)

    def power(self, e: int, sign: float = 1.0) -> tuple[float, float]:
        """Factors of sign * 2^e."""
        low, high = int(self.of_a.minexp), int(self.of_a.maxexp) - 1
        of_a = min(max(e // 2, low), high)
        of_a = min(max(of_a, e - (int(self.of_b.maxexp) - 1)), max(e - int(self.of_b.minexp), low))
        return sign * 2.0**of_a, 2.0 ** (e - of_a)

    def add(self, name: str, products: dict[int, tuple[float, float]], c: float = 0.0) -> None:
        """A vector with these factors at these places of K, zeros elsewhere."""
        a, b = np.zeros(self.mma.k), np.zeros(self.mma.k)
        for place, (x, y) in products.items():
            a[place], b[place] = x, y
        self.names.append(name)
        self.rows.append((a, b, c))

    def run(self, runner: Runner) -> None:
        a, b = (np.array([row[i] for row in self.rows]) for i in range(2))
        self.a, self.b = a.astype(self.mma.a.numpy), b.astype(self.mma.b.numpy)
        self.c = np.array([row[2] for row in self.rows]).astype(self.mma.d.numpy)
        assert np.array_equal(self.a.astype(float), a, equal_nan=True), "a factor that the type does not hold"
        assert np.array_equal(self.b.astype(float), b, equal_nan=True), "a factor that the type does not hold"
        self.d = runner.vectors(self.mma, self.a, self.b, self.c)

    def found(self, prefix: str) -> dict[str, np.generic]:
        """Results of the vectors whose names are `prefix` and something, by that."""
        return {
            name.removeprefix(prefix).strip(): d
            for name, d in zip(self.names, self.d, strict=True)
            if name.startswith(prefix + " ")
        }


def choose(p: Probe) -> None:
    """All vectors. X = 2^top; what is small is named by how many bits it lies below X."""
    top, span = p.top, p.top - p.bottom
    x, minus = p.power(top), p.power(top, -1)
    big = 2.0**top
    for j in range(1, min(span, 40) + 1):
        small, negative = p.power(top - j), p.power(top - j, -1)
        p.add(f"kept-products {j}", {0: x, 1: minus, 2: small})
        p.add(f"kept-apart {j}", {0: x, p.mma.k // 2: minus, p.mma.k - 1: small})
        p.add(f"kept-beside-c {j}", {0: minus, 1: small}, big)
        p.add(f"kept-beside-c-last {j}", {p.mma.k - 2: minus, p.mma.k - 1: small}, big)
        p.add(f"kept-of-c {j}", {0: x, 1: minus}, 2.0 ** (top - j))
        p.add(f"kept-negative {j}", {0: x, 1: minus, 2: negative})
        p.add(f"stored {j}", {0: x, 1: x, 2: small})
        p.add(f"stored-c {j}", {0: small}, big)
        p.add(f"stored-c-alone {j}", {}, big * (1 + 2.0**-j) if j <= (10 if p.mma.d == FP16 else 23) else big)
        p.add(f"stored-c-with-1 {j}", {0: p.power(top - 4)}, big * (1 + 2.0**-j) if j <= 23 else big)
        # mantissas 1.5 x 1.5 = 2.25: is the exponent the product's, or the sum of the factors'?
        p.add(f"kept-carried {j}", {0: (1.5 * x[0], 1.5 * x[1]), 1: (1.5 * minus[0], 1.5 * minus[1]), 2: small})
        for up in (3, 5, 7):  # a small product of 1.5, 2.5/2, 1.75 units ..., where j is about what is kept
            part = p.power(top - j)
            p.add(f"round-products{up} {j}", {0: x, 1: minus, 2: (up / 4 * part[0], part[1])})
            p.add(f"round-negative{up} {j}", {0: x, 1: minus, 2: (-up / 4 * part[0], part[1])})
            p.add(f"round-c{up} {j}", {0: x, 1: minus}, up / 4 * 2.0 ** (top - j))
            p.add(f"round-negative-c{up} {j}", {0: x, 1: minus}, -up / 4 * 2.0 ** (top - j))
    # The final rounding: 2X and 0 to 15 steps of 2^(top-j), each way.
    for j in range(6, min(span, 26) + 1):
        for m in range(16):
            for sign, name in ((1, "final"), (-1, "final-negative")):
                bits = [p.power(top - j + i, sign) for i in range(4) if m >> i & 1 and i < j]
                two = p.power(top, sign)
                p.add(f"{name}-{j} {m}", {0: two, 1: two, **{2 + i: bit for i, bit in enumerate(bits)}})
    # Which places of K are added together: X at one, -X at another, something that X swallows at a third.
    lost = next((j for j in range(30 if p.mma.fraction > 20 else 20, span + 1)), span)
    for j in range(1, p.mma.k):
        for last in range(p.mma.k):
            if last not in (0, j):
                p.add(f"group {j} {last}", {0: x, j: minus, last: p.power(top - lost)})
    for j in range(p.mma.k):
        for last in range(p.mma.k):
            if last != j:
                p.add(f"group-c {j} {last}", {j: minus, last: p.power(top - lost)}, big)
    # Carries: all products at their largest, and C too.
    most_a, most_b = float(p.of_a.max), float(p.of_b.max)
    scale = 1.0 if p.mma.a.bits == 8 and p.mma.d != FP16 else 2.0**-100 if p.of_a.maxexp > 20 else 2.0**-8
    scale = 2.0**-5 if p.mma.a.bits == 8 and p.mma.d == FP16 else scale
    if p.mma.a == TF32:
        most_a = most_b = float((2 - 2.0**-10) * 2.0**127)
    for sign in (1, -1):
        both = (sign * most_a * scale, most_b * scale)
        for count in range(1, p.mma.k + 1):
            p.add(f"carry {sign * count}", dict.fromkeys(range(count), both))
            p.add(f"carry-c {sign * count}", dict.fromkeys(range(count), both), sign * 2.0 ** min(12, p.top) * 1.875)
    # Subnormals, zeros.
    tiny_a, tiny_b = float(p.of_a.smallest_subnormal), float(p.of_b.smallest_subnormal)
    if p.mma.a == TF32:
        tiny_a = tiny_b = 2.0**-136  # of its 10 bits
    near = 1.0 if p.of_a.minexp > -100 else 2.0**120
    p.add("subnormal a", {0: (tiny_a, near)})
    p.add("subnormal b", {0: (near, tiny_b)})
    p.add("subnormal both", {0: (tiny_a, tiny_b)})
    least = -24 if p.mma.d == FP16 else -149
    for name, e in (("d", least + 9), ("d-lowest", least), ("d-half", least - 1)):
        p.add(f"subnormal {name}", {0: p.power(max(p.exponents()[0], e))})
    if p.exponents()[0] < least:
        p.add("subnormal d-1.5", {0: p.power(least), 1: p.power(least - 1)})
        p.add("subnormal d-halves", {0: p.power(least - 1), 1: p.power(least - 1)})
    c_tiny = 2.0**least
    p.add("subnormal c", {}, c_tiny)
    p.add("subnormal c-3", {}, 3 * c_tiny)
    p.add("subnormal c-large", {}, c_tiny * (2**9 + 1 if p.mma.d == FP16 else 2**22 + 1))
    for j in range(0, 30):  # a subnormal factor's exponent: of the smallest normal number, or its own?
        e = int(np.log2(tiny_a)) + int(np.log2(near))
        if e - j >= p.exponents()[0]:
            p.add(f"subnormal-exponent {j}", {0: (tiny_a, near), 1: (-tiny_a, near), 2: p.power(e - j)})
        if -j >= p.exponents()[0]:  # and that of a zero beside the largest number
            largest = 2.0 ** (int(p.of_b.maxexp) - 1) if p.of_b.maxexp < 100 else 2.0**20
            p.add(f"zero-exponent {j}", {0: (0.0, largest), 1: p.power(-j)})
    p.add("zero minus", {0: (-1.0, 1.0), 1: (1.0, 1.0)})
    p.add("zero minus-c", {}, -0.0)
    p.add("zero minus-all", dict.fromkeys(range(p.mma.k), (-0.0, 1.0)), -0.0)
    # Beyond the range.
    limit = float(ml_dtypes.finfo(p.mma.d.numpy).max)
    one = p.power(0)
    p.add("limit c", {}, limit)
    p.add("limit c-and-1", {0: one}, limit)
    for e in range(0, 6) if p.mma.d == FP16 else range(100, 128):
        for sign in (1, -1):
            if e <= p.exponents()[1]:
                p.add(f"limit c-and-2^{e} {sign}", {0: p.power(e, sign)}, sign * limit)
    p.add("limit both", {0: p.power(min(127, p.exponents()[1])), 1: p.power(min(127, p.exponents()[1]))}, limit)
    p.add("limit product", {0: (most_a, most_b)})
    p.add("limit cancelled", {0: (most_a, most_b), 1: (-most_a, most_b)})
    p.add("limit cancelled-and-1", {0: (most_a, most_b), 1: (-most_a, most_b), 2: one})
    if p.mma.d == FP16:
        for m in range(64):
            extra = {i: p.power(i) for i in range(6) if m >> i & 1}
            p.add(f"limit rounded {m}", extra, limit)
    nan, inf = float("nan"), float("inf")
    p.add("special nan-a", {0: (nan, 1.0)})
    p.add("special nan-b", {0: (1.0, nan)})
    p.add("special nan-times-0", {0: (nan, 0.0)})
    p.add("special nan-c", {0: one}, nan)
    p.add("special inf-c", {0: one}, inf)
    p.add("special -inf-c", {0: one}, -inf)
    if not np.isnan(np.array(inf).astype(p.mma.a.numpy).astype(float)):
        p.add("special inf-a", {0: (inf, 1.0)})
        p.add("special -inf-a", {0: (-inf, 1.0)})
        p.add("special inf-times-0", {0: (inf, 0.0)})
        p.add("special inf-minus-inf", {0: (inf, 1.0), 1: (-inf, 1.0)})
        p.add("special inf-minus-c", {0: (inf, 1.0)}, -inf)
        p.add("special inf-and-nan", {0: (inf, 1.0), 1: (nan, 1.0)})


# -- what they show ---------------------------------------------------------------------------------------------------


def survived(found: dict[str, Any]) -> str:
    """Largest j whose result is not what it is with nothing small in it."""
    numbers = {int(j): float(d) for j, d in found.items()}
    seen = [j for j, d in numbers.items() if d != 0]
    return f"{max(seen)}{'' if set(seen) == set(range(1, max(seen) + 1)) else ' with gaps'}" if seen else "none"


def told_apart(found: dict[str, Any], whole: float) -> str:
    seen = [int(j) for j, d in found.items() if float(d) != whole]
    return str(max(seen)) if seen else "none"


def rounding(found: dict[str, dict[str, Any]], top: int, j: int) -> str:
    """Units of 2^(top-j) in the results of 0.75, 1.25, 1.75 of them."""
    return "/".join(f"{float(d[str(j)]) / 2.0 ** (top - j):g}" if str(j) in d else "-" for d in found.values())


def groups(p: Probe) -> str:
    """Places that are added together, by what survives."""
    k = p.mma.k
    survives = np.zeros((k, k), bool)
    for name, d in p.found("group").items():
        j, last = map(int, name.split())
        survives[j, last] = float(d) != 0
    if not survives.any():
        return f"one group of {k}"
    rows = ["".join(".X"[int(s)] for s in row) for row in survives]
    return "X at 0, -X at row, lost at column, survives:\n      " + "\n      ".join(rows)


def accumulator(p: Probe) -> str:
    k = p.mma.k
    survives = np.zeros((k, k), bool)
    for name, d in p.found("group-c").items():
        j, last = map(int, name.split())
        survives[j, last] = float(d) != 0
    if not survives.any():
        return "in the alignment of all"
    return "C = X, -X at row, lost at column, survives:\n      " + "\n      ".join(
        "".join(".X"[int(s)] for s in row) for row in survives
    )


def final(p: Probe, j: int, name: str) -> str:
    """Results of 2X + m 2^(top-j), m = 0..15, less 2X, in units of 2^(top-j)."""
    sign = -1 if "negative" in name else 1
    return " ".join(f"{(sign * float(d) - 2.0 ** (p.top + 1)) / 2.0 ** (p.top - j):g}"
                    for d in p.found(f"{name}-{j}").values())  # fmt: skip


def hexadecimal(d: Any) -> str:
    return f"{float(d):.6g} ({int(d.view(BITS[d.dtype.itemsize])):#x})"


def show(p: Probe) -> None:
    kept = survived(p.found("kept-products"))
    stored = told_apart(p.found("stored"), 2.0 ** (p.top + 1))
    print(f"\n{title(p.mma)}  k {p.mma.k}  X = 2^{p.top}")
    print(f"  bits kept below X: products {kept}, apart {survived(p.found('kept-apart'))}, negative "
          f"{survived(p.found('kept-negative'))}, beside C {survived(p.found('kept-beside-c'))} and "
          f"{survived(p.found('kept-beside-c-last'))}, of C {survived(p.found('kept-of-c'))}, below 2.25 X "
          f"{survived(p.found('kept-carried'))}")  # fmt: skip
    print(f"  bits stored: of 2X {stored}, of C + small {told_apart(p.found('stored-c'), 2.0**p.top)}, of C alone "
          f"{told_apart(p.found('stored-c-alone'), 2.0**p.top)}")  # fmt: skip
    j = int(kept.split()[0]) if kept[0].isdigit() else 10
    for at in (j, j + 1):
        shown = [rounding({up: p.found(f"{name}{up}") for up in (3, 5, 7)}, p.top, at)
                 for name in ("round-products", "round-negative", "round-c", "round-negative-c")]  # fmt: skip
        print(f"  0.75/1.25/1.75 units of 2^-{at} X become: products {shown[0]}, negative {shown[1]}, C {shown[2]}, "
              f"negative C {shown[3]}")  # fmt: skip
    if stored.isdigit():
        for at in sorted({min(int(stored), 26), min(int(stored) + 2, 26)}):
            print(f"  2X + m 2^-{at} X, m = 0..15: {final(p, at, 'final')}")
            print(f"     the same, negative:      {final(p, at, 'final-negative')}")
    print(f"  places: {groups(p)}\n  accumulator: {accumulator(p)}")
    for name in ("carry", "carry-c"):
        exact = [i for i, key in enumerate(p.names) if key.startswith(name + " ")]
        off = []
        for i in exact:
            want = float(p.a[i].astype(float) @ p.b[i].astype(float) + float(p.c[i]))
            off.append((float(p.d[i]) - want) / abs(want))
        print(f"  {name}: relative error of sums of 1..{p.mma.k} largest products: {min(off):.3g} to {max(off):.3g}")
    for name in ("subnormal-exponent", "zero-exponent"):
        print(f"  {name}: survives to {survived({str(int(j) + 1): d for j, d in p.found(name).items()})} (one more)")
    for name in ("subnormal", "zero", "limit", "special"):
        results = {key: d for key, d in p.found(name).items() if not key.startswith("rounded")}
        print(f"  {name}: " + "; ".join(f"{key} {hexadecimal(d)}" for key, d in results.items()))
    if p.mma.d == FP16:
        over = [int(m) for m, d in p.found("limit rounded").items() if np.isinf(float(d))]
        print(f"  limit: C = 65504 plus m is inf from m = {min(over, default=None)}")


# -- random vectors ---------------------------------------------------------------------------------------------------


def random_tiles(mma: Mma, rng: np.random.Generator, tiles: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tile i has SPREADS[i]; C is of the sum's size, far above, far below, zero, or what cancels most of it."""

    def operand(dtype: Any, spread: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
        info = ml_dtypes.finfo(dtype.numpy)
        low, high = (min(max(e, int(info.minexp) - 2), int(info.maxexp) - 2) for e in spread)
        x = rng.uniform(1, 2, shape) * 2.0 ** rng.integers(low, high + 1, shape) * rng.choice([-1, 1], shape)
        x[rng.random(shape) < 0.03] = 0
        return x.astype(dtype.numpy)

    chosen = [SPREADS[i % len(SPREADS)] for i in range(tiles)]
    a = np.stack([operand(mma.a, s, (N, mma.k)) for s in chosen])
    b = np.stack([operand(mma.b, s, (N, mma.k)) for s in chosen])
    as_read = [operand_read(x, mma).astype(float) for x in (a, b)]
    exact = as_read[0] @ as_read[1].swapaxes(1, 2)
    factor = rng.choice([1.0, -1.0, 0.0, 2.0**-6, 2.0**6, 2.0**-14, 2.0**14], exact.shape)
    limit = float(ml_dtypes.finfo(mma.d.numpy).max)
    c = np.clip(exact * factor * rng.choice([1.0, 1.37, 0.99], exact.shape), -limit, limit).astype(mma.d.numpy)
    return a, b, c


def operand_read(x: np.ndarray, mma: Mma) -> np.ndarray:
    return as_tf32(x) if mma.a == TF32 else x


def modelled(mma: Mma, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """(k, ...), (k, ...) and C, of which the first two broadcast to (k, *c.shape)."""
    return fused_sum(operand_read(a, mma).astype(float), operand_read(b, mma).astype(float), c.astype(float), mma)


def differing(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.asarray(x.view(BITS[x.dtype.itemsize]) != y.view(BITS[y.dtype.itemsize]))


def raw(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(BITS[x.dtype.itemsize])


def random(runner: Runner, mma: Mma, rng: np.random.Generator, tiles: int, saved: dict[str, np.ndarray]) -> None:
    name = title(mma)
    a, b, c = random_tiles(mma, rng, tiles)
    d = runner.tiles(mma, a, b, c)
    wrong = differing(d, np.stack([modelled(mma, x.T[:, :, None], y.T[:, None, :], z)
                                   for x, y, z in zip(a, b, c, strict=True)]))  # fmt: skip
    spread = wrong.reshape(tiles, -1).sum(1)
    by_spread = [int(spread[i :: len(SPREADS)].sum()) for i in range(min(len(SPREADS), tiles))]
    print(f"  random: {wrong.sum()} of {wrong.size} differ from the simulator's model, by spread {by_spread}")
    stored = slice(min(len(SPREADS), tiles))
    for key, x in (("a", a), ("b", b[:, :COLUMNS]), ("c", c[:, :, :COLUMNS]), ("d", d[:, :, :COLUMNS])):
        saved[f"{name}_random_{key}"] = raw(x[stored])
    # Two in a row against one after the other: does an accumulator hold more than its registers?
    again = random_tiles(mma, rng, tiles)
    chain = runner.tiles(mma, np.concatenate([a, again[0]], 2), np.concatenate([b, again[1]], 2), c)
    apart = differing(chain, runner.tiles(mma, again[0], again[1], d))
    print(f"  chain: {apart.sum()} of {apart.size} differ from one after the other")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--backend", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--tiles", type=int, help="random tiles of 4096 sums an instruction; by default 28, sim 7")
    parser.add_argument("--only", help="the instructions whose names contain this")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    runner, saved = Runner(arguments.backend), {}
    tiles = arguments.tiles or (28 if arguments.backend == "cuda" else 7)
    begin = time.perf_counter()
    for mma in KINDS:
        if arguments.only and arguments.only not in title(mma):
            continue
        p = Probe(mma)
        choose(p)
        p.run(runner)
        try:
            show(p)
        except Exception:  # results that nobody thought of: the file has them
            traceback.print_exc()
        for key, x in (("a", p.a), ("b", p.b), ("c", p.c), ("d", p.d)):
            saved[f"{title(mma)}_{key}"] = raw(x)
        saved[f"{title(mma)}_name"] = np.array("\n".join(p.names))
        model = modelled(mma, p.a.T, p.b.T, p.c)
        wrong = np.nonzero(differing(p.d, model))[0]
        print(f"  chosen: {len(wrong)} of {len(p.d)} differ from the model"
              + "".join(f"\n     {p.names[i]}: {hexadecimal(p.d[i])}, model {hexadecimal(model[i])}"
                        for i in wrong[:12]))  # fmt: skip
        random(runner, mma, np.random.default_rng(arguments.seed), tiles, saved)
        np.savez_compressed(arguments.out, **saved)
    print(f"\n{time.perf_counter() - begin:.1f} s, of which on the backend {runner.seconds:.1f}")


if __name__ == "__main__":
    main()
