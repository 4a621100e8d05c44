"""Operands of an epilogue: every kind in every dtype, by TMA and by threads, at the edges of the product."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.epilogue.identity import TILE, small, through

import gemmsmith

SHAPES = {
    "row": lambda m, n: (n,),
    "column": lambda m, n: (m, 1),
    "matrix": lambda m, n: (m, n),
    "one": lambda m, n: (),
}
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.int32, np.int64, np.bool_]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: np.dtype(x).name)
def test_every_kind_in_every_dtype(dtype: Any, rng: np.random.Generator) -> None:
    x = small(rng, (70, 56))
    given = {kind: np.asarray(np.abs(small(rng, of(70, 56), np.float32))).astype(dtype) for kind, of in SHAPES.items()}
    found = through(x, lambda acc, row, column, matrix, one: acc + row - 2 * column + 3 * matrix - 4 * one,
                    out_dtype="fp32", **given)  # fmt: skip
    wide = {kind: value.astype(np.float32) for kind, value in given.items()}
    want = x.astype(np.float32) + wide["row"] - 2 * wide["column"] + 3 * wide["matrix"] - 4 * wide["one"]
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(("m", "n"), [(1, 8), (65, 49), (63, 47), (130, 96)])
def test_at_the_edges(m: int, n: int, rng: np.random.Generator) -> None:
    """Rows that TMA cannot read, and tiles that stick out."""
    x, row, column, matrix = (small(rng, shape) for shape in ((m, n), (n,), (m, 1), (m, n)))
    found = through(x, lambda acc, row, column, matrix: (acc - matrix) * row + column,
                    row=row, column=column, matrix=matrix, out_dtype="fp32")  # fmt: skip
    np.testing.assert_array_equal(found, (x.astype(np.float32) - matrix) * row + column)


@pytest.mark.parametrize("form", ["padded", "column-major", "spread", "offset", "backwards"])
def test_any_strides(form: str, rng: np.random.Generator) -> None:
    x, store = small(rng, (70, 56)), small(rng, (160, 160))
    c = {
        "padded": store[:70, :56], "column-major": store.T[:70, :56], "spread": store[: 2 * 70 : 2, : 2 * 56 : 2],
        "offset": store[3:73, 5:61], "backwards": store[:70, :56][::-1, ::-1],
    }[form]  # fmt: skip
    found = through(x, lambda acc, c: acc - c, c=c, out_dtype="fp32")
    np.testing.assert_array_equal(found, x.astype(np.float32) - c.astype(np.float32))


@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize(("dtype", "n", "by_tma"), [
    ("bool", 96, True), ("bool", 88, False), ("bool", 95, False), ("int32", 92, True), ("int32", 95, False),
    ("int64", 96, False),
])  # fmt: skip
def test_integers_by_tma_and_by_threads(
    dtype: str, n: int, by_tma: bool, swap_ab: bool, rng: np.random.Generator
) -> None:
    """Tiles that stick out of the product; a byte that is not zero is True."""
    x, mask = small(rng, (70, n)), rng.integers(-100, 100, (70, n)).astype(dtype)
    if dtype == "bool":
        mask = rng.choice([0, 0, 1, 2, 127, 128, 255], (70, n)).astype(np.uint8).view(bool)
    config = TILE.replace(swap_ab=swap_ab)
    options: Any = {"operands": {"mask": mask}, "config": config, "out_dtype": "fp32"}
    plan = gemmsmith.plan(x, np.eye(n, dtype=x.dtype), epilogue=lambda acc, mask: acc * mask + 1, **options)
    assert ("mask" in plan._planned.spec.tma_names) == by_tma
    found = through(x, lambda acc, mask: acc * mask + 1, config, mask=mask, out_dtype="fp32")
    number = (mask.view(np.uint8) != 0) if dtype == "bool" else mask
    np.testing.assert_array_equal(found, x.astype(np.float32) * number + 1)


def test_many_operands_at_once(rng: np.random.Generator) -> None:
    x = small(rng, (70, 56))
    given = {f"{kind}_{i}": small(rng, of(70, 56)) for kind, of in SHAPES.items() for i in range(2)}

    def everything(acc, row_0, row_1, column_0, column_1, matrix_0, matrix_1, one_0, one_1):
        return acc + row_0 - row_1 + column_0 * 2 + column_1 + matrix_0 - matrix_1 * 2 + one_0 - one_1

    wide = {name: value.astype(np.float64) for name, value in given.items()}
    found = through(x, everything, out_dtype="fp32", **given)
    np.testing.assert_array_equal(found, everything(x.astype(np.float64), **wide))


@pytest.mark.parametrize(
    "design", [{"design": "tma"}, {"design": "pingpong", "consumers": 2}, {"alias_epilogue": True}]
)
def test_in_every_design(design: dict[str, Any], rng: np.random.Generator) -> None:
    """Several tiles a CTA: the next tile's operands come while this one's are used."""
    x, row, c = small(rng, (130, 60)), small(rng, (60,)), small(rng, (130, 60))
    found = through(x, lambda acc, row, c: (acc + row) * c, TILE.replace(**design), row=row, c=c, out_dtype="fp32")
    np.testing.assert_array_equal(found, (x.astype(np.float32) + row) * c)


@pytest.mark.parametrize("form", ["padded", "rows", "one column per two"])
def test_halves_of_several_tiles(form: str, rng: np.random.Generator) -> None:
    """A matrix of half as many columns, by TMA and by threads, and a row: those of the tile's half."""
    x, store, row = small(rng, (70, 96)), small(rng, (140, 112)), small(rng, (48,))
    c = {"padded": store[:70, :48], "rows": store[3:73, 5:53], "one column per two": store[:140:2, :96:2]}[form]

    def gated(acc: Any, c: Any, row: Any) -> Any:
        gate, up = gemmsmith.deinterleave(acc)
        return gate + 3 * up - c + row

    found = through(x, gated, TILE.replace(tile=(64, 32, 32)), c=c, row=row, out_dtype="fp32")
    gate, up = gemmsmith.deinterleave(x.astype(np.float32))
    np.testing.assert_array_equal(found, gate + 3 * up - c + row)


def test_halves_that_end_within_a_tile(rng: np.random.Generator) -> None:
    """Nothing behind the last row is read."""
    x, c = small(rng, (70, 80)), small(rng, (70, 45))[:, 5:]

    def gated(acc: Any, c: Any) -> Any:
        gate, up = gemmsmith.deinterleave(acc)
        return gate + 3 * up - c

    found = through(x, gated, TILE.replace(tile=(64, 32, 32)), c=c, out_dtype="fp32")
    gate, up = gemmsmith.deinterleave(x.astype(np.float32))
    np.testing.assert_array_equal(found, gate + 3 * up - c)
