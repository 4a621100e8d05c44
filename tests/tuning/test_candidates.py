"""Which configs are considered."""

from __future__ import annotations

from gemmsmith.core.dtypes import BF16
from gemmsmith.core.graph import identity_graph
from gemmsmith.core.spec import EpilogueSpec
from gemmsmith.tuning.candidates import candidates


def test_clusters_along_n_walk_along_n() -> None:
    """The tiles of a cluster share the operand that the next ones use again."""
    configs = list(candidates(EpilogueSpec(identity_graph(BF16), frozenset({"out"}))))
    assert {(c.cluster, c.raster) for c in configs} == {((1, 2), "n"), ((2, 1), "m"), ((1, 1), "m")}
    assert all((c.raster == "n") == (c.cluster[1] > c.cluster[0]) for c in configs)
    assert max(c.stages for c in configs) == 16
    assert min(c.stages for c in configs) >= 3
