"""The page to step through a kernel: what its data says at a step is the simulator's own state after that event."""

from __future__ import annotations

import base64
import gzip
import json
import random
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from examples import own_attention
from tests.backends.sim.tiny import run, wait_for_ever
from tests.browser import Page, open_browser

import gemmsmith
from gemmsmith import Config, Grouping
from gemmsmith.backends.sim import engine
from gemmsmith.backends.sim.execute.counters import AccessCounter, Count, Counters
from gemmsmith.backends.sim.report import page
from gemmsmith.backends.sim.report.page import Fill, fills_of, write_page
from gemmsmith.backends.sim.report.record import Record
from gemmsmith.backends.sim.state.cta import Cta
from gemmsmith.backends.sim.state.grid_state import GridState
from gemmsmith.backends.sim.state.operations import InFlightOperation, Operations
from gemmsmith.collective.accumulator import Accumulator
from gemmsmith.core.errors import ArgumentError
from gemmsmith.host.simulation import Simulation
from gemmsmith.kernels.build import build

M, N, K = 256, 192, 256
CONFIGS = {
    "multistage": Config("mma_multistage", (64, 64, 32), (1, 1), 3, 2, chip="sm_80"),
    "cooperative": Config("cooperative", (128, 64, 64), (2, 1), 3),
    "pingpong": Config("pingpong", (128, 64, 64), (1, 2), 3),
    "split in a cluster": Config("cooperative", (128, 64, 64), (1, 1), 3, 2, cluster_splits=2),
    "stream-K": Config("cooperative", (128, 64, 64), (2, 1), 3, splits=0),
    "tma": Config("tma", (128, 64, 64), (1, 1), 3),
}
KERNELS = [*CONFIGS, "FP8 promoted", "grouped", "gather", "attention"]
BARRIER_EVENTS = "init", "arrive", "expect_tx", "complete_tx"
HOOKS = "instruction", "issue", "complete", "signal", "barrier", "commit", "block", "resume", "exit"

Slot = tuple[int, str]


class State(NamedTuple):
    """The simulator's state: of each barrier, the slots in shared memory that operations in flight use, the counts."""

    barriers: dict[tuple[int, str], tuple[int, int, int]]
    written: set[Slot]
    read: set[Slot]
    counts: dict[int, tuple[int, ...]]


def simulated(name: str, seed: int) -> Simulation:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float16)

    options: dict[str, Any] = {"seed": seed, "record": True}
    cooperative = Config("cooperative", (128, 64, 64), (1, 1), 3)
    if name == "attention":
        task = own_attention.task(2, 200, 300)
        rows = {"q": task.queries, "k": task.keys, "v": task.keys, "out": task.queries}
        arrays = {x: normal(task.heads, n, own_attention.DIM).astype(ml_dtypes.bfloat16) for x, n in rows.items()}
        return gemmsmith.simulate_launch(own_attention.attention(), task, arrays, **options)
    if name == "FP8 promoted":
        a, scale_a = gemmsmith.quantize(normal(M, K).astype(np.float32), "1x128")
        b, scale_b = gemmsmith.quantize(normal(N, K).astype(np.float32), "128x128")
        config = Config("cooperative", (128, 64, 128), (1, 1), 2)
        return gemmsmith.simulate(a, b.T, scale_a=scale_a, scale_b=scale_b.T, config=config, **options)
    if name in ("grouped", "gather"):
        sizes, gathers = np.array([20, 0, 130, 70], np.int32), name == "gather"
        if gathers:
            options["gather"] = rng.integers(0, M, sizes.sum()).astype(np.int32)
        a, b, grouping = normal(M if gathers else sizes.sum(), K), normal(4, K, 64), Grouping("sizes", gathers=gathers)
        return gemmsmith.simulate(a, b, sizes=sizes, grouping=grouping, config=cooperative, **options)
    return gemmsmith.simulate(normal(M, K), normal(N, K).T, config=CONFIGS[name], **options)


@lru_cache(maxsize=2)
def watched(name: str, seed: int) -> tuple[Simulation, dict[int, State]]:
    """A simulation, and the simulator's own state after each event."""
    states: dict[int, State] = {}
    grids: list[GridState] = []
    ctas: list[Cta] = []
    counts: dict[int, dict[Any, Count]] = defaultdict(dict)  # of each CTA
    loaded, sums = Counter[int](), defaultdict[int, tuple[int, ...]](lambda: (0,) * 6)

    def created(state: GridState, **options: Any) -> Any:
        grids.append(state)
        result = create_ctas(state, **options)
        ctas.extend(result)
        return result

    def counted() -> dict[int, tuple[int, ...]]:
        own = {cta: (*sums[cta], loaded[cta]) for cta in {*sums, *loaded}}
        return {cta: x for cta, x in own.items() if any(x)}

    def hooked(hook: Callable[..., None]) -> Callable[..., None]:
        def call(record: Record, *arguments: Any) -> None:
            hook(record, *arguments)
            states[len(record) - 1] = _state(grids[0], ctas, record, counted())

        return call

    class Watched(AccessCounter):
        def begin(self, instruction: Any) -> None:
            super().begin(instruction)
            self.changed()

        def _access(self, *arguments: Any, **options: Any) -> None:
            super()._access(*arguments, **options)
            self.changed()

        def changed(self) -> None:
            cta, record = self._group.cta.index, self._group.state.observer
            sums[cta] = _sums(counts[cta].values())
            assert record
            states[len(record) - 1] = states[len(record) - 1]._replace(counts=counted())

    def complete(operations: Operations, x: InFlightOperation) -> None:
        if x.operation.engine != "tensor" and x.operation.reads:
            ranks = {y.rank for y in x.operation.writes if y.space == "shared"}
            loaded.update({x.cta.peer(rank).index: x.operation.nbytes for rank in ranks})
        complete_operation(operations, x)

    create_ctas, complete_operation = engine.create_ctas, Operations.complete
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "create_ctas", created)
        patch.setattr(Operations, "complete", complete)
        patch.setattr(Counters, "of", lambda self, group: Watched(group, counts[group.cta.index]))
        for x in HOOKS:
            patch.setattr(Record, x, hooked(getattr(Record, x)))
        simulation = simulated(name, seed)
    assert not simulation.hazards
    assert len(simulation.records) == 1
    return simulation, states


def _sums(counts: Iterable[Count]) -> tuple[int, ...]:
    """Of what is counted, but for loaded bytes; in the order of the page."""
    names = ("macs", "wavefronts", "ideal_wavefronts", "sectors", "ideal_sectors")
    of_each = [(x.instructions if x.macs else 0, *(getattr(x, name) for name in names)) for x in counts]
    return tuple(map(sum, zip(*of_each, strict=True)))


def _state(grid: GridState, ctas: list[Cta], record: Record, counts: dict[int, tuple[int, ...]]) -> State:
    barriers = {(cta.index, x.name): x.state for cta in ctas for x in cta.mbarriers.values()}
    barriers |= {(cta.index, x.name): x.state for cta in ctas for x in cta.named_barriers.values()}
    clusters = [(cta.index, cta.cluster.barrier) for cta in ctas if not cta.rank]
    barriers |= {(i, x.name): x.state for i, x in clusters if x.state != (0, x.expected, 0)}  # before its first use
    written, read = set[Slot](), set[Slot]()
    for x in grid.operations.in_flight:
        for slots, accesses in ((written, x.operation.writes), (read, x.operation.reads)):
            slots.update(slot for slot in record._buffers(x.cta.index, accesses) if slot[0] >= 0)
    return State(barriers, written, read, counts)


def data_of(path: Path) -> dict[str, Any]:
    """The data of a page, as its script decodes it, with the differences summed."""
    found = re.search(r'<script id="data" type="text/plain">([^<]+)</script>', path.read_text())
    assert found
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found[1])))
    for part in ("events", "operations", "spans", "idle", "counted"):
        for name in {*data["differences"]} & {*data[part]}:
            data[part][name] = [*accumulate(data[part][name])]
    return data


def page_of(simulation: Simulation, folder: Path) -> dict[str, Any]:
    simulation.to_html(folder / "page.html")
    return data_of(folder / "page.html")


def record_of(simulation: Simulation) -> Record:
    assert simulation.record is not None
    return simulation.record


def barriers_at(data: dict[str, Any], step: int) -> dict[tuple[int, str], tuple[int, int, int]]:
    """Of each barrier: its phase, and the arrivals and bytes that it misses, after the last event up to the step."""
    columns, result = (data["events"][x][: step + 1] for x in ("kind", "object", "phase", "pending", "bytes")), {}
    for kind, barrier, *state in zip(*columns, strict=True):
        if data["kinds"][kind] in BARRIER_EVENTS:
            cta, name = data["objects"][barrier]
            result[cta, name] = tuple(state)
    return result


def counts_at(data: dict[str, Any], step: int) -> dict[int, tuple[int, ...]]:
    """Of each CTA: what all events up to the step count."""
    result: dict[int, tuple[int, ...]] = {}
    end = bisect_right(data["counted"]["event"], step)
    columns = (data["counted"][x][:end] for x in ("cta", "counts"))
    for (cta, i), times in Counter(zip(*columns, strict=True)).items():
        before = result.get(cta, [0] * len(data["counts"][i]))
        result[cta] = tuple(x + times * y for x, y in zip(before, data["counts"][i], strict=True))
    return result


def stages_at(data: dict[str, Any], step: int) -> dict[Slot, str]:
    """Of each slot: empty, loading, full or read, as the page says."""
    result: dict[Slot, str] = {}
    for x in map(Fill._make, zip(*data["fills"].values(), strict=True)):
        if x.load <= step:
            state = "read" if 0 <= x.read <= step else "full"
            state = "empty" if 0 <= x.free <= step else state if 0 <= x.full <= step else "loading"
            result[x.cta, data["buffers"][int(x.buffer)]] = state
    return result


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("name", KERNELS)
def test_the_state_at_random_steps_is_the_simulators(name: str, seed: int, tmp_path: Path) -> None:
    simulation, states = watched(name, seed)
    data = page_of(simulation, tmp_path)
    count = len(data["events"]["kind"])
    assert count == len(record_of(simulation)) == max(states) + 1
    assert all(map(sum, zip(*counts_at(data, count).values(), strict=True)))
    seen = set[str]()
    for step in random.Random(seed).sample(range(count), 200):
        state, found = states[step], barriers_at(data, step)
        assert found == state.barriers
        assert counts_at(data, step) == state.counts
        if data["kinds"][data["events"]["kind"][step]] == "issue":
            continue  # the operation is not in flight yet
        stages = stages_at(data, step)
        seen |= {*stages.values()}
        assert {slot for slot in state.written if slot in stages} <= {x for x, y in stages.items() if y == "loading"}
        assert {slot for slot in state.read if slot in stages} <= {x for x, y in stages.items() if y == "read"}
    assert seen == ({"loading", "full"} if name == "multistage" else {"loading", "full", "read", "empty"})


@pytest.mark.parametrize("name", ["cooperative", "pingpong", "split in a cluster"])
def test_the_k_tile_that_a_stage_holds_is_that_of_its_loads(name: str, tmp_path: Path) -> None:
    simulation, _ = watched(name, 0)
    data, record = page_of(simulation, tmp_path), record_of(simulation)
    k_tiles = {(x.issue, slot): x.coordinates[0] // 64 for x in record.operations for slot in x.route.writes
               if x.route.label.startswith("TMA load")}  # fmt: skip
    fills = [Fill._make(x) for x in zip(*data["fills"].values(), strict=True)]
    checked = [(data["holds"][int(x.holds)], k_tiles[x.load, (x.cta, data["buffers"][int(x.buffer)])]) for x in fills
               if (x.load, (x.cta, data["buffers"][int(x.buffer)])) in k_tiles]  # fmt: skip
    first = 0 if name != "split in a cluster" else 2  # the k-tiles of the second CTA begin there
    assert len(checked) >= 2 * 6 * (K // 64)  # of A and of B, tiles, k-tiles
    assert all(int(holds.removeprefix("k-tile ")) in (k_tile, k_tile - first) for holds, k_tile in checked)
    assert {holds for holds, _ in checked} == {f"k-tile {i}" for i in range(K // 64 - first)}


def test_lanes_and_spans_are_those_of_the_timeline(tmp_path: Path) -> None:
    simulation, _ = watched("pingpong", 0)
    data = page_of(simulation, tmp_path)
    rows = [tuple(x) for x in data["lanes"]]
    names = [name for cta, name in rows if cta == 0]
    assert names == ["TMA", "TMA store", "tensor core", "consumer warpgroup 0", "consumer warpgroup 1", "producer warp"]
    spans = zip(*(data["spans"][x] for x in ("lane", "entry", "start", "end", "label")), strict=True)
    found = sorted((*rows[lane], start, end, data["labels"][label]) for lane, _, start, end, label in spans)
    shown = [x for x in simulation.timeline.spans if (x.cta, x.row) in rows]
    assert found == sorted((x.cta, x.row, x.start, x.end, x.label) for x in shown)
    assert {x for x, *_ in data["legend"]} == {"stage 0", "stage 1", "stage 2", "store of D", "instructions", "waiting"}


def test_a_page_has_the_first_events_of_a_long_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    simulation, states = watched("cooperative", 0)
    monkeypatch.setattr(page, "MAX_EVENTS", 500)
    data = page_of(simulation, tmp_path)
    assert (len(data["events"]["kind"]), data["all_events"]) == (500, len(states))
    assert 0 < max(data["operations"]["issue"]) < 500
    assert barriers_at(data, 499) == states[499].barriers
    assert max(data["idle"]["end"]) <= max(data["events"]["time"])


@pytest.mark.parametrize("name", ["multistage", "stream-K", "attention"])
@pytest.mark.parametrize("seed", [0, 3])
def test_a_window_begins_with_the_simulators_state(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    simulation, states = watched(name, seed)
    whole = page_of(simulation, tmp_path)
    monkeypatch.setattr(page, "MAX_EVENTS", 400)
    first = random.randrange(1, len(states))
    simulation.to_html(tmp_path / "page.html", first_step=first)
    data = data_of(tmp_path / "page.html")
    count = min(400, len(states) - first)
    assert (data["first"], len(data["events"]["kind"])) == (first, len(data["before"]) + count)
    for step in {first, *random.sample(range(first, first + count), min(count, 20))}:
        local = step - first + len(data["before"])
        assert barriers_at(data, local) == states[step].barriers
        assert counts_at(data, local) == states[step].counts
        stages, wanted = stages_at(data, local), stages_at(whole, step)
        assert stages == {slot: state for slot, state in wanted.items() if slot in stages}
        assert {slot for slot, state in wanted.items() if state != "empty"} <= {*stages}


def test_the_page_needs_no_network_and_no_path_of_this_machine(tmp_path: Path) -> None:
    simulation, _ = watched("cooperative", 0)
    data = page_of(simulation, tmp_path)
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r"https?://|src=|<link|import ", text)
    assert str(Path(gemmsmith.__file__).parent) not in json.dumps(data)
    assert text.count("<script") == 2
    scripts = [x for x in Path(page.__file__).parent.iterdir() if x.suffix in (".js", ".css", ".html")]
    assert len(scripts) == 3
    assert sum(len(gzip.compress(x.read_bytes())) for x in scripts) < 40_000


def test_a_page_needs_a_record(tmp_path: Path) -> None:
    a = np.ones((64, 64), np.float16)
    with pytest.raises(ArgumentError, match="record=True"):
        gemmsmith.simulate(a, a).to_html(tmp_path / "page.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from open_browser()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_browser_shows_the_simulators_state(browser: Any, name: str, tmp_path: Path) -> None:
    simulation, states = watched(name, 0)
    simulation.to_html(tmp_path / "page.html")
    shown = Page(browser, tmp_path / "page.html")
    for step in random.Random(1).sample(range(len(states)), 50):
        found = shown.value(f"barriersAt({step}).filter((x) => x.event >= 0)")
        states_found = {(x["cta"], x["name"]): (x["phase"], x["pending"], x["bytes"]) for x in found}
        assert states_found == states[step].barriers
        stages = shown.value(f"stagesAt({step}).filter((x) => x.event >= 0)")
        wanted = stages_at(data_of(tmp_path / "page.html"), step)
        assert {(x["cta"], x["name"]): x["state"] for x in stages} == wanted
        assert shown.value(f"goTo({step}), step") == step
    assert shown.errors() == []


@pytest.mark.slow
def test_stepping_by_keys(browser: Any, tmp_path: Path) -> None:
    right, left, home, end = "\ue014", "\ue012", "\ue011", "\ue010"
    simulation, states = watched("multistage", 0)
    simulation.to_html(tmp_path / "page.html")
    shown = Page(browser, tmp_path / "page.html")
    for i in range(25):
        shown.keys(right)
        assert shown.value("[step, +$('number').value, $('link').hash]") == [i + 1, i + 1, f"#step={i + 1}"]
    browser.execute_async_script("setTimeout(arguments[0], 600)")
    assert shown.value("location.hash") == "#step=25"
    shown.value("location.hash = '#step=7'")
    browser.execute_async_script("setTimeout(arguments[0], 100)")
    assert shown.value("step") == 7
    shown.value("goTo(25)")
    shown.keys(left)
    assert shown.value("step") == 24
    shown.keys(end)  # of CTA 0, which has no cluster
    assert shown.value("step") == max(i for i, x in enumerate(record_of(simulation).events) if x.agent[0] == 0)
    shown.keys(home)
    assert shown.value("step") == 0
    simulation, states = watched("cooperative", 0)
    simulation.to_html(tmp_path / "other.html")
    shown = Page(browser, tmp_path / "other.html", "#step=700")
    (phase, pending, missing) = states[700].barriers[0, "mainloop full barrier[1]"]
    card = shown.text("[data-barrier='mainloop full barrier[1]']").split("\n")
    assert card[:2] == [f"[1] phase {phase}, parity {phase % 2}", f"pending arrivals: {pending} of 1"]
    assert ("awaited bytes" in f"{card}") == (missing > 0)
    cause = next(i for i, x in enumerate(record_of(simulation).events) if x.kind == "complete_tx" and x.phase == 1)
    shown.value(f"goTo({cause})")
    wanted = (r"CTA \d TMA brings [\d,]+ bytes to mainloop full barrier\[0\]( of CTA 1)? and completes phase 0: "
              r"phase 1 misses 1 arrival \[.*k_tile 0.*\]")  # fmt: skip
    assert re.fullmatch(wanted, shown.text("#event"))
    shown.value("goTo(700)")
    shown.keys("\ue008", right)  # Shift: in the same lane
    events = data_of(tmp_path / "other.html")["events"]["agent"]
    assert shown.value("step") == events.index(events[700], 701)
    width = shown.value("toCycle - fromCycle")
    shown.keys("+")
    assert shown.value("toCycle - fromCycle") == pytest.approx(width / 2)
    shown.keys("0")
    assert shown.value("toCycle") > simulation.cycles
    assert shown.errors() == []


@pytest.mark.slow
def test_what_ends_a_wait(browser: Any, tmp_path: Path) -> None:
    """The event that completes the phase, or the last operation of the groups that are waited for."""
    simulation, states = watched("pingpong", 0)
    simulation.to_html(tmp_path / "page.html")
    shown, record = Page(browser, tmp_path / "page.html"), record_of(simulation)
    last = {x.wait: x.complete for x in record.operations if x.wait >= 0}
    seen = Counter[str]()
    for i, x in enumerate(record.events):
        if x.kind != "resume" or (x.phase < 0 and i not in last):
            continue
        cause = shown.value(f"causeOf({i})")
        if x.phase < 0:
            assert cause == max(y.complete for y in record.operations if y.wait == i)
        else:
            assert x.object
            before = states[cause - 1].barriers.get(x.object, (0,))  # a named barrier exists from its first use on
            assert (before[0], states[cause].barriers[x.object][0]) == (x.phase, x.phase + 1)
        seen[record.events[cause].agent[1]] += 1
        if not seen.total() % 20:
            shown.value(f"goTo({i})")
            assert f"ended by step {cause}" in shown.text("#event")
    assert {"TMA", "tensor core", "consumer warpgroup 0", "TMA store"} <= {*seen}
    assert shown.errors() == []


@pytest.mark.slow
def test_mouse_and_controls(browser: Any, tmp_path: Path) -> None:
    chains = pytest.importorskip("selenium.webdriver.common.action_chains")
    wheel = pytest.importorskip("selenium.webdriver.common.actions.wheel_input")
    simulation, _ = watched("cooperative", 0)
    simulation.to_html(tmp_path / "page.html")
    shown, events = Page(browser, tmp_path / "page.html"), record_of(simulation).events

    def find(selector: str) -> Any:
        return browser.find_element("css selector", selector)

    def mouse() -> Any:
        return chains.ActionChains(browser)

    canvas = find("#canvas")
    for lane in (0, 2, 3, 5, 8):
        mouse().move_to_element_with_offset(
            canvas, 50, int(24 * (lane + 0.5) - canvas.size["height"] / 2)
        ).click().perform()
        assert [*events[shown.value("step")].agent] == shown.value(f"data.lanes[{lane}]")
    view = shown.value("[fromCycle, toCycle]")
    mouse().scroll_from_origin(wheel.ScrollOrigin.from_element(canvas), 0, -200).perform()
    closer = shown.value("[fromCycle, toCycle]")
    assert view[0] < closer[0] < closer[1] < view[1]
    mouse().drag_and_drop_by_offset(canvas, -100, 0).perform()
    panned = shown.value("[fromCycle, toCycle]")
    assert panned[0] > closer[0]
    assert panned[1] - panned[0] == pytest.approx(closer[1] - closer[0])
    find("#cta [value='2']").click()
    assert events[shown.value("step")].agent[0] // 2 == 1  # of the other cluster
    find("[data-lane='15']").click()
    assert [*events[shown.value("step")].agent] == shown.value("data.lanes[15]")
    before = shown.value("step")
    for button, wanted in (("forward", 1), ("back", 0)):
        find(f"#{button}").click()
        steps = [i for i, x in enumerate(events) if x.agent[0] >= 2]
        assert shown.value("step") == steps[steps.index(before) + wanted]
    line = next(x["cuda"] for x in record_of(simulation).columns()["statements"].values()
                if x["instruction"] == "mbarrier_wait")  # fmt: skip
    shown.value(f"$('cuda').children[{line - 1}].click()")
    assert shown.value("data.statements[events.statement[step]].cuda") == line
    find("#play").click()
    browser.execute_async_script("setTimeout(arguments[0], 500)")
    find("#play").click()
    assert shown.value("data.statements[events.statement[step]].cuda") != line
    assert shown.errors() == []


@pytest.mark.slow
def test_the_hazard_of_a_kernel_without_a_wait(
    browser: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    build.cache_clear()
    monkeypatch.setattr(Accumulator, "wait", lambda *arguments, **options: None)
    a, b = np.ones((128, 512), np.float16), np.ones((512, 64), np.float16)
    simulation = gemmsmith.simulate(a, b, config=Config("cooperative", (128, 48, 64), (1, 1), 3), record=True)
    build.cache_clear()
    race = next(x for x in simulation.hazards if x.kind == "race")
    simulation.to_html(tmp_path / "page.html")
    shown = Page(browser, tmp_path / "page.html")
    assert shown.value("data.found.length") == len(simulation.hazards)
    shown.keys("h")
    assert shown.value("step") == race.event
    text = shown.text(".found.now")
    assert all(x in text for x in ("race", "write of TMA load", "read of wgmma", "wgmma_mainloop.py", race.hint))
    first = next(x for x in data_of(tmp_path / "page.html")["hazards"] if x["kind"] == "race")["places"][1]
    event = record_of(simulation).events[first["event"]]
    assert (event.kind, event.agent[1]) == ("issue", "consumer warpgroup 0")
    assert dict(event.loops) == first["loops"]
    lit = shown.value("[...document.querySelectorAll('#names .hazard')].map((x) => x.textContent)")
    assert {"producer warp"} < {*lit} <= {"producer warp", "consumer warpgroup 0", "consumer warpgroup 1"}
    assert shown.value("[...document.querySelectorAll('#cuda .hazard')].length") == 2
    assert shown.errors() == []


@pytest.mark.slow
def test_the_page_of_an_aborted_run(browser: Any, tmp_path: Path) -> None:
    result = run(wait_for_ever, threads=32, observe=True)
    write_page(tmp_path / "page.html", result.records[0], result.hazards, f"{result.verdict}")
    assert data_of(tmp_path / "page.html")["operations"]["issue"] == []
    shown = Page(browser, tmp_path / "page.html")
    shown.keys("h")
    card = shown.text("[data-barrier='full']")
    assert "phase 0, parity 0\npending arrivals: 2 of 3\n" in card
    assert card.endswith("waits for phase 0")
    assert shown.text("#event").endswith("waits for full phase 0 (parity 0)")
    assert "deadlock" in shown.text("#hazards")
    assert shown.errors() == []


@pytest.mark.slow
def test_what_the_page_says_of_a_cut_and_of_an_old_browser(
    browser: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    simulation, states = watched("cooperative", 0)
    monkeypatch.setattr(page, "MAX_EVENTS", 500)
    simulation.to_html(tmp_path / "page.html")
    shown = Page(browser, tmp_path / "page.html")
    assert "Only the first 500 events" in shown.text("#notice")
    assert shown.value("$('notice').getAttribute('role')") == "alert"
    assert f"{len(states) - 500:,} are cut" in shown.text("#notice")
    source = {"source": "delete window.DecompressionStream"}
    script = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", source)
    shown = Page(browser, tmp_path / "page.html")
    browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)
    assert "has no DecompressionStream" in shown.text("#notice")
    assert shown.value("$('main').hidden")
    assert shown.errors() == []


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_wider_than_the_window(browser: Any, width: int, theme: str, tmp_path: Path) -> None:
    simulation, _ = watched("split in a cluster", 0)
    simulation.to_html(tmp_path / "page.html")
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    shown = Page(browser, tmp_path / "page.html", "#step=400")
    assert shown.value("document.documentElement.scrollWidth") <= width
    dark = shown.value("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    assert dark == (theme == "dark")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert shown.errors() == []


def test_a_stage_that_the_epilogue_writes_is_free_of_its_k_tile() -> None:
    rng = np.random.default_rng()
    a, b = (rng.standard_normal((64, 256)).astype(np.float16) for _ in range(2))
    config = Config("cooperative", (64, 64, 64), (1, 1), 4, 1, alias_epilogue=True)
    (record,) = gemmsmith.simulate(a, b.T, config=config, record=True).records
    stores = [x for x in record.operations if x.route.engine == "TMA store"]
    stored = {slot for x in stores for slot in x.route.reads}
    fills = [x for x in fills_of(record) if (x.cta, x.buffer) in stored]
    assert fills
    assert all(0 < x.read < x.free < stores[0].issue for x in fills)
