"""The config of a batch-invariant GEMM: the tuned one where no sum depends on it; see tests/test_invariant.py."""

from __future__ import annotations

from typing import Any

import pytest

import gemmsmith
from gemmsmith import Spec


def configs(m: int, n: int, k: int, epilogue: Any = None) -> tuple[gemmsmith.Config, gemmsmith.Config]:
    """Return the config of a GEMM and of the batch-invariant one."""
    a, b = Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, k))
    usual, invariant = (gemmsmith.plan(a, b, epilogue=epilogue, batch_invariant=x).config for x in (False, True))
    return usual, invariant


def test_a_tuned_config_walks_one_way() -> None:
    usual, invariant = configs(4096, 4096, 4096)
    assert usual.serpentine
    assert invariant == usual.replace(serpentine=False)


def test_a_tuned_config_that_shares_k_is_not_taken() -> None:
    usual, invariant = configs(64, 4096, 4096)
    assert usual.splits * usual.cluster_splits != 1
    assert invariant.splits == invariant.cluster_splits == 1


@pytest.mark.parametrize("epilogue", [
    lambda acc: (acc, acc.sum(-1)), lambda acc: (acc, acc.sum((0, 1))), lambda acc: gemmsmith.top_k_softmax(acc, 2),
])  # fmt: skip
def test_sums_of_a_row_have_one_tile(epilogue: Any) -> None:
    found = {configs(m, 256, 4096, epilogue)[1].replace(stages=2) for m in (1, 64, 4096)}
    assert len({(c.tile, c.swap_ab, c.splits, c.cluster_splits) for c in found}) == 1


def test_sums_of_a_column_do_not() -> None:
    found = {configs(m, 4096, 4096, lambda acc: (acc, acc.sum(-2)))[1].tile for m in (1, 64, 4096)}
    assert len(found) > 1
