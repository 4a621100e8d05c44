"""The pages' Python runs as it is printed, and what they refer to exists."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_epilogue_page_runs() -> None:
    text = (ROOT / "docs" / "epilogues.md").read_text()
    scope: dict[str, object] = {}
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        line = text[: block.start()].count("\n") + 1
        source = "\n" * line + block.group(1)
        exec(compile(source, "docs/epilogues.md", "exec"), scope)
    assert np.isfinite(scope["loss"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_environment_variable_is_documented() -> None:
    sources = (ROOT / "src").rglob("*.py")
    read = {name for path in sources for name in re.findall(r"environ\b\W+(?:get\W+)?(\w+)", path.read_text())}
    assert read
    assert read <= set(re.findall(r"`(\w+)`", (ROOT / "docs" / "environment.md").read_text()))
