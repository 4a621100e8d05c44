"""A plan that serves another M: its binding and launches are those of a plan of its own; what it must not serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

import gemmsmith
from gemmsmith import ArgumentError
from gemmsmith.binding.request import Request, read_arrays, without_rows
from gemmsmith.binding.results import outputs_by_name
from gemmsmith.core.frozen import changed
from gemmsmith.graph.frontend.fingerprint import fingerprint
from gemmsmith.host import cached_run
from gemmsmith.host.launch_sequence import build_launches
from gemmsmith.host.planned_gemm import PlannedGemm
from gemmsmith.tuning.choice import rounded_rows

N, K, MOST = 256, 384, 600
BF16 = ml_dtypes.bfloat16
Arrays = dict[str, Any]


def relu(acc: Any) -> Any:
    return acc.relu()


def vectors(acc: Any, row: Any, column: Any, number: Any) -> Any:
    return acc * row + column * number


def residual(acc: Any, c: Any) -> Any:
    return acc + c


def mean(acc: Any) -> Any:
    return acc, acc.mean(0, keepdim=True), acc.sum(1, keepdim=True)


def twice(acc: Any) -> Any:
    return acc, acc * 2


def divided(acc: Any) -> Any:
    return acc / acc.shape[0]


def matrix(rows: int, columns: int, dtype: Any = BF16, *, pitch: int = 0) -> np.ndarray[Any, Any]:
    """Return random elements in rows of `pitch` elements."""
    numbers = np.random.default_rng().standard_normal((max(rows, MOST), pitch or columns), np.float32)
    return numbers.astype(dtype)[:rows, :columns]


def plain(m: int) -> Arrays:
    return {"a": matrix(m, K), "b": matrix(K, N)}


def column_major_b(m: int) -> Arrays:
    return {"a": matrix(m, K, pitch=K + 40), "b": np.asfortranarray(matrix(K, N)), "out": matrix(m, N, pitch=N + 8)}


def unaligned(m: int) -> Arrays:
    return {"a": matrix(m, K - 5), "b": matrix(K - 5, N - 3), "out": matrix(m, N - 3, np.float32)}


def with_vectors(m: int) -> Arrays:
    operands = {
        "row": matrix(m, 1),
        "column": matrix(1, N, np.float32),
        "number": float(np.random.default_rng().random()),
    }
    return {**plain(m), "epilogue": vectors, "operands": operands, "out_dtype": "fp32"}


def with_residual(m: int) -> Arrays:
    c = matrix(m, N, np.float32, pitch=N + 4)
    return {**plain(m), "epilogue": residual, "operands": {"c": c}, "out_dtype": "fp32"}


def row_scales(m: int) -> Arrays:
    fp8 = ml_dtypes.float8_e4m3fn
    scales = {"scale_a": matrix(m, 1, np.float32), "scale_b": matrix(1, N, np.float32)}
    return {"a": matrix(m, K, fp8), "b": np.asfortranarray(matrix(K, N, fp8)), **scales, "out_dtype": "bf16"}


def block_scales(m: int) -> Arrays:
    scales = {"scale_a": matrix(m, K // 128, np.float32), "scale_b": matrix(K // 128, N // 128, np.float32)}
    return {**row_scales(m), **scales}


def three_terms(m: int) -> Arrays:
    return {"a": matrix(m, K, np.float32), "b": matrix(K, N, np.float32), "precision": "3xtf32"}


SERVED: list[Callable[[int], Arrays]] = [
    plain, column_major_b, unaligned, with_vectors, with_residual, row_scales, block_scales, three_terms,
    lambda m: {**plain(m), "epilogue": relu, "out": matrix(m, N)},
    lambda m: {**plain(m), "epilogue": mean},
    lambda m: {**plain(m), "epilogue": twice, "out": (matrix(m, N), matrix(m, N, pitch=N + 8))},
]  # fmt: skip
OTHERS: list[Callable[[int], Arrays]] = [
    lambda m: {**plain(m), "epilogue": divided},
    lambda m: {**plain(m), "a": np.asfortranarray(matrix(m, K))},
    lambda m: {**plain(m), "out": np.asfortranarray(matrix(m, N))},
    lambda m: {**plain(m), "a": matrix(m, K)[None]},
    lambda m: {**plain(m), "epilogue": lambda acc: gemmsmith.quantize(acc)},
    lambda m: {**plain(m), "epilogue": twice, "out": (matrix(m, N), np.asfortranarray(matrix(MOST, N))[:m])},
    lambda m: {**plain(m), "batch_invariant": True},
]


def read(arrays: Arrays) -> tuple[Request, Any, dict[str, Any]]:
    request = Request(**arrays)._replace(fingerprint=fingerprint(arrays.get("epilogue")))
    results = outputs_by_name(request.out)
    return request, *read_arrays(request.a, request.b, results, request.operands, request.scale_a, request.scale_b)


@given(some.sampled_from(SERVED), some.integers(2, MOST // 8 - 1), some.data())
def test_the_binding_is_that_of_a_plan_of_its_own(make: Callable[[int], Arrays], step: int, data: Any) -> None:
    one, other = (data.draw(some.integers(8 * step - 7, 8 * step)) for _ in range(2))
    (first, first_key, _), (second, key, addresses) = read(make(one)), read(make(other))
    planned, own = PlannedGemm(first), PlannedGemm(second)
    assert planned.serves_other_rows
    assert rounded_rows(one) == rounded_rows(other)
    assert without_rows(first_key, one) == without_rows(key, other)
    binding = planned.binding.with_rows(other, addresses, own.binding.results, second.a)
    assert binding.results is own.binding.results
    assert changed(binding, results={}) == changed(own.binding, results={})
    assert (planned.config, planned.spec) == (own.config, own.spec)
    assert build_launches(binding, planned.spec) == own.launches


@pytest.mark.parametrize("make", OTHERS)
def test_what_depends_on_m_otherwise_has_plans_of_its_own(make: Callable[[int], Arrays]) -> None:
    assert not PlannedGemm(read(make(100))[0]).serves_other_rows


def compute(arrays: Arrays) -> Any:
    epilogue = arrays.get("epilogue")
    if epilogue is None:
        return gemmsmith.gemm(**{name: x for name, x in arrays.items() if name != "epilogue"})
    return gemmsmith.gemm(**arrays)


@pytest.mark.parametrize("m", [(100, 97, 104, 99, 97), (16, 13, 9)])
def test_values(m: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one plan, each right, as a number of the epilogue differs, too."""
    cached_run._PLANS_BY_ROWS.clear()
    monkeypatch.setattr(cached_run, "_PLAN_CACHE", {})
    for rows in m:
        x = with_vectors(rows)
        c = {name: np.asarray(v, np.float64) for name, v in x["operands"].items()}
        product = np.asarray(x["a"], np.float64) @ np.asarray(x["b"], np.float64)
        d = np.full((rows, N), np.nan, np.float32)
        gemmsmith.gemm(**x, out=d)
        np.testing.assert_allclose(d, product * c["row"] + c["column"] * c["number"], rtol=1e-5, atol=1e-4)
    assert len(cached_run._PLANS_BY_ROWS) == 1
    assert len({id(planned) for planned, _ in cached_run._PLAN_CACHE.values()}) == 1


def test_a_result_that_overlaps_has_a_plan_of_its_own() -> None:
    """Adding in place is allowed, another overlap is refused; neither is decided by a plan of other arrays."""
    memory = np.zeros((MOST, N), np.float32)
    for rows in (100, 99, 98):
        x = with_residual(rows)
        memory[:rows] = x["operands"]["c"]
        expected = np.asarray(x["a"], np.float64) @ np.asarray(x["b"], np.float64) + memory[:rows]
        gemmsmith.gemm(**{**x, "operands": {"c": memory[:rows]}}, out=memory[:rows])
        np.testing.assert_allclose(memory[:rows], expected, rtol=1e-5, atol=1e-4)
        gemmsmith.gemm(**{**x, "operands": {"c": matrix(rows, N, np.float32)}}, out=memory[:rows])
        with pytest.raises(ArgumentError, match="overlap"):
            gemmsmith.gemm(**{**x, "operands": {"c": memory[1 : rows + 1]}}, out=memory[:rows])


@pytest.mark.parametrize("wrong", ["row", "out", "b", "scale_b"])
def test_wrong_shapes_are_refused_after_right_ones(wrong: str) -> None:
    """Also where M is as many as other sizes: no size but M may follow M."""
    m, other = (K // 128 + 13, 12) if wrong == "scale_b" else (100, 99)
    make = block_scales if wrong == "scale_b" else with_vectors
    x, y = ({**make(rows), "out_dtype": "fp32", "out": np.empty((rows, N), np.float32)} for rows in (m, other))
    compute(x)
    if wrong == "out":
        y["out"] = x["out"]
    elif wrong == "row":
        y["operands"]["row"] = x["operands"]["row"]
    else:
        y[wrong] = y[wrong][: y[wrong].shape[0] - 1]
    with pytest.raises(ArgumentError):
        compute(y)


def test_the_scales_of_b_do_not_follow_m() -> None:
    """K has 16 blocks and M is 16: with M = 12 there must still be 16 blocks of scales."""
    fp8 = ml_dtypes.float8_e4m3fn

    def arrays(m: int, blocks: int) -> Arrays:
        scale_b = np.ones((blocks, N // 128), np.float32)
        return {
            "a": matrix(m, 2048, fp8), "b": np.asfortranarray(matrix(2048, N, fp8)), "out_dtype": "fp32",
            "scale_a": np.ones((m, 16), np.float32), "scale_b": scale_b,
        }  # fmt: skip

    compute(arrays(16, 16))
    compute(arrays(12, 16))
    with pytest.raises(ArgumentError, match="scale_b"):
        compute(arrays(12, 12))
