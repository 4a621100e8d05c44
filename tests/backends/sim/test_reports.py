"""What a report has: lines of Python and of CUDA, threads, loops, a hint, an id that schedules do not change."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.backends.sim.tiny import kernel, run, word

import gemmsmith
from gemmsmith import Config, Spec, hw
from gemmsmith.backends.sim import Hazard, SimulationResult
from gemmsmith.backends.sim.report.hazards import Place
from gemmsmith.lang import statements as st
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.instruction import Result
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import U32
from gemmsmith.lang.values import Value


def store(k: Builder, smem: SharedView) -> None:
    hw.store_shared(word(k, k.thread.to(U32)), smem.address + (k.thread * 4).to(U32))


def stored_by_tma(k: Builder, out: Value, *, fence: bool = True, waits: bool = True) -> None:
    """Two tiles of 512 bytes are written and stored, in one buffer; the second is out of bounds."""
    box = k.tensor_map("map")
    smem = k.shared(512, alignment=128, name="tile")
    with k.range(2, name="tile_index") as i:
        store(k, smem[0])
        if fence:
            hw.fence_proxy_async()
        hw.sync_threads()
        with k.when(k.thread == 0):
            hw.tma_store(box, 0, i * 4, 0, smem[0])
            hw.bulk_commit()
            if waits:
                hw.bulk_wait_read(0)
        hw.sync_threads()
    with k.when(k.thread == 0):
        hw.bulk_wait_read(0)


def unordered_words(k: Builder, out: Value) -> None:
    """Warp 1 reads what warp 0 writes."""
    smem = k.shared(512, name="words")
    with k.when(k.warp_index == 0):
        store(k, smem[0])
    with k.when(k.warp_index == 1):
        hw.load_shared(k.registers(U32, 1, "got"), smem[0].address + (k.thread * 4 - 128).to(U32))


def no_fence(k: Builder, out: Value) -> None:
    stored_by_tma(k, out, fence=False)


def no_wait(k: Builder, out: Value) -> None:
    stored_by_tma(k, out, waits=False)


def stuck(k: Builder, out: Value) -> None:
    barrier = k.shared(8, name="full")
    with k.when(k.thread == 0):
        hw.mbarrier_init(barrier[0], 200)
    hw.sync_threads()
    with k.range(3, name="k_tile"):
        hw.mbarrier_arrive(barrier[0])
        hw.mbarrier_wait(barrier[0], 0)


def places(hazard: Hazard) -> list[Place]:
    assert all(isinstance(x, Place) for x in hazard.places)
    return [x for x in hazard.places if isinstance(x, Place)]


def only(result: SimulationResult) -> Hazard:
    (hazard,) = result.hazards
    return hazard


def test_both_accesses_of_a_race() -> None:
    hazard = only(run(no_wait))
    later, earlier = places(hazard)
    assert (hazard.kind, later.engine, earlier.engine) == ("race", "threads", "bulk")
    assert later.access == "write"
    assert earlier.access.startswith("read of TMA store")
    assert [x.loops for x in (later, earlier)] == [(("tile_index", 1),), (("tile_index", 0),)]
    assert [call.function for call in later.stack if call.file == __file__] == [
        "store", "stored_by_tma", "no_wait",
    ]  # fmt: skip
    assert "hw.store_shared(" in later.call.text
    assert "hw.tma_store(" in earlier.call.text
    assert "wait_group.read" in hazard.hint
    assert hazard.count > 1


def test_its_text_has_them_too() -> None:
    head, later, earlier, hint, last = str(only(run(no_wait))).split("\n  ")
    assert head.startswith("race at test_reports.py:")
    assert "write by CTA 0 warpgroup 0 warp 0, tile_index 1: " in later
    assert " in store < test_reports.py:" in later
    assert "read of TMA store of map by CTA 0 warpgroup 0, tile_index 0: " in earlier
    assert "; CUDA line " in earlier
    assert hint.startswith("hint: the thread that issued the TMA store")
    assert last.startswith("id ")
    assert last.endswith(" times")


@pytest.mark.parametrize(
    ("record", "kind", "hint"),
    [
        (no_fence, "missing proxy fence", "fence.proxy.async"),
        (no_wait, "race", "cp.async.bulk.wait_group.read"),
        (unordered_words, "race", "synchronize the threads"),
        (stuck, "deadlock", "arrivals and bytes that are missing"),
    ],
)  # fmt: skip
def test_schedules_do_not_change_ids(record: Callable[[Builder, Value], None], kind: str, hint: str) -> None:
    threads = 64 if record is unordered_words else 128
    found = [[h for h in run(record, threads, seed=seed).hazards if h.kind == kind] for seed in range(4)]
    (ids,) = {tuple(sorted(h.id for h in hazards)) for hazards in found if hazards}
    assert len(set(ids)) == len(ids) > 0
    assert found[0]
    assert all(hint in h.hint for h in found[0])


def test_ids_differ_between_hazards() -> None:
    hazards = [only(run(record)) for record in (no_fence, no_wait, stuck)]
    assert len({h.id for h in hazards}) == 3


def test_a_deadlock_has_every_wait() -> None:
    def record(k: Builder, out: Value) -> None:
        barrier = k.shared(8, stages=2, name="ring")
        with k.when(k.thread == 0):
            hw.mbarrier_init(barrier[0], 32)
            hw.mbarrier_init(barrier[1], 32)
        hw.sync_threads()
        with k.warpgroup(0):
            for warp in range(2):
                with k.warp(warp, f"{'producer' if warp else 'consumer'}"):
                    hw.mbarrier_wait(barrier[warp], 0)

    hazard = only(run(record))
    assert [(x.agent, x.access) for x in places(hazard)] == [
        ("CTA 0 consumer warp", "wait for ring[0] phase 0 (parity 0)"),
        ("CTA 0 producer warp", "wait for ring[1] phase 0 (parity 0)"),
    ]


def test_json() -> None:
    found = json.loads(json.dumps(only(run(no_wait)).to_json()))
    assert (found["kind"], found["kernel"], len(found["id"])) == ("race", "k", 8)
    later, earlier = found["places"]
    assert later["loops"] == {"tile_index": 1}
    assert later["cuda"]["text"].startswith("store_shared(")
    assert earlier["cuda"]["text"].startswith("tma_store(")
    assert earlier["python"]["file"] == __file__
    assert earlier["python"]["text"] == "hw.tma_store(box, 0, i * 4, 0, smem[0])"
    assert earlier["cta"] == 0


def issued(kernel: Kernel) -> list[tuple[str, int]]:
    """The text that each instruction is printed as, and the number of its statement."""
    blocks = [kernel.body, *(function.body for function in kernel.functions)]
    result = []
    for statement in (s for block in blocks for s in st.walk(block)):
        match statement:
            case st.IssueInstruction(instruction=i) | st.Define(value=Result(instruction=i)):
                text = i.cuda.partition("(")[0].partition("{")[0] if i.cuda else i.wrapper_name
                result.append((text, statement.location.number))
    return result


def gelu(acc: gemmsmith.Value, bias: gemmsmith.Value) -> gemmsmith.Value:
    return (acc + bias).gelu()


@pytest.mark.parametrize(
    "config",
    [Config(), Config("pingpong", (64, 128, 64)), Config("mma_multistage", (64, 64, 32), (1, 1), 3, 2, chip="sm_80")],
    ids=lambda config: config.design,
)
def test_the_line_of_cuda_of_each_instruction(config: Config) -> None:
    operands = {"epilogue": gelu, "bias": Spec((512,), "bf16")}
    plan = gemmsmith.plan(
        Spec((512, 1024), "bf16"), Spec((1024, 512), "bf16"), config=config, backend="sim", **operands
    )
    lines = plan._planned.kernel.source.split("\n")
    found = issued(plan._planned.kernel)
    assert len(found) > 50
    for text, number in found:
        assert text in lines[plan._planned.kernel.cuda_lines[number] - 1]


def test_the_line_of_what_is_printed_in_the_condition_of_a_branch() -> None:
    def record(k: Builder, out: Value) -> None:
        with k.when(k.thread == 0), k.when(hw.elect_one()):
            hw.mbarrier_init(k.shared(8, name="full")[0], 1)

    built = kernel(record, 32)
    lines = built.source.split("\n")
    assert all(text in lines[built.cuda_lines[number] - 1] for text, number in issued(built))


def test_of_a_simulated_gemm() -> None:
    a = np.ones((128, 64), np.float16)
    simulation = gemmsmith.simulate(a, a.T, config=Config())
    assert simulation.to_json() == {
        "verdict": "every schedule", "schedules": 1, "time_dependences": [], "cycles": simulation.cycles, "hazards": [],
    }  # fmt: skip


def test_edits_elsewhere_do_not_change_ids(tmp_path: Path) -> None:
    code = "from gemmsmith import hw\n\n\ndef record(k, out):\n    hw.mbarrier_wait(k.shared(8)[0], 0)\n"
    hazards = []
    for number, before in enumerate(("", "LINES = 1\n\n\n")):
        file = tmp_path / f"{number}" / "kernels.py"
        file.parent.mkdir()
        file.write_text(before + code)
        hazards.append(only(run(runpy.run_path(str(file))["record"])))
    assert [h.location.line for h in hazards] == [5, 8]
    assert hazards[0].id == hazards[1].id
