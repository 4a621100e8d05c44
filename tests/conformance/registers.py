"""Whatever stays in registers: conversions, shuffles, and the operations of the language."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from tests.conformance.case import Case, at, integers, read_word, seeded, write

from gemmsmith import hw
from gemmsmith.core.dtypes import BF16, FP16, DType
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import F32, I32, I64, U16, U32, U64
from gemmsmith.lang.values import Value

CASES: list[Case] = []
THREAD = np.arange(128)


# -- conversions -------------------------------------------------------------------------------------------
def rounded_bits(x: np.ndarray, dtype: DType) -> np.ndarray:
    """fp32 to the bits of `dtype`, to nearest even: PTX ISA, cvt.rn; every NaN is 0x7fff."""
    least, largest = {BF16: (-126, 127), FP16: (-14, 15)}[dtype]
    bias, wide = largest, x.astype(np.float64)
    magnitude = np.abs(np.nan_to_num(wide, nan=0, posinf=0, neginf=0))
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, least)
    steps = np.rint(np.ldexp(magnitude, dtype.mantissa - exponent)).astype(np.int64)  # ties to even, exactly
    # A step up to the next power of two carries into the exponent.
    bits = np.where(steps < 1 << dtype.mantissa, steps, (exponent + bias - 1 << dtype.mantissa) + steps)
    infinity = 2 * largest + 1 << dtype.mantissa
    bits = np.where(np.isinf(x), infinity, np.minimum(bits, infinity)) | np.where(np.signbit(x), 0x8000, 0)
    return np.where(np.isnan(x), 0x7FFF, bits).astype(np.uint16)


def awkward(dtype: DType, count: int) -> np.ndarray:
    """Random fp32 of all exponents, values halfway between neighbors of `dtype`, and beside those; specials."""
    rng = seeded(f"awkward{dtype}")
    anything = rng.integers(0, 1 << 32, count, np.uint32)
    shift = 23 - dtype.mantissa
    ties = rng.integers(0, 1 << 32, count, np.uint32) >> shift << shift | 1 << shift - 1
    if dtype == FP16:  # within its range and below it
        sign, exponent = rng.integers(0, 2, count), rng.integers(100, 146, count)
        ties = (ties & 0x7FFFFF | exponent << 23 | sign << 31).astype(np.uint32)
    beside = ties + rng.integers(-1, 2, count).astype(np.uint32)
    small = (rng.integers(-4096, 4096, count) * 2.0**-26).astype(np.float32).view(np.uint32)
    specials = np.array([0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 65504, 65519.99, 65520, -65520, 65536, 3.4e38,
                         2**-24, 2**-25, 3 * 2**-25, 2**-26, 2**-14, 1e-40, -1e-45, 3.3895314e38],
                        np.float32)  # fmt: skip
    return np.concatenate([anything, ties, beside, small, specials.view(np.uint32)])


def packing(dtype: DType) -> Case:
    bits = awkward(dtype, 500)
    bits = np.concatenate([bits, bits[: -len(bits) % 256]]).reshape(-1, 128, 2)

    def record(k: Builder) -> None:
        out, x = k.pointer("out"), k.pointer("x")
        with k.range(len(bits), name="turn") as turn:
            pair = k.registers(F32, 2, "pair")
            index = turn * 128 + k.thread
            hw.load_global(pair, at(x, index, 8), True)
            write(out, index, hw.pack(pair[0], pair[1], dtype))

    with np.errstate(invalid="ignore", over="ignore"):
        expected = rounded_bits(bits.view(np.float32), dtype)
    return Case(f"pack_{dtype}", record, expected, {"x": bits})


def unpack(k: Builder) -> None:
    out, x = k.pointer("out"), k.pointer("x")
    with k.range(256, name="turn") as turn:
        index = turn * 128 + k.thread
        pair = read_word(x, index)
        write(out, index, *(hw.as_unsigned(hw.unpack(pair, half, FP16)) for half in range(2)))


_halves = np.arange(65536)
_sign, _exponent, _mantissa = _halves >> 15, _halves >> 10 & 31, _halves & 1023
_numbers = np.ldexp(np.where(_exponent == 0, _mantissa, _mantissa + 1024.0), np.maximum(_exponent, 1) - 25)
_numbers = np.where(_exponent == 31, np.inf, _numbers) * np.where(_sign, -1.0, 1.0)
_nan = (_exponent == 31) & (_mantissa > 0)  # their payloads are not specified: infinities instead
_halves = np.where(_nan, 0x7C00 | _sign << 15, _halves).astype(np.uint16)
CASES += [packing(BF16), packing(FP16)]
CASES += [Case("unpack_fp16", unpack, _numbers.astype(np.float32), {"x": _halves.view(np.uint32)})]


# -- fp32 and fp8 ------------------------------------------------------------------------------------------
def exact(k: Builder) -> None:
    """What is rounded once, or not at all."""
    out, x = k.pointer("out"), k.pointer("x")
    a, b, c = (hw.as_float(read_word(x, k.thread + 128 * i)) for i in range(3))
    results = [hw.fma(a, b, c), hw.fma(a, b, -(a * b)), hw.maximum_nan(a, b), hw.minimum_nan(a, b)]
    # The bits of a NaN are not specified.
    numbers = [k.select(r == r, hw.as_unsigned(r), 0x7FFFFFFF) for r in results]
    bits = hw.as_unsigned(c)
    write(out, k.thread, *numbers, *(hw.as_unsigned(hw.unpack(bits, half, BF16)) for half in range(2)))


def packing_fp8(format: str, bits: np.ndarray, numpy: type, largest: float) -> Case:
    """To nearest even; beyond the range the largest, and every NaN is 0x7f."""

    def record(k: Builder) -> None:
        out, x = k.pointer("out"), k.pointer("x")
        with k.range(len(bits), name="turn") as turn:
            index = turn * 128 + k.thread
            low, high = (hw.as_float(read_word(x, index * 2 + i)) for i in range(2))
            write(out, index, hw.pack_fp8(low, high, format).to(U32))

    x = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = x.clip(-largest, largest).astype(numpy).view(np.uint8).astype(np.uint32)
    expected = np.where(np.isnan(x), 0x7F, expected)
    return Case(f"pack_{format}", record, (expected[..., 0] | expected[..., 1] << 8).astype(np.uint32), {"x": bits})


def packing_int8() -> Case:
    """To nearest even; beyond the range the nearest, and NaN is 0."""
    rng = seeded("int8")
    near = rng.integers(-280, 280, 900) / 2 + rng.choice([0, 0, 1e-5, -1e-5], 900)
    x = np.concatenate([near, rng.standard_normal(100) * 1e9, [0, -0.0, np.inf, -np.inf, np.nan, 127.5, -128.5, 1e-40]])
    x = np.concatenate([x, x[: -len(x) % 256]]).astype(np.float32).reshape(-1, 128, 2)

    def record(k: Builder) -> None:
        out, given = k.pointer("out"), k.pointer("x")
        with k.range(len(x), name="turn") as turn:
            index = turn * 128 + k.thread
            low, high = (hw.as_float(read_word(given, index * 2 + i)) for i in range(2))
            write(out, index, hw.pack_int8(low, high).to(U32))

    bytes_ = np.clip(np.rint(np.nan_to_num(x)), -128, 127).astype(np.int64) & 0xFF
    return Case("pack_int8", record, (bytes_[..., 0] | bytes_[..., 1] << 8).astype(np.uint32), {"x": x.view(np.uint32)})


def unpacking_fp8(format: str, numpy: type) -> Case:
    """Every byte; NaN is 0x7fff."""

    def record(k: Builder) -> None:
        out, x = k.pointer("out"), k.pointer("x")
        word = read_word(x, k.thread)
        write(out, k.thread, hw.unpack_fp8(word.to(U16), format))

    x = np.arange(256, dtype=np.uint8).reshape(128, 2)
    halves = x.view(numpy).astype(np.float16)
    bits = np.where(np.isnan(halves), np.uint16(0x7FFF), halves.view(np.uint16))
    expected = np.ascontiguousarray(bits).view(np.uint32)[:, 0]
    return Case(
        f"unpack_{format}", record, expected, {"x": np.ascontiguousarray(x).view(np.uint16)[:, 0].astype(np.uint32)}
    )


def awkward_fp8(name: str, mantissa: int) -> np.ndarray:
    """Random fp32 of all exponents, and values near and halfway between neighbors within the range."""
    rng, count = seeded(name), 1000
    anything = rng.integers(0, 1 << 32, count, np.uint32)
    exponent, sign = rng.integers(105, 145, count), rng.integers(0, 2, count)
    ties = rng.integers(0, 1 << mantissa + 1, count) << 22 - mantissa | exponent << 23 | sign << 31
    beside = ties + rng.integers(-1, 2, count)
    specials = np.array([0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 448, 464, 465, 57344, 61440, 65536, -1e9, 1e-40],
                        np.float32)  # fmt: skip
    bits = np.concatenate([anything, ties, beside, specials.view(np.uint32)]).astype(np.uint32)
    return np.concatenate([bits, bits[: -len(bits) % 256]]).reshape(-1, 128, 2)


_a, _b, _c = seeded("exact").standard_normal((3, 128)).astype(np.float32)
_a[::9], _b[::7] = np.nan, np.nan
_a[1::16], _b[1::16] = (x * np.array([1, 1, -1, -1] * 2) for x in (0.0, 0.0))
_b[1::32] *= -1
_wide = _a.astype(np.float64) * _b
_exact = [_wide + _c, _wide - _a * _b, np.maximum(_a, _b), np.minimum(_a, _b)]
_zeros = (_a == 0) & (_b == 0)
_exact[2] = np.where(_zeros, np.where(np.signbit(_a) & np.signbit(_b), -0.0, 0.0), _exact[2])
_exact[3] = np.where(_zeros, np.where(np.signbit(_a) | np.signbit(_b), -0.0, 0.0), _exact[3])
_exact = [np.where(np.isnan(x), np.uint32(0x7FFFFFFF), x.astype(np.float32).view(np.uint32)) for x in _exact]
_bits = _c.view(np.uint32)
CASES += [
    Case("exact", exact, np.stack([*_exact, _bits << 16, _bits & 0xFFFF0000], 1).astype(np.uint32),
         {"x": np.stack([_a, _b, _c])}),
    packing_fp8("e4m3", awkward_fp8("e4m3", 3), ml_dtypes.float8_e4m3fn, 448),
    packing_fp8("e5m2", awkward_fp8("e5m2", 2), ml_dtypes.float8_e5m2, 57344),
    unpacking_fp8("e4m3", ml_dtypes.float8_e4m3fn),
    unpacking_fp8("e5m2", ml_dtypes.float8_e5m2),
    packing_int8(),
]  # fmt: skip


# -- lanes ---------------------------------------------------------------------------------------------------
def shuffles(k: Builder) -> None:
    out, x = k.pointer("out"), k.pointer("x")
    word = read_word(x, k.thread)
    other = ((k.lane * 5 + k.warp_index) % 32).to(U32)
    xors = [hw.shuffle_xor(word, mask) for mask in (1, 2, 16, 31)]
    write(out, k.thread, *xors, hw.shuffle_index(word, other), hw.shuffle_index(word, 7))


def matches(k: Builder) -> None:
    out, x = k.pointer("out"), k.pointer("x")
    word = read_word(x, k.thread)
    peers = hw.match_any(word >> 29)
    write(out, k.thread, peers, hw.population_count(peers), hw.population_count(word))


def redux(k: Builder) -> None:
    out, x = k.pointer("out"), k.pointer("x")
    word = read_word(x, k.thread)
    write(out, k.thread, hw.redux(word, "min"), hw.redux(word, "max"))


def opaque(k: Builder) -> None:
    out, x = k.pointer("out"), k.pointer("x")
    word = read_word(x, k.thread)
    write(out, k.thread, hw.opaque(word.to(I32)).to(U32), hw.opaque(word.to(I64)).to(U32))


_x, _lane = integers("shuffles", (128,)), THREAD % 32
_from = [_lane ^ mask for mask in (1, 2, 16, 31)] + [(_lane * 5 + THREAD // 32) % 32, _lane * 0 + 7]
CASES += [Case("shuffles", shuffles, np.stack([_x[THREAD - _lane + lane] for lane in _from], 1), {"x": _x})]
_same = (_x >> 29).reshape(4, 32, 1) == (_x >> 29).reshape(4, 1, 32)
_peers, _ones = (_same << np.arange(32)).sum(-1).ravel(), [word.bit_count() for word in _x.tolist()]
CASES.append(Case("matches", matches, np.stack([_peers, _same.sum(-1).ravel(), _ones], 1).astype(np.uint32), {"x": _x}))
_by_warp = [np.repeat(reduce(_x.reshape(4, 32), 1), 32) for reduce in (np.min, np.max)]
CASES.append(Case("redux", redux, np.stack(_by_warp, 1), {"x": _x}))
CASES.append(Case("opaque", opaque, np.stack([_x, _x], 1), {"x": _x}))


# -- the language ----------------------------------------------------------------------------------------------
def low(value: Value) -> Value:
    return value.to(U32)


def operations(k: Builder) -> None:
    """Integers that wrap, shift, divide, compare and convert as C's do."""
    out, x = k.pointer("out"), k.pointer("x")
    a, b = read_word(x, k.thread), read_word(x, k.thread + 128)
    i, j = (a & 0xFFFF).to(I32) - 30000, (b & 0xFF).to(I32) + 1
    wide = a.to(U64) * b.to(U64)
    signed = i.to(I64) * 1_000_000_007
    one = k.lane.to(U32) * 0 + 1
    numbers = [
        a + b, a - b, a * b, a // (b | 1), a % (b | 1), a & b, a | b, a ^ b, ~a, a << 7, a >> 7, a >> (k.lane % 32),
        low(i), low(-i), low(k.maximum(i, 0) // j), low(k.maximum(i, 0) % j), low(k.minimum(i, j)), low(i * j),
        low(i - j * 2), low(i >> 3), low(wide), low(wide >> 32), low(signed), low(signed >> 32),
        (a.to(U16)).to(U32), low(i.to(U64)), k.select(a < b, a, b), k.select((i < 0) & (j > 100), one, one * 2),
        k.select((i < 0) | ~(j > 100), one, one * 2), k.select((a == b) ^ (i != j), one, one * 2),
        (a + b) * (a - b) // (b | 1), a - (b - (a - b)), (a << 3) + (b >> 2) & 0xFFF, (a ^ b) + (a & b) * 2 - b,
    ]  # fmt: skip
    write(out, k.thread, *numbers)


def operations_expected(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b, u32 = a.astype(object), b.astype(object), 0xFFFFFFFF
    rows = []
    for lane, (x, y) in enumerate(zip(a, b, strict=True)):
        x, y, lane = int(x), int(y), lane % 32
        i, j, d = (x & 0xFFFF) - 30000, (y & 0xFF) + 1, y | 1
        p = max(i, 0)
        rows.append([
            x + y, x - y, x * y, x // d, x % d, x & y, x | y, x ^ y, ~x, x << 7, x >> 7, x >> lane,
            i, -i, p // j, p % j, min(i, j), i * j, i - 2 * j, i >> 3, x * y, x * y >> 32,
            i * 1_000_000_007, i * 1_000_000_007 >> 32, x & 0xFFFF, i, x if x < y else y,
            1 if i < 0 and j > 100 else 2, 1 if i < 0 or not j > 100 else 2, 1 if (x == y) != (i != j) else 2,
            (((x + y) & u32) * ((x - y) & u32) & u32) // d, x - (y - (x - y)), ((x << 3) + (y >> 2)) & 0xFFF,
            (x ^ y) + (x & y) * 2 - y,
        ])  # fmt: skip
    return np.array([[number & u32 for number in row] for row in rows], np.uint32)


def floats(k: Builder) -> None:
    out, x = k.pointer("out"), k.pointer("x")
    pair = k.registers(F32, 2, "pair")
    hw.load_global(pair, at(x, k.thread, 8), True)
    a, b = pair[0], pair[1]
    results = [a * b, a + b, a - b, -a, k.minimum(a, b), k.maximum(a, b), k.select(a < b, a, b), a * 0.5 + 3.0]
    results.append(a.to(I32).to(F32))
    write(out, k.thread, *map(hw.as_unsigned, results))


def variables(k: Builder) -> None:
    """Assignments under conditions and in loops, register arrays in unrolled ones, reads before writes."""
    out, x = k.pointer("out"), k.pointer("x")
    word = read_word(x, k.thread)
    total, last = k.var(U32, word, "total"), k.var(I32, -1, "last")
    table = k.registers(U32, 4, "table")
    with k.unroll(4, name="i") as i:
        table[i] = word >> (i * 8) & 0xFF
    with k.range(2, 11, 3, name="i") as i:
        before = total.get()
        with k.when(k.thread % 2 == 0):
            total.set(before * 3 + i.to(U32))
        with k.otherwise():
            total.set(before ^ (i * 77).to(U32))
            last.set(i)
        with k.when(i == 5):
            total.set(total.get() + before)
    first = table[0]
    table[0] = table[3]
    table[3] = first
    write(out, k.thread, total.get(), last.get().to(U32), *(table[i] for i in range(4)))


def variables_expected(x: np.ndarray) -> np.ndarray:
    rows = []
    for thread, word in enumerate(map(int, x)):
        total, last = word, -1
        for i in (2, 5, 8):
            before = total
            if thread % 2 == 0:
                total = before * 3 + i
            else:
                total, last = before ^ i * 77, i
            if i == 5:
                total += before
        a, b, c, d = word.to_bytes(4, "little")
        rows.append([number & 0xFFFFFFFF for number in (total, last, d, b, c, a)])
    return np.array(rows, np.uint32)


_x = integers("operations", (2, 128))
_f = integers("floats", (128, 2), np.float32, 500)
_a, _b = _f.T
_floats = [_a * _b, _a + _b, _a - _b, -_a, np.minimum(_a, _b), np.maximum(_a, _b), np.minimum(_a, _b), _a / 2 + 3, _a]
CASES += [
    Case("operations", operations, operations_expected(*_x), {"x": _x}),
    Case("floats", floats, np.stack(_floats, 1), {"x": _f}),
    Case("variables", variables, variables_expected(_x[0]), {"x": _x}),
]
