"""Scripted use of the page to step through a kernel: a hazard of each kind at its place, clicks, schedules, windows."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.backends.sim.faults import FAULTS
from tests.backends.sim.tiny import execute, kernel, run, word
from tests.browser import Page, open_browser

import gemmsmith
from gemmsmith import Config, hw
from gemmsmith.backends.sim import SimulationResult
from gemmsmith.backends.sim.report import page as page_module
from gemmsmith.backends.sim.report.hazards import Place
from gemmsmith.backends.sim.report.page import write_page
from gemmsmith.backends.sim.report.record import Record
from gemmsmith.backends.sim.run import run as run_launches
from gemmsmith.binding.request import Request
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.core.errors import ArgumentError
from gemmsmith.host.planned_gemm import PlannedGemm
from gemmsmith.host.simulation import Simulation
from gemmsmith.kernels.build import build
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.launch import Launch, Launches
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Value

pytestmark = pytest.mark.slow
THEMES = {"light": "rgb(253, 236, 235)", "dark": "rgb(61, 21, 19)"}  # and the background of a hazard


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from open_browser()


def shown(result: SimulationResult) -> tuple[Any, Any, str]:
    return result.records[0], result.hazards, f"{result.verdict}"


@pytest.mark.parametrize("kind", FAULTS)
def test_a_hazard_at_its_place(browser: Any, kind: str, tmp_path: Path) -> None:
    fault = FAULTS[kind]
    result = run(fault.record, fault.threads, fault.cluster, fault.cluster, observe=True)
    hazard = next(x for x in result.hazards if x.kind == kind)
    write_page(tmp_path / "page.html", *shown(result))
    page, fields = Page(browser, tmp_path / "page.html"), hazard.to_json()
    assert page.value("data.found.length") == len(result.hazards)
    for _ in result.hazards:
        page.keys("h")
        if kind in page.text(".found.now"):
            break
    assert page.value("step") == hazard.event
    assert page.value("cta") == result.records[0].events[hazard.event or 0].agent[0]
    text = next(x.text for x in browser.find_elements("css selector", ".found.now") if x.text.endswith(hazard.hint))
    assert all(x in page.text("#here") for x in (kind, hazard.message, hazard.hint))
    assert page.value("$('here').getBoundingClientRect().top < innerHeight")
    first, *others = fields["places"]
    assert fault.line in first["python"]["text"]
    assert all(x in text for x in (kind, hazard.message))
    assert all(f"{Path(x['python']['file']).name}:{x['python']['line']}" in text for x in (first, *others))
    lit = {*page.value("[...document.querySelectorAll('#cuda .hazard')].map((x) => +x.dataset.line)")}
    assert {x["cuda"]["line"] for x in (first, *others) if x["cuda"]} <= lit
    lanes = page.value("[...document.querySelectorAll('#names .hazard')].map((x) => data.lanes[x.dataset.lane])")
    assert all(any(x["agent"].startswith(f"CTA {cta} {y}") for cta, y in lanes) for x in (first, *others))
    for theme, color in THEMES.items():
        page.theme(theme)
        assert page.value("getComputedStyle(document.querySelector('.found.now')).backgroundColor") == color
    assert page.errors() == []


def test_a_hazard_leads_to_its_other_access(browser: Any, tmp_path: Path) -> None:
    fault = FAULTS["missing proxy fence"]
    result = run(fault.record, fault.threads, observe=True)
    (hazard,), (record,) = result.hazards, result.records
    write_page(tmp_path / "page.html", *shown(result))
    page = Page(browser, tmp_path / "page.html")
    page.keys("h")
    page.find("#here a").click()
    page.wait_for(f"step !== {hazard.event}")
    event, (other,) = record.events[page.value("step")], hazard.others
    assert (event.statement, event.agent[0], event.loops) == (other.number, other.cta, other.loops)
    assert not page.text("#here")
    assert page.errors() == []


@pytest.mark.parametrize("kind", ["missing wait_group", "access to exited CTA"])
def test_what_is_wrong_when_a_cta_exits_is_at_its_exit(browser: Any, kind: str, tmp_path: Path) -> None:
    fault = FAULTS[kind]
    result = run(fault.record, fault.threads, 4, fault.cluster, random.randrange(100), observe=True)
    (record,), hazard = result.records, next(x for x in result.hazards if x.kind == kind)
    found = re.search(r"CTA (\d) (exits|may exit)", hazard.message)
    assert found
    exits = [i for i, x in enumerate(record.events) if (x.kind, x.agent[0]) == ("exit", int(found[1]))]
    write_page(tmp_path / "page.html", *shown(result))
    page = Page(browser, tmp_path / "page.html")
    page.value(f"goTo({exits[-1] - 1})")
    page.keys("h")
    assert page.value("[step, cta]") == [exits[-1], int(found[1])]
    assert hazard.message in page.text("#here")
    access = page.value("stepOf(+$('here').querySelector('a').hash.slice(6))")
    assert isinstance(hazard.location, Place)
    assert (record.events[access].statement, record.events[access].agent[0]) == (
        hazard.location.number, hazard.location.cta)  # fmt: skip
    assert page.errors() == []


def test_a_stage_tells_of_reads_while_it_is_loaded(
    browser: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    build.cache_clear()
    monkeypatch.setattr(Accumulator, "wait", lambda *arguments, **options: None)
    a, b = np.ones((128, 1024), np.float16), np.ones((1024, 64), np.float16)
    config = Config("cooperative", (128, 48, 64), (1, 1), 3)
    simulation = gemmsmith.simulate(a, b, config=config, record=True, seed=random.randrange(1, 100))
    build.cache_clear()
    record = simulation.record
    assert record
    simulation.to_html(tmp_path / "page.html")
    page, seen = Page(browser, tmp_path / "page.html"), set[str]()
    for load in record.operations:
        (slot,) = load.route.writes if load.route.engine == "TMA" else [(-1, "")]
        reads = [x for x in record.operations if slot in x.route.reads and x.issue < load.issue]
        if slot[0] != 0 or not reads:
            continue
        page.value(f"goTo({load.issue}, true)")
        _, _, *lines = page.text(f"[data-pick='slot 0 {slot[1]}']").split("\n")
        for begin, end, complete in (("still read by", "", False), ("read by", ", not waited for", True)):
            own = [x.issue for x in reads if (0 <= x.complete <= load.issue) == complete]
            text = f" × {len(own)}, steps {own[0]} to {own[-1]}" if len(own) > 1 else f", step {own[0]}" if own else ""
            assert not own or f"{begin} {reads[0].route.label}{text}{end}" in lines
            seen |= {begin} if own else set()
    assert seen == {"still read by", "read by"}
    assert page.errors() == []


def test_a_barrier_lists_the_arrivals_of_its_phase(
    browser: Any, gemm: tuple[Simulation, Record], tmp_path: Path
) -> None:
    record = gemm[1]
    page, _ = open_at(browser, gemm, tmp_path, 0)
    begin = max(i for i, x in enumerate(record.events) if x.kind == "init")
    for step in random.sample(range(begin, len(record)), 12):
        page.value(f"goTo({step}, true)")
        cta = record.events[step].agent[0]
        for slot in range(3):
            barrier = (cta, f"mainloop full barrier[{slot}]")
            own = [i for i, x in enumerate(record.events[: step + 1]) if x.object == barrier and x.phase >= 0
                   and x.kind not in ("block", "resume")]  # fmt: skip
            phase = record.events[own[-1]].phase
            wanted = [i for i in own if record.events[i].phase == phase]
            card = f"[data-barrier='{barrier[1]}']"
            assert page.value(f"""[...document.querySelectorAll("{card} a")].map((x) => +x.hash.slice(6))""") == wanted
            assert page.text(card).count(".py:") == len(wanted)
            assert ("completes" in page.text(card)) == (phase > 0)
    link = page.find("#barriers a")
    arrival = link.get_attribute("hash").removeprefix("#step=")
    link.click()
    page.wait_for(f"step === {arrival}")
    assert page.value("picked") is None
    assert page.errors() == []


def test_the_end_of_a_cluster_and_how_far_lanes_are(browser: Any, tmp_path: Path) -> None:
    a, b = np.ones((256, 256), np.float16), np.ones((256, 128), np.float16)
    config = Config("cooperative", (128, 64, 64), (1, 1), 3)
    simulation = gemmsmith.simulate(a, b, config=config, seed=random.randrange(100), record=True)
    record = simulation.record
    assert record
    simulation.to_html(tmp_path / "page.html")
    page = Page(browser, tmp_path / "page.html", "#step=0")
    assert not page.text("#total").endswith("the last of this cluster")
    last = {cta: max(i for i, x in enumerate(record.events) if x.agent[0] == cta) for cta in range(4)}
    for cta, step in last.items():
        page.find(f"#cta [value='{cta}']").click()
        page.find("#lanes-title").click()
        page.value("document.activeElement.blur()")
        page.keys("\ue010")  # End
        assert page.value("step") == step
        assert page.text("#total").endswith(", the last of this cluster") == (step < len(record) - 1)
        assert page.value("toCycle <= 1.02 * data.cycles && fromCycle <= events.time[step]")
    lanes = page.value("data.lanes")
    for step in random.sample(range(len(record)), 30):
        now = record.events[step].time
        reached = page.value(f"data.lanes.map((_, lane) => reachedAt({step}, lane))")
        for lane, cycle in zip(map(tuple, lanes), reached, strict=True):
            own = [x for x in record.events[: step + 1] if x.agent == lane]
            issued = [x for x in record.operations if x.issue <= step and x.route.engine == lane[1]
                      and record.events[x.issue].agent[0] == lane[0]]  # fmt: skip
            if not own and not issued:
                assert cycle == -1
            elif own and not issued and own[-1].kind != "block":
                assert cycle == own[-1].time
            elif own and not issued:
                resumed = next(x.time for x in record.events[step + 1 :] if x.agent == lane)
                assert own[-1].time <= cycle <= max(own[-1].time, min(now, resumed))
            else:
                assert cycle == max([x.time for x in own[-1:]] + [min(now, x.end) for x in issued[-1:]])
    assert page.errors() == []


def counted_hazards() -> list[SimulationResult]:
    """Of a kernel in which the elected lane stores what lane 13 loads: seed 0 elects lane 13."""

    def record(k: Builder, out: Value) -> None:
        smem = k.shared(4, name="elected")
        with k.when(hw.elect_one()):
            hw.store_shared(word(k, k.smem), smem[0].address)
        with k.when(k.lane == 13):
            hw.load_shared(k.registers(U32, 1, "got"), smem[0].address)

    made = kernel(record, 32)
    return [execute(made, 1, seed, observe=True) for seed in range(4)]


def test_schedules(browser: Any, tmp_path: Path) -> None:
    results = counted_hazards()
    bad = [seed for seed, x in enumerate(results) if x.hazards]
    assert 0 not in bad
    assert bad
    first, *others = map(shown, results)
    write_page(tmp_path / "page.html", *first, others=others)
    page = Page(browser, tmp_path / "page.html")
    assert page.find("#schedule").is_displayed()
    assert [page.text("#first-seed"), page.text("#last-seed")] == ["0", "3"]
    assert page.text("#seed") == f"seed 0: no hazards. {len(bad)} of 4 seeds have hazards: {', '.join(map(str, bad))}."
    for seed in (*bad, bad[0]):  # and round again
        page.find("#next-seed").click()
        page.wait_for(f"data.seed === {seed}")
        assert page.value("step") == results[seed].hazards[0].event
        assert "race" in page.text(".found.now")
        assert page.value("data.count") == len(results[seed].records[0])
    page.find("#schedule").send_keys("\ue011")  # Home
    page.wait_for("data.seed === 0")
    assert page.value("[data.found.length, $('cta').options.length, picked]") == [0, 1, None]
    page = Page(browser, tmp_path / "page.html", "#step=2&seed=3")
    page.wait_for("data.seed === 3")
    assert page.value("[step, +$('schedule').value, $('link').hash]") == [2, 3, "#step=2&seed=3"]
    assert page.errors() == []


def test_one_schedule_has_no_slider(browser: Any, tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", *shown(counted_hazards()[0]))
    page = Page(browser, tmp_path / "page.html")
    assert not page.find("#schedules").is_displayed()
    assert not page.find("#notice").is_displayed()
    assert page.errors() == []


@pytest.fixture(scope="module")
def gemm() -> tuple[Simulation, Record]:
    """A cluster's GEMM, whose stages are loaded several times."""
    config, seed = Config("cooperative", (128, 64, 64), (2, 1), 3), random.randrange(100)
    a, b = (np.random.default_rng(seed).standard_normal((rows, 512)).astype(np.float16) for rows in (256, 128))
    simulation = gemmsmith.simulate(a, b.T, config=config, seed=seed, record=True)
    assert simulation.record
    return simulation, simulation.record


def open_at(browser: Any, gemm: tuple[Simulation, Record], folder: Path, first: int) -> tuple[Page, int]:
    """The page at the first step from `first` on of CTA 0."""
    simulation, record = gemm
    simulation.to_html(folder / "page.html")
    step = next(i for i in range(first, len(record)) if record.events[i].agent[0] == 0)
    return Page(browser, folder / "page.html", f"#step={step}"), step


def bright(page: Page, kind: str) -> set[str]:
    """What is not pale, of the lanes, barriers, slots or routes that are shown."""
    return {
        *page.value(f"""[...document.querySelectorAll('[data-pick^="{kind} "]:not(.dim)')]
        .map((x) => x.dataset.pick.slice({len(kind) + 1}))""")
    }


def barrier_number(page: Page, cta: int, name: str) -> int:
    found: int = page.value(f"data.objects.findIndex((x) => x[0] === {cta} && x[1] === '{name}')")
    return found


def names_of_lanes(page: Page) -> set[tuple[int, str]]:
    lanes = page.value("data.lanes")
    return {(lanes[int(x)][0], lanes[int(x)][1]) for x in bright(page, "lane")}


def test_a_click_on_a_barrier(browser: Any, gemm: tuple[Simulation, Record], tmp_path: Path) -> None:
    record, barrier = gemm[1], (0, "mainloop full barrier[1]")
    page, _ = open_at(browser, gemm, tmp_path, 600)
    everything = names_of_lanes(page)
    selector = f"[data-pick='barrier {barrier_number(page, *barrier)}']"
    page.find(selector).click()
    assert page.find(selector).get_attribute("aria-pressed") == "true"
    users = {x.agent for x in record.events if x.object == barrier and x.kind != "init"}
    loads = [x for x in record.operations if x.route.engine == "TMA" and (0, "A[1]") in x.route.writes]
    issuers = {
        record.events[x.issue].agent for x in record.operations if {(0, "A[1]"), (0, "B[1]")} & {*x.route.writes}
    }
    assert names_of_lanes(page) == users | issuers
    assert users | issuers < everything
    assert loads
    assert bright(page, "slot") == {"0 A[1]", "0 B[1]"}
    page.find(selector).click()
    assert page.find(selector).get_attribute("aria-pressed") == "false"
    assert names_of_lanes(page) == everything
    assert page.errors() == []


def test_a_click_on_a_slot_and_escape(browser: Any, gemm: tuple[Simulation, Record], tmp_path: Path) -> None:
    record = gemm[1]
    page, step = open_at(browser, gemm, tmp_path, 600)
    everything = names_of_lanes(page)
    page.value("document.querySelector('[data-pick=\"slot 0 A[2]\"]').focus()")
    page.keys(" ")
    for cta, slot in itertools.product((0, 1), range(3)):
        full = {(cta, f"mainloop full barrier[{slot}]")}
        for buffer, barriers in (("A", full), ("B", full | {(1 - cta, f"mainloop full barrier[{slot}]")})):
            found = page.value(f"[...relatedTo('slot {cta} {buffer}[{slot}]').barrier].map((x) => data.objects[x])")
            assert {tuple(x) for x in found} <= barriers
            assert full <= {tuple(x) for x in found}
    users = [x for x in record.operations if (0, "A[2]") in (*x.route.reads, *x.route.writes)]
    issuers = {record.events[x.issue].agent for x in users}
    assert names_of_lanes(page) == issuers | {(cta, x.route.engine) for x in users for cta, _ in issuers}
    assert "A[2]" in page.value("document.activeElement.dataset.pick")
    page.keys("\ue014")  # right: the focus stays
    assert page.value("step") == next(i for i in range(step + 1, len(record)) if record.events[i].agent[0] < 2)
    assert "A[2]" in page.value("document.activeElement.dataset.pick")
    assert page.text("#picked")
    page.keys("\ue00c")  # Escape
    assert names_of_lanes(page) == everything
    assert not page.text("#picked")
    assert page.errors() == []


def test_a_click_on_a_lane_and_on_an_operation(browser: Any, gemm: tuple[Simulation, Record], tmp_path: Path) -> None:
    record = gemm[1]
    page, _ = open_at(browser, gemm, tmp_path, 300)
    lane = page.value("data.lanes.findIndex((x) => x[0] === 0 && x[1] === 'producer warp')")
    page.find(f"[data-lane='{lane}']").click()
    step = page.value("step")
    assert record.events[step].agent == (0, "producer warp")
    used = {x.object for x in record.events if x.agent == (0, "producer warp") and x.kind in ("arrive", "expect_tx")}
    assert used
    page.value("setCta(0), show()")
    numbers = {f"{barrier_number(page, *x)}" for x in used if x}
    assert numbers <= bright(page, "barrier")
    assert f"{barrier_number(page, 0, 'named barrier 1')}" not in bright(page, "barrier")
    page.find(f"[data-lane='{lane}']").click()
    assert page.value("[step, picked]") == [step, None]
    for wanted in (f"lane {lane}", None):
        page.find(f"[data-lane='{lane}']").send_keys("\ue007")  # Enter
        assert page.value("picked") == wanted
        assert page.value("+document.activeElement.dataset.lane") == lane
    assert page.value("step") > step
    issue = next(x.issue for x in record.operations if x.route.engine == "TMA" and record.events[x.issue].agent[0] == 0)
    page.value(f"goTo({issue}, true)")
    page.find("#operations [data-pick]").click()
    assert page.find("#operations [data-pick]").get_attribute("aria-pressed") == "true"
    assert names_of_lanes(page) == {(0, "producer warp"), (0, "TMA")}
    assert page.errors() == []


def test_counters_are_shown(browser: Any, gemm: tuple[Simulation, Record], tmp_path: Path) -> None:
    simulation, record = gemm
    simulation.to_html(tmp_path / "page.html")
    page = Page(browser, tmp_path / "page.html", f"#step={len(record) - 1}")
    rows = [x.split(" ")[-2:] for x in page.text("#counts").split("\n")[1:]]
    own = page.value("cta")
    for (of_cta, of_all), *counts in zip(rows, *(x.counts for x in record.counts), strict=True):
        assert int(of_all.replace(",", "")) == sum(counts)
        assert int(of_cta.replace(",", "")) == sum(
            x for x, y in zip(counts, record.counts, strict=True) if y.cta == own
        )
    macs = page.text("#counts").split("multiply-adds ")[1].split(" ")[1].split("\n")[0]
    assert int(macs.replace(",", "")) == 256 * 128 * 512
    assert page.errors() == []


def test_what_a_completed_phase_lets_go_on(browser: Any, gemm: tuple[Simulation, Record], tmp_path: Path) -> None:
    simulation, record = gemm
    simulation.to_html(tmp_path / "page.html")
    page = Page(browser, tmp_path / "page.html")
    pairs = [(page.value(f"causeOf({i})"), i) for i, x in enumerate(record.events) if x.kind == "resume"]
    causes = {cause for cause, _ in pairs if cause >= 0}
    assert len(causes) > 20
    for cause in sorted(causes)[:30]:
        assert {*page.value(f"effectsOf({cause})")} == {i for x, i in pairs if x == cause}
    page.value(f"goTo({max(causes)})")
    assert page.errors() == []


def test_the_page_measures_itself(browser: Any, gemm: tuple[Simulation, Record], tmp_path: Path) -> None:
    simulation, _ = gemm
    simulation.to_html(tmp_path / "page.html")
    page = Page(browser, tmp_path / "page.html")
    page.wait_for("performance.getEntriesByName('first picture').length === 1")
    assert re.fullmatch(r"First picture of this page after \d+\.\d\d s\.", page.text("#first"))
    page.find("#speed [value='500']").click()
    page.keys(" ")
    page.find("#play").click()
    page.wait_for("step > 100")
    page.find("#play").click()
    assert re.fullmatch(r"While playing: \d+ pictures a second\.", page.text("#pictures"))
    assert page.errors() == []


def test_a_window_of_a_long_record(
    browser: Any, gemm: tuple[Simulation, Record], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    """It shows at each of its steps what the page of the whole record shows there."""
    simulation, record = gemm
    simulation.to_html(tmp_path / "whole.html")
    monkeypatch.setattr(page_module, "MAX_EVENTS", 300)
    first = random.Random().randrange(400, len(record) - 300)
    simulation.to_html(tmp_path / "part.html", first_step=first)
    state = """(() => {{ goTo(stepOf({})); return [
        ...['event', 'threads', 'operations', 'counts', 'clock', 'python'].map((x) => $(x).textContent),
        ...[...document.querySelectorAll('#stages .slot:not(.empty), #barriers .card')].map((x) => x.textContent)
            .filter((x) => !x.endsWith('not used yet')), ...effectsOf(step).map(numberOf).filter((x) => x < {}),
        causeOf(step) < 0 ? -1 : numberOf(causeOf(step))]; }})()"""
    steps, seen = [first, *range(first + 1, first + 300, 23), first + 299], {}
    for name in ("whole", "part"):
        page = Page(browser, tmp_path / f"{name}.html", f"#step={first}")
        assert page.value("numberOf(step)") == first
        seen[name] = [page.value(state.format(i, first + 300)) for i in steps]
        seen[name].append(
            page.value(f"""Array.from({{length: 300}}, (_, i) => causeOf(stepOf({first} + i)))
            .map((x) => x < 0 ? x : numberOf(x))""")
        )
        page.keys("\ue010" if name == "part" else "\ue011")  # End, Home
        assert page.errors() == []
    for whole, part in zip(seen["whole"], seen["part"], strict=True):
        assert part == whole
    assert page.find("#notice").get_attribute("role") == "status"
    notice = page.text("#notice")
    assert f"Only the 300 events from step {first:,} on are shown" in notice
    assert f"{len(record) - 300:,} are cut" in notice
    assert "first_step=NUMBER" in notice
    assert page.value("[+$('slider').min, +$('slider').max]") == [first, first + 299]
    page = Page(browser, tmp_path / "part.html", "#step=0")
    assert page.value("[numberOf(step), $('number').value]") == [first, f"{first}"]
    with pytest.raises(ArgumentError, match=f"first_step: got {len(record)}; use 0 to {len(record) - 1}"):
        simulation.to_html(tmp_path / "none.html", first_step=len(record))
    with pytest.raises(ArgumentError, match="first_step: got 1.5; use an integer"):
        simulation.to_html(tmp_path / "none.html", first_step=1.5)  # type: ignore[arg-type]
    assert not (tmp_path / "none.html").exists()


def with_a_tile_less() -> SimulationResult:
    """A GEMM that does not write the last tile of its result."""
    a, b = np.ones((128, 64), np.float16), np.ones((64, 512), np.float16)
    plan = PlannedGemm(Request(a, b, np.zeros((128, 512), np.float16), config=Config("tma", (128, 64, 64), (1, 1), 2)))
    (launch,) = plan.launches.all
    tiles: Any = launch.arguments["cluster_tiles"]
    launches = replace(
        plan.launches, all=(replace(launch, arguments={**launch.arguments, "cluster_tiles": tiles - 1}),)
    )
    return run_launches(launches, plan.binding.arguments, 0, None, record=True)


def with_a_flag_left() -> SimulationResult:
    with Builder("k", threads=32) as k:
        flags = k.scratch("flags", lambda problem: 4, zero_initialized=True)
        hw.store_global(word(k, k.smem + 1), flags, k.thread == 0)
        kernel = k.finish()
    launches = Launches(None, False, (Launch.from_kernel(kernel, None),), 0, 4)
    return run_launches(launches, {}, 0, None, record=True, dependent=False)


@pytest.mark.parametrize(
    ("made", "kind"), [(with_a_tile_less, "unwritten result"), (with_a_flag_left, "flags not reset")]
)
def test_a_hazard_of_no_step(browser: Any, made: Callable[[], SimulationResult], kind: str, tmp_path: Path) -> None:
    result = made()
    (hazard,) = result.hazards
    write_page(tmp_path / "page.html", *shown(result))
    page = Page(browser, tmp_path / "page.html")
    assert all(x in page.text("#hazards") for x in (kind, hazard.message, f"Hint: {hazard.hint}"))
    assert page.value("$('hazard').disabled && !document.querySelector('#hazards button')")
    page.keys("h")
    assert page.value("step") == 0
    assert page.errors() == []


def test_hazards_in_and_outside_a_window(browser: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fault = FAULTS["missing proxy fence"]
    result = run(fault.record, fault.threads, observe=True)
    (hazard,) = result.hazards
    assert hazard.event is not None
    monkeypatch.setattr(page_module, "MAX_EVENTS", 2)
    write_page(tmp_path / "page.html", *shown(result), first_step=hazard.event - 1)
    page = Page(browser, tmp_path / "page.html")
    page.find("#hazards button").click()
    assert page.value("[numberOf(step), +$('number').value]") == [hazard.event] * 2
    assert "missing proxy fence" in page.text(".found.now")
    write_page(tmp_path / "page.html", *shown(result), first_step=hazard.event + 1)
    page = Page(browser, tmp_path / "page.html")
    assert f"Found at step {hazard.event}, which is cut." in page.text("#hazards")
    assert page.value("$('hazard').disabled")
    assert page.errors() == []
