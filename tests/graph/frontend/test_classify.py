"""What operands are, against numpy's own broadcasting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmsmith.core.errors import EpilogueError
from gemmsmith.core.graph import BroadcastDims
from gemmsmith.graph.frontend.classify import classify


@pytest.mark.parametrize(
    ("shape", "product", "extent"),
    [
        ((), (6, 32), BroadcastDims()),
        ((1,), (6, 32), BroadcastDims()),
        ((32,), (6, 32), BroadcastDims(False, 0, 1)),
        ((1, 32), (6, 32), BroadcastDims(False, 0, 1)),
        ((6, 1), (6, 32), BroadcastDims(False, 1, 0)),
        ((6, 32), (6, 32), BroadcastDims(False, 1, 1)),
        ((16,), (6, 32), BroadcastDims(False, 0, 2)),
        ((6, 16), (6, 32), BroadcastDims(False, 1, 2)),
        ((3, 1, 1), (3, 6, 32), BroadcastDims(True, 0, 0)),
        ((3, 1, 32), (3, 6, 32), BroadcastDims(True, 0, 1)),
        ((3, 6, 1), (3, 6, 32), BroadcastDims(True, 1, 0)),
        ((3, 6, 16), (3, 6, 32), BroadcastDims(True, 1, 2)),
        ((1, 6, 32), (3, 6, 32), BroadcastDims(False, 1, 1)),
        ((6, 32), (3, 6, 32), BroadcastDims(False, 1, 1)),
        # an index that is there and as long as the product's varies, even where that is 1; (1,) is a scalar
        ((1,), (6, 1), BroadcastDims()),
        ((6, 1), (6, 1), BroadcastDims(False, 1, 1)),
        ((1, 32), (1, 32), BroadcastDims(False, 1, 1)),
        ((32,), (1, 32), BroadcastDims(False, 0, 1)),
        ((1, 6, 32), (1, 6, 32), BroadcastDims(True, 1, 1)),
        ((4,), (4, 4), BroadcastDims(False, 0, 1)),
    ],
)
def test_extents(shape: tuple[int, ...], product: tuple[int, ...], extent: BroadcastDims) -> None:
    assert classify("x", shape, product) == extent


@given(st.lists(st.integers(1, 5), max_size=4), st.lists(st.integers(1, 5), min_size=2, max_size=3))
def test_as_numpy_broadcasts(shape: list[int], product: list[int]) -> None:
    """Accepted is what broadcasts to the product, or to half its columns; the extent says which indices are kept."""
    halves = [product, [*product[:-1], product[-1] // 2]] if product[-1] % 2 == 0 else [product]
    fits = False
    for target in halves:
        try:
            fits |= np.broadcast_shapes(tuple(shape), tuple(target)) == tuple(target) and len(shape) <= len(product)
        except ValueError:
            pass
    if not fits:
        with pytest.raises(EpilogueError, match="^x: got shape"):
            classify("x", tuple(shape), tuple(product))
        return
    extent = classify("x", tuple(shape), tuple(product))
    n = product[-1] // extent.columns_per_value if extent.columns_per_value else 1
    kept = (
        *([product[0] if extent.batch else 1] if len(product) == 3 else []),
        product[-2] if extent.rows_per_value else 1,
        n,
    )
    assert np.broadcast_shapes(tuple(shape), kept) == kept


def test_messages() -> None:
    with pytest.raises(EpilogueError, match=r"bias: got shape \(5,\).*use \(\), \(32,\), \(6, 1\) or \(6, 32\)"):
        classify("bias", (5,), (6, 32))
    with pytest.raises(EpilogueError, match=r"scale: .* one value per row .* use \(6, 1\), a column"):
        classify("scale", (6,), (6, 32))
    with pytest.raises(EpilogueError, match="or a batch of 3 or 1 in front of two dimensions"):
        classify("c", (2, 6, 32), (3, 6, 32))
