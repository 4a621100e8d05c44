"""What a notebook shows of plans and simulations."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

import gemmsmith
from gemmsmith import Config, Spec
from gemmsmith.backends.cuda import compiler
from gemmsmith.backends.sim.execute.counters import Counters
from gemmsmith.backends.sim.report.hazards import Hazard
from gemmsmith.core.templates import html_section, html_table
from gemmsmith.host import simulation as simulations
from gemmsmith.lang.location import SourceLocation

SMALL = Config(tile=(64, 64, 64), cluster=(1, 1), consumers=1, stages=2)


class Page(HTMLParser):
    """HTML whose elements nest, with its tables' cells, its preformatted texts, and the titles of its sections."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.rows: list[list[str]] = []
        self.texts: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("th", "td"):
            self.rows[-1][-1] += data
        elif self.open and self.open[-1] in ("summary", "pre"):
            key = self.open[-1] if self.open[-1] == "summary" else self.texts["summary"]
            self.texts[key] = data

    @property
    def facts(self) -> dict[str, str]:
        """The tables' rows of two cells."""
        return {row[0]: row[1] for row in self.rows if len(row) == 2}


def test_of_a_plan(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path))
    a, b, bias = Spec((256, 512), "bf16"), Spec((512, 512), "bf16"), Spec((512,), "fp32")
    plan = gemmsmith.plan(a, b, epilogue=lambda acc, bias: (acc + bias).relu(), bias=bias, config=SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_compile", None)  # nothing is compiled for a representation
        page = Page(plan._repr_html_())
    assert page.facts["config"] == str(plan.config)
    assert page.facts["operands"] == "bias"
    assert page.facts["threads"] == f"{plan._planned.kernel.threads} per CTA"
    assert page.facts["registers"] == "known when compiled: plan.resources"
    assert page.facts["resident"].startswith("at most ")
    assert page.texts["epilogue"] == plan.epilogue
    assert page.texts["why"] == plan.why
    registers = plan.resources.registers
    for known in (plan, gemmsmith.plan(a, b, epilogue=lambda acc: acc, config=SMALL)):
        known.resources  # noqa: B018
        facts = Page(known._repr_html_()).facts
        assert facts["registers"] == f"{known.resources.registers} per thread"
        assert facts["spills"] == "0 bytes stored, 0 loaded"
    again = gemmsmith.plan(a, b, epilogue=lambda acc, bias: (acc + bias).relu(), bias=bias, config=SMALL)
    assert Page(again._repr_html_()).facts["registers"] == f"{registers} per thread"  # from the cache folder


def test_of_a_plan_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "is_available", lambda: False)
    plan = gemmsmith.plan(Spec((72, 64), "fp16"), Spec((64, 64), "fp16"), config=SMALL)
    assert "registers" in Page(plan._repr_html_()).facts


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_of_a_simulation(record: bool, counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = np.ones((128, 64), np.float16), np.ones((64, 64), np.float16)
    counters = Counters() if counted else None
    found = gemmsmith.plan(a, b, config=SMALL).simulate(a, b, record=record, counters=counters)
    page = Page(found._repr_html_())
    assert page.facts["cycles"] == str(found.cycles)
    assert page.facts["verdict"] == str(found.verdict)
    assert page.facts["hazards"] == "none"
    assert ("svg" in page.count) == record
    kernels = [row for row in page.rows if len(row) == 1 + len(simulations.COUNTS)][1:]
    assert [row[0] for row in kernels] == ([x.name for x in counters.kernels] if counters else [])
    if counters:
        assert int(kernels[0][2]) == 128 * 64 * 64  # multiply-adds
    monkeypatch.setattr(simulations, "find_spec", lambda name: None)  # without matplotlib
    assert "svg" not in Page(found._repr_html_()).count


def test_hazards_are_escaped_and_few() -> None:
    a, b = np.ones((64, 64), np.float16), np.ones((64, 64), np.float16)
    found = gemmsmith.plan(a, b, config=SMALL).simulate(a, b)
    hazard = Hazard("race", "x <script>alert(1)</script> & y\nmore", SourceLocation("<b>.py", 3))
    page = Page(replace(found, hazards=[hazard] * 40)._repr_html_())
    assert "script" not in page.count
    assert page.facts["hazards"] == "40"
    listed = [row[1] for row in page.rows if row[0] == ""]
    assert len(listed) == simulations.MAX_LISTED_HAZARDS
    assert "x <script>alert(1)</script> & y" in listed[0]
    assert "more" not in listed[0]


def test_markup() -> None:
    page = Page(html_table([("<a>", 1, "&")], ("x", "y", "'")))
    assert page.rows == [["x", "y", "'"], ["<a>", "1", "&"]]
    assert html_section("short", "one line").startswith("<details open>")
    long = html_section("long", "line\n" * 30)
    assert long.startswith("<details>")
    assert Page(long).texts["long"] == "line\n" * 30
