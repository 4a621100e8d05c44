"""What a kernel is made for: how the bare product's D leaves it."""

from __future__ import annotations

import pytest

from gemmsmith.core.dtypes import BF16
from gemmsmith.core.problem import Matrix
from gemmsmith.core.spec import EpilogueSpec


@pytest.mark.parametrize(
    ("d", "tma", "tall"),
    [
        (Matrix(BF16, 64, 256, 256, 1), True, False),  # row-major
        (Matrix(BF16, 256, 64, 1, 256), False, True),  # the same, swapped
        (Matrix(BF16, 256, 1, 1, 256), False, True),  # one row, swapped
        (Matrix(BF16, 64, 255, 255, 1), False, False),  # rows that TMA cannot reach
        (Matrix(BF16, 255, 64, 1, 255), False, True),
        (Matrix(BF16, 64, 256, 512, 2), False, False),  # no index is contiguous
    ],
)
def test_d_is_stored_along_what_is_contiguous(d: Matrix, tma: bool, tall: bool) -> None:
    found = EpilogueSpec.bare(d.canonical())
    assert (bool(found.tma), bool(found.tall)) == (tma, tall)
