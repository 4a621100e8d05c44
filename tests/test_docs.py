"""The pages' Python runs as it is printed, and what they refer to exists."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from gemmsmith.cli import main

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    text = page.read_text()
    code = [
        *re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL),
        *re.findall(r"`(gemmsmith [^`]+)`", text),
    ]
    for name, words in re.findall(r"^(?:.*&& )?gemmsmith ([a-z]+)(.*)$", "\n".join(code), re.MULTILINE):
        assert name in main.commands, name
        options = {opt for p in main.commands[name].params for opt in (*p.opts, *p.secondary_opts)}
        assert set(re.findall(r"--[a-z-]+", words)) <= options, (name, words)


def test_every_environment_variable_is_documented() -> None:
    sources = (ROOT / "src").rglob("*.py")
    read = {name for path in sources for name in re.findall(r"environ\b\W+(?:get\W+)?(\w+)", path.read_text())}
    assert read
    assert read <= set(re.findall(r"`(\w+)`", (ROOT / "docs" / "environment.md").read_text()))
