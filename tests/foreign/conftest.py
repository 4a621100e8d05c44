from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def poisoned() -> Iterator[None]:
    """What torch allocates is NaN until something is written."""
    import torch

    torch.use_deterministic_algorithms(True)
    x = torch.ones(1)
    assert all(y.isnan().all() for y in (torch.empty(3), x.new_empty(3), x.new_empty_strided((3, 2), (1, 4))))
    yield
    torch.use_deterministic_algorithms(False)
