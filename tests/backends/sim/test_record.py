"""The record of a simulation: its numbers are those that the shapes, the config and the kernel say."""

from __future__ import annotations

import gc
import json
import weakref
from collections import Counter, defaultdict
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.backends.sim.tiny import recorded, run, wait_for_ever, word

import gemmsmith
from gemmsmith import Config, hw
from gemmsmith.backends.sim.execute.counters import Counters
from gemmsmith.backends.sim.report.record import COUNTS, Event, Operation, Record
from gemmsmith.backends.sim.state.grid_state import GridState
from gemmsmith.core.errors import ArgumentError
from gemmsmith.host.simulation import Simulation
from gemmsmith.lang import statements as st
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Value

M, N, K = 256, 384, 256
CONFIG = Config(tile=(128, 128, 64), cluster=(2, 1), stages=3)
TILES, K_TILES = 6, K // 64
STAGE_BYTES = 2 * (128 + 128) * 64


@lru_cache(maxsize=2)
def simulated(seed: int = 0) -> Simulation:
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal((rows, K)).astype(np.float16) for rows in (M, N))
    simulation = gemmsmith.simulate(a, b.T, config=CONFIG, seed=seed, record=True)
    assert not simulation.hazards
    return simulation


def record_of(seed: int = 0) -> Record:
    record = simulated(seed).record
    assert record is not None
    return record


def of_engine(record: Record, engine: str) -> list[Operation]:
    return [x for x in record.operations if x.route.engine == engine]


@pytest.mark.parametrize("seed", [0, 3])
def test_loads_and_their_bytes(seed: int) -> None:
    loads = of_engine(record_of(seed), "TMA")
    received = Counter[int]()
    for x in loads:
        received.update(dict.fromkeys((cta for cta, _ in x.route.writes), x.bytes))
    assert sum(received.values()) == TILES * K_TILES * STAGE_BYTES
    of_a, of_b = ([x for x in loads if x.route.reads == ((-1, name),)] for name in "AB")
    assert len(of_a) + len(of_b) == len(loads)
    assert {x.coordinates[0] for x in loads} == set(range(0, K, 64))
    assert {x.coordinates[1] // 128 for x in of_a} == set(range(M // 128))
    # The CTAs of a cluster, one above the other, share B: each loads a half for both, but for the first k-tiles.
    assert {len(x.route.writes) for x in of_a} == {1}
    assert 2 in {len(x.route.writes) for x in of_b} <= {1, 2}
    assert all(name == f"B[{x.stage}]" for x in of_b for _, name in x.route.writes)


@pytest.mark.parametrize("seed", [0, 3])
def test_products(seed: int) -> None:
    products = of_engine(record_of(seed), "tensor core")
    assert len(products) == TILES * K_TILES * (128 // 64) * (64 // 16)
    assert {x.cycles for x in products} == {128 / 2}
    assert all(x.end - x.start == 64 for x in products)
    assert {x.route.registers for x in products} == {("accumulator",)}
    assert all(x.issue < x.complete < x.wait for x in products)
    assert all(x.issue < x.commit < x.wait for x in products)
    assert {slot for x in products for _, slot in x.route.reads} == {f"{ab}[{i}]" for ab in "AB" for i in range(3)}


def test_counts_are_those_of_the_counters() -> None:
    a = np.ones((128, 192), np.float16)
    plan, counters = gemmsmith.plan(a, a.T, config=Config("cooperative", (64, 64, 64), (1, 1), 3, 1)), Counters()
    (record,) = plan.simulate(a, a.T, counters=counters, record=True).records
    names = ("macs", "wavefronts", "ideal_wavefronts", "sectors", "ideal_sectors")
    found = [sum(x) for x in zip(*(x.counts for x in record.counts), strict=True)]
    lines = counters.lines(record.kernel)
    assert dict(zip(COUNTS[1:6], found[1:6], strict=True)) == {x: sum(getattr(y, x) for y in lines) for x in names}
    assert found[COUNTS.index("macs")] == 128 * 128 * 192
    assert found[COUNTS.index("multiplies")] == 4 * 4 * 3 * 4  # of 4 warps, tiles, k-tiles, k-steps
    assert found[COUNTS.index("loaded")] == 4 * 3 * (64 + 64) * 64 * 2
    assert [x.event for x in record.counts] == sorted(x.event for x in record.counts)


def test_stores_of_the_result() -> None:
    stores = of_engine(record_of(), "TMA store")
    assert sum(x.bytes for x in stores) == 2 * M * N
    assert all(x.route.writes == ((-1, "out"),) and x.wait > x.complete for x in stores)


def test_copies_by_threads() -> None:
    """mma_multistage: cp.async, in groups that are committed and waited for."""
    a = np.ones((128, 128), np.float16)
    config = Config("mma_multistage", (64, 64, 32), (1, 1), 3, 2, chip="sm_80")
    (record,) = gemmsmith.simulate(a, a, config=config, record=True).records
    copies = of_engine(record, "copy")
    assert copies == record.operations
    from_memory = [x for x in copies if x.route.reads]  # beyond the last k-tile they write zeros
    assert sum(x.bytes for x in from_memory) == 4 * 4 * (64 + 64) * 32 * 2  # tiles, k-tiles
    assert all(x.issue < x.commit < x.wait and x.complete < x.wait for x in copies)
    assert {x.object for x in record.of_kind("commit")} == {(cta, "cp.async group") for cta in range(4)}


@pytest.mark.parametrize("seed", [0, 3])
def test_each_barrier_counts_on(seed: int) -> None:
    """Of an mbarrier: its phase goes on by one when nothing is missing, and it is whole at the end."""
    states: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for x in record_of(seed).of_kind("init", "arrive", "expect_tx", "complete_tx"):
        if x.object and "mainloop" in x.object[1]:
            states[x.object].append(x)
    assert len(states) == 4 * 2 * 3  # full and empty, of three stages, in four CTAs
    phases = Counter[str]()
    for (_, name), events in states.items():
        count, phase, pending, missing = events[0].amount, 0, events[0].amount, 0
        assert events[0].kind == "init"
        for x in events[1:]:
            if x.kind == "arrive":
                pending -= x.amount
            if x.kind == "complete_tx":
                missing -= x.amount
            if x.phase > phase:
                assert (x.phase, x.pending, pending) == (phase + 1, count, 0)
                phase, pending, missing = x.phase, count, 0
                continue
            assert x.pending == pending
            missing = x.bytes
        assert (pending, missing) == (count, 0)
        phases[name.partition("[")[0]] += phase
    assert phases["mainloop full barrier"] == TILES * K_TILES


@pytest.mark.parametrize("seed", [0, 3])
def test_the_loops_of_each_load(seed: int) -> None:
    record = record_of(seed)
    tiles = Counter[tuple[int, ...]]()
    for x in of_engine(record, "tensor core"):
        loops = dict(record.events[x.issue].loops)
        tiles[record.events[x.issue].agent[0], loops["cluster_tile"], loops["k_tile"]] += 1
    assert len(tiles) == TILES * K_TILES
    assert set(tiles.values()) == {8}
    assert {k_tile for *_, k_tile in tiles} == set(range(K_TILES))


def test_lines_of_python_and_of_cuda() -> None:
    record = record_of()
    columns = record.columns()
    lines, seen = columns["cuda"].split("\n"), set()
    blocks = [record.kernel.body, *(function.body for function in record.kernel.functions)]
    issued = [x for block in blocks for x in st.instructions(block)]
    wrappers = {location.number: x.wrapper_name for x, location in issued if not x.cuda}
    assert {x.statement for x in record.events} <= {*columns["statements"], -1}
    for event in record.events:
        if event.statement in wrappers:
            seen.add(event.statement)
            assert wrappers[event.statement] in lines[columns["statements"][event.statement]["cuda"] - 1]
    assert len(seen) > 30
    waits = {columns["statements"][x.statement]["instruction"] for x in record.of_kind("block")}
    assert {"mbarrier_wait", "wgmma_wait"} <= waits


@pytest.mark.parametrize("seed", [0, 3])
def test_idle_time_by_cause(seed: int) -> None:
    """All of the time in which a tensor core does not multiply has a cause, once."""
    record = record_of(seed)
    ends = {agent: x.time for x in record.of_kind("exit") for agent in [x.agent[0]]}
    for x in record.of_kind("exit"):
        ends[x.agent[0]] = max(ends[x.agent[0]], x.time)
    idle, busy, causes = Counter[int](), Counter[int](), Counter[str]()
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for gap in record.idle():
        idle[gap.cta] += gap.end - gap.start
        causes[gap.cause] += gap.end - gap.start
        spans[gap.cta].append((gap.start, gap.end))
    for product in of_engine(record, "tensor core"):
        cta = record.events[product.issue].agent[0]
        busy[cta] += product.end - product.start
        spans[cta].append((product.start, product.end))
    for cta, all_spans in spans.items():
        assert idle[cta] + busy[cta] == ends[cta]
        assert [start for start, _ in sorted(all_spans)] == [0, *(end for _, end in sorted(all_spans)[:-1])]
    assert causes["mainloop full barrier"] > 0
    assert causes["no wgmma follows"] > 0


def test_columns(tmp_path: Path) -> None:
    record = record_of()
    record.to_json(tmp_path / "record.json")
    found = json.loads((tmp_path / "record.json").read_text())

    def column(part: str, name: str) -> list[Any]:
        values = found[part][name]
        return [*accumulate(values)] if name in found["differences"] else values

    assert (found["grid"], found["cluster"], found["seed"]) == (4, [2, 1, 1], 0)
    assert column("events", "time") == [x.time for x in record.events]
    assert column("operations", "issue") == [x.issue for x in record.operations]
    assert column("operations", "wait") == [x.wait for x in record.operations]
    assert [found["kinds"][x] for x in column("events", "kind")] == [x.kind for x in record.events]
    loops = [found["loops"][x] for x in column("events", "loops")]
    named = [tuple(zip(found["nests"][nest], indices, strict=True)) for nest, *indices in loops]
    assert named == [x.loops for x in record.events]
    objects = [found["objects"][x] if x >= 0 else None for x in column("events", "object")]
    assert objects == [x.object and [*x.object] for x in record.events]
    assert sum(column("idle", "end")) > sum(column("idle", "start"))
    assert len((tmp_path / "record.json").read_bytes()) < 60 * len(record) + 70_000


def test_threads_that_wait_for_ever() -> None:
    last = recorded(wait_for_ever, threads=32).events[-2:]
    assert [(x.kind, x.object, x.phase) for x in last] == [("arrive", (0, "full"), 0), ("block", (0, "full"), 0)]
    assert (last[0].pending, last[0].amount) == (2, 1)


def test_where_in_the_record_a_hazard_was_found() -> None:
    def record(k: Builder, out: Value) -> None:
        smem = k.shared(256, name="words")
        hw.store_shared(word(k, k.thread.to(U32)), smem[0].address + (k.thread * 4).to(U32))
        hw.load_shared(k.registers(U32, 1, "got"), smem[0].address + (4 * (63 - k.thread)).to(U32))

    result = run(record, threads=64, observe=True)
    (found,) = result.records
    hazard = result.hazards[0]
    for x in result.hazards:
        assert x.event is not None
        assert found.events[x.event].statement == x.location.number
    assert found.columns()["hazards"][0]["id"] == hazard.id


def test_nothing_is_recorded_unasked() -> None:
    a = np.ones((64, 64), np.float16)
    simulation = gemmsmith.simulate(a, a)
    assert (simulation.records, simulation.record) == ((), None)
    with pytest.raises(ArgumentError, match="record=True"):
        _ = simulation.timeline


def test_a_record_does_not_keep_the_simulated_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(k: Builder, out: Value) -> None:
        hw.sync_threads()

    states, observe = [], GridState.observe

    def observed(state: GridState) -> Record:
        states.append(weakref.ref(state))
        return observe(state)

    monkeypatch.setattr(GridState, "observe", observed)
    found = recorded(record)
    gc.collect()
    assert [state() for state in states] == [None]
    assert len(found) > 0


@pytest.mark.parametrize("seed", range(3))
def test_a_window_has_what_ended_each_wait_in_it(seed: int) -> None:
    """Also if a warp has arrived for the next phase before another one goes on."""

    def record(k: Builder, out: Value) -> None:
        with k.when(k.thread < 32), k.range(4, name="i"):
            hw.barrier_sync(1, 64)
        with k.when(k.thread >= 32), k.range(4, name="i"):
            hw.barrier_sync(1, 64)

    whole = recorded(record, threads=64, seed=seed)
    waits = [(i, x) for i, x in enumerate(whole.events) if x.kind == "resume" and x.phase >= 0]
    assert waits
    ends = [next(i for i, y in enumerate(whole.events) if y.object == x.object and y.kind == "arrive"
                 and y.phase == x.phase + 1) for _, x in waits]  # fmt: skip
    if seed:
        assert any(any(y.object == x.object and y.kind == "arrive" for y in whole.events[end + 1 : i])
                   for (i, x), end in zip(waits, ends, strict=True))  # fmt: skip
    for first in range(1, len(whole)):
        window = whole.window(first, len(whole))
        assert window.record.events[len(window.before) :] == whole.events[first:]
        assert window.record.events[: len(window.before)] == [whole.events[i] for i in window.before]
        assert {end for (i, _), end in zip(waits, ends, strict=True) if end < first <= i} <= {*window.before}
