"""Operations on values as the hardware computes them, uniform and of each thread; what C leaves undefined."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.backends.sim.tiny import kinds, run
from tests.conformance.case import write

import gemmsmith
from gemmsmith import hw
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import F32, I32, I64, PRED, U16, U32, U64, ScalarType
from gemmsmith.lang.values import Constant, Value


def stored(k: Builder, out: Value, value: Value) -> None:
    bits = hw.as_unsigned(value) if value.type == F32 else value.to(U32)
    with k.when(k.lane == 0):
        write(out, k.lane, bits)


DIVISIONS = {"//": lambda a, b: a // b, "%": lambda a, b: a % b}


@pytest.mark.parametrize("op", DIVISIONS)
@pytest.mark.parametrize(("numerator", "divisor"), [(7, 0), (-7, 2), (7, -2)])
@pytest.mark.parametrize("everywhere", [True, False])
def test_division_is_of_positive_numbers(op: str, numerator: int, divisor: int, everywhere: bool) -> None:
    """Of active threads, and of numbers that all threads share."""

    def record(k: Builder, out: Value) -> None:
        uniform = hw.block_index()
        a, b = (
            (uniform if everywhere else (k.lane - k.lane)) + numerator,
            (uniform if everywhere else (k.lane - k.lane)) + divisor,
        )
        stored(k, out, DIVISIONS[op](a, b))

    done = run(record, threads=32)
    assert kinds(done) == {"overflow"}
    assert "integer division with negative numerator or non-positive divisor" in str(done.hazards[0])


def test_threads_that_do_not_divide_may_hold_anything() -> None:
    def record(k: Builder, out: Value) -> None:
        with k.when(k.lane > 3):
            stored(k, out, 100 // k.lane)

    assert run(record, threads=32).hazards == []


CASTS = [
    (I32, U32, -1, 2**32 - 1), (U32, I32, 2**32 - 2, -2), (I32, U16, 65537 + 9, 10), (I64, I32, 2**32 + 5, 5),
    (U64, U32, 2**33 + 3, 3), (I32, I64, -7, -7), (F32, I32, -2.75, -2), (F32, I32, 2.75, 2),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target", "given", "want"), CASTS)
@pytest.mark.parametrize("everywhere", [True, False])
def test_casts_wrap_and_cut_as_cs_do(
    source: ScalarType, target: ScalarType, given: float, want: int, everywhere: bool
) -> None:
    def record(k: Builder, out: Value) -> None:
        zero = hw.block_index() if everywhere else (k.lane - k.lane)
        x = k.var(source, given, "x")
        value = (x.get() + zero.to(source)).to(target)
        stored(k, out, value.to(I64).to(U32) if target == I64 else value)

    found = np.full(1, 9, np.uint32)
    assert run(record, threads=32, out=found).hazards == []
    assert found[0] == want % 2**32


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize(("op", "outside"), [(lambda a: a + 1, True), (lambda a: a - 1, False), (lambda a: -a, False),
                                             (lambda a: a * 2, True), (lambda a: a // 2, False)])  # fmt: skip
def test_signed_numbers_do_not_overflow(everywhere: bool, op: Callable[[Value], Value], outside: bool) -> None:
    def record(k: Builder, out: Value) -> None:
        zero = hw.block_index() if everywhere else (k.lane - k.lane)
        stored(k, out, op(zero + (2**31 - 1)))

    done = run(record, threads=32)
    assert kinds(done) == ({"overflow"} if outside else set())
    if outside:
        assert "overflows i32" in str(done.hazards[0])


def test_floats_divide_as_floats(rng: np.random.Generator) -> None:
    a, b = (float(np.float32(x)) for x in rng.uniform(1, 2, 2))

    def record(k: Builder, out: Value) -> None:
        with k.when(k.lane == 0):
            quotients = [(hw.block_index().to(F32) + a) / b, (k.lane.to(F32) + a) / b]
            write(out, k.lane, *map(hw.as_unsigned, quotients))

    found = np.full(2, 9, np.uint32)
    assert run(record, threads=32, out=found).hazards == []
    assert found.view(np.float32).tolist() == [float(np.float32(a) / np.float32(b))] * 2


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_choice_of_two_constants_is_of_their_type(everywhere: bool, rng: np.random.Generator) -> None:
    """Literals and a constant with a name are rounded to fp32 before they are used, and so is each result."""
    a, b, c = (float(x) for x in rng.uniform(0.1, 0.9, 3))
    x, z = np.float32(a), np.float32(c)

    def record(k: Builder, out: Value) -> None:
        zero = hw.block_index() if everywhere else k.lane
        chosen = k.select(zero == 0, Constant(F32, a), b)
        named = k.select(zero == 0, Constant(F32, c, "c"), a)
        results = [chosen * chosen * chosen, chosen / -7.0, named * 3.0, named / chosen]
        bits = [hw.as_unsigned(value) for value in results]
        bits.append(k.select((chosen > b) | (chosen == a), Constant(U32, 1), 0))
        bits.append((k.select(zero == 0, 13, 17) // 5 % 2 << 3).to(U32))
        bits.append(k.select(((zero + 2).to(PRED) ^ (zero == 0)), Constant(U32, 7), 9))
        with k.when(k.lane == 0):
            write(out, k.lane, *bits)

    found = np.full(7, 99, np.uint32)
    assert run(record, threads=32, out=found).hazards == []
    want = np.array([x * x * x, x / np.float32(-7), z * np.float32(3), z / x], np.float32)
    assert found[:4].tolist() == want.view(np.uint32).tolist()
    assert found[4:].tolist() == [1, 0, 9]


FP32 = np.float32
CHOICES = {
    "sign": (lambda acc: np.sign(acc) / 3, lambda x: np.sign(x) / FP32(3)),
    "comparison": (lambda acc: (acc > 0) / (1 + abs(acc)), lambda x: (x > 0).astype(FP32) / (1 + abs(x))),
    "quotient": (lambda acc: np.where(acc > 0, 2.0, -1.0) / 4, lambda x: np.where(x > 0, FP32(0.5), FP32(-0.25))),
    "product": (lambda acc: np.where(acc > 0, 0.1, 0.3) * acc * acc * acc,
                lambda x: np.where(x > 0, FP32(0.1), FP32(0.3)) * x * x * x),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_epilogues_that_choose_between_constants_compute_in_fp32(name: str, rng: np.random.Generator) -> None:
    epilogue, wanted = CHOICES[name]
    a, b = (rng.integers(-9, 10, shape).astype(np.float16) for shape in ((32, 16), (16, 16)))
    d = gemmsmith.gemm(a, b, epilogue=epilogue, out_dtype="fp32", fast_math=False, backend="sim")
    assert d.tolist() == wanted(a.astype(FP32) @ b.astype(FP32)).tolist()
