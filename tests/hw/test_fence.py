"""Fences and dependent launch: how they print; the simulator's tests say what they order."""

from __future__ import annotations

import pytest
from tests.hw.one import Forms, ptx

from gemmsmith import hw

FORMS: Forms = {
    "fence.proxy.async.shared::cta;": lambda k: hw.fence_proxy_async(),
    "fence.proxy.async.global;": lambda k: hw.fence_proxy_async("global"),
    "fence.acq_rel.gpu;": lambda k: hw.fence_acq_rel(),
    "fence.acq_rel.cluster;": lambda k: hw.fence_acq_rel("cluster"),
    "griddepcontrol.wait;": lambda k: hw.grid_dependency_wait(),
    "griddepcontrol.launch_dependents;": lambda k: hw.launch_dependent_grids(),
}


@pytest.mark.parametrize("text", FORMS)
def test_ptx(text: str) -> None:
    assert ptx(FORMS[text]) == text
