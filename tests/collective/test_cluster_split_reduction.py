"""Sums of the CTAs of a cluster through distributed shared memory."""

from __future__ import annotations

import numpy as np
import pytest
from tests.collective.exact_gemm import check

from gemmsmith import Config

TILE = Config(tile=(64, 32, 32), cluster=(1, 1), consumers=1, stages=2)


@pytest.mark.parametrize("splits", [2, 3, 4])
@pytest.mark.parametrize("n", [32, 48])
def test_each_cta_finishes_its_part_or_the_last_all(splits: int, n: int, rng: np.random.Generator) -> None:
    """Several tiles a cluster, whose slots are used again; the depth is no multiple of the shares."""
    check(TILE.replace(tile=(64, n, 32), cluster_splits=splits), 64 * 3, n, 32 * 5 + 8, rng)


@pytest.mark.parametrize("k_tiles", [0, 1, 2])
def test_shares_may_be_empty(k_tiles: int, rng: np.random.Generator) -> None:
    check(TILE.replace(cluster_splits=4), 70, 30, 32 * k_tiles, rng)


@pytest.mark.parametrize(("tile", "consumers", "cluster"), [((128, 32, 32), 2, (1, 1)), ((64, 32, 32), 1, (2, 1))])
def test_warpgroups_and_multicast_beside_it(
    tile: tuple[int, int, int], consumers: int, cluster: tuple[int, int], rng: np.random.Generator
) -> None:
    config = TILE.replace(tile=tile, consumers=consumers, cluster=cluster, cluster_splits=2)
    check(config, 128, 32, 32 * 3, rng)


def test_packed_sums_are_added_as_fp16(rng: np.random.Generator) -> None:
    check(TILE.replace(cluster_splits=2), 70, 32, 100, rng, accumulate="fp16")
