"""The order of clusters: those of a GPC get consecutive places, whatever the chip; else clusters keep their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gemmsmith.backends.cuda import cluster_placement as placement
from gemmsmith.backends.cuda.kernel_loader import device_guard
from gemmsmith.core.errors import DeviceError
from gemmsmith.hw.cluster import MAX_CLUSTERS

IDENTITY = tuple(range(MAX_CLUSTERS))
GPCS = (16, 18, 16, 10, 18, 16, 18, 20)
"""SMs of each GPC, whose ids go round-robin over the GPCs that have more."""
SMS = [[] for _ in GPCS]  # type: list[list[int]]
for _sm, _gpc in enumerate(gpc for row in range(max(GPCS)) for gpc, size in enumerate(GPCS) if row < size):
    SMS[_gpc].append(_sm)


def permutation(*of: int) -> tuple[int, ...]:
    return tuple(placement.cluster_permutation(*of))


def place(cluster: int, clusters: int) -> np.ndarray[Any, Any]:
    """The SMs of clusters that go round-robin over the GPCs with room; those that do not fit run where others did."""
    if cluster > 16:
        raise DeviceError("too large")
    free, placed, gpc = [list(x) for x in SMS], [], 0
    while len(placed) < clusters:
        if all(len(x) < cluster for x in free):
            free = [list(x) for x in SMS]
        if len(free[gpc]) >= cluster:
            placed.append([free[gpc].pop(0) for _ in range(cluster)])
        gpc = (gpc + 1) % len(GPCS)
    return np.array(placed)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[int, int], Any]], None]]:
    """Replaces the probe."""

    def use(probe: Callable[[int, int], Any]) -> None:
        monkeypatch.setattr(placement, "_probe_sms", lambda device, cluster, clusters: probe(cluster, clusters))
        clear()

    def clear() -> None:
        for x in (placement.cluster_permutation, placement._gpc_of_cluster, placement._gpc_of_sm):
            x.cache_clear()

    monkeypatch.setattr(placement, "device_attributes", lambda device: SimpleNamespace(sm_count=sum(GPCS)))
    monkeypatch.setattr(placement, "_PAUSES_MS", (0, 0))
    yield use
    clear()


@pytest.mark.parametrize("cluster", [2, 4, 8])
def test_clusters_of_a_gpc_are_neighbors(cluster: int, use: Any) -> None:
    use(place)
    active = sum(x // cluster for x in GPCS)
    for clusters in (1, active // 2, active):
        order = permutation(0, cluster, active, clusters)
        assert sorted(order) == list(IDENTITY)
        assert order[clusters:] == IDENTITY[clusters:]
        sms = place(cluster, clusters)[:, 0]
        gpcs = [next(i for i, x in enumerate(SMS) if sm in x) for sm in sms]
        in_order = [gpcs[c] for c in np.argsort(order[:clusters])]
        assert sum(x != y for x, y in pairwise(in_order)) == len({*gpcs}) - 1
    assert order != IDENTITY


def test_more_clusters_than_sms_hold_keep_their_order(use: Any) -> None:
    use(place)
    assert permutation(0, 2, 132, 67) == IDENTITY  # two CTAs per SM


@pytest.mark.parametrize("what", ["refused", "moving", "occupied"])
def test_without_a_clear_answer_clusters_keep_their_order(what: str, use: Any, rng: np.random.Generator) -> None:
    """Of a device that refuses the probe, or whose SMs other kernels occupy."""

    def probe(cluster: int, clusters: int) -> Any:
        if what == "refused":
            raise DeviceError("no")
        if what == "moving":
            return rng.permutation(132)[: cluster * clusters].reshape(clusters, cluster)
        return place(cluster, clusters) % 60  # SMs run several CTAs, one after the other

    use(probe)
    assert permutation(0, 2, 66, 66) == IDENTITY


def test_other_kernels_end(use: Any, rng: np.random.Generator) -> None:
    busy = [True, True, False, False]

    def probe(cluster: int, clusters: int) -> Any:
        found = place(cluster, clusters)
        return rng.permutation(found) if busy and busy.pop(0) else found

    use(probe)
    assert permutation(0, 2, 66, 66) != IDENTITY


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [2, 4])
def test_the_gpu_has_an_order(cluster: int) -> None:
    with device_guard(0):
        sms = placement._probe_sms(0, cluster, 132 // cluster // 2)
        assert len(np.unique(sms)) == sms.size
        gpcs = placement._gpc_of_sm(0)[sms]
        assert (gpcs == gpcs[:, :1]).all()
        assert permutation(0, cluster, 132 // cluster, 20) != IDENTITY
