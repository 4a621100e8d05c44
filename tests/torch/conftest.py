"""Skip these tests without torch, which is an extra: each file counts as one skipped test."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest


class Skipped(pytest.Module):
    """A file of tests that is not imported."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip("needs torch: pip install -e '.[dev,torch]'", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if find_spec("torch") else Skipped.from_parent(parent, path=module_path)
