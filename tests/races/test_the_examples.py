"""The races of examples/races: each is found where it is, and its mend is right."""

from __future__ import annotations

import re
import runpy
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import gemmsmith
from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.backends.sim import Hazard

FOLDER = Path(__file__).parents[2] / "examples" / "races"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
SEEDS = range(6)


class Fault(NamedTuple):
    """`kinds`: each schedule has a hazard of one of them. `lines`: parts of the lines at which it may be reported."""

    kinds: set[str]
    lines: tuple[str, ...]


FAULTS = {
    "arrivals_run_ahead": Fault({"barrier"}, ("hw.barrier_arrive(", "hw.barrier_sync(")),
    "bytes_but_no_arrival": Fault({"deadlock"}, ("hw.mbarrier_wait(full, 0)",)),
    "cluster_entry": Fault({"barrier"}, ("hw.store_async(x, hw.mapa(slot",)),
    "cluster_exit": Fault({"access to exited CTA"}, ("hw.mbarrier_arrive_remote(empty, ",)),
    "copies_after_the_loop": Fault({"race"}, ("hw.store_shared_word(result + own",)),
    "counter_without_acquire": Fault({"race"}, ("partial = hw.load_global_word(partials",)),
    "dependent_launch": Fault({"race"}, ("x = hw.load_global_word(source",)),
    "fence_after_barrier": Fault({"missing proxy fence"}, ("hw.tma_store(target, ",)),
    "operand_in_registers": Fault({"wgmma register hazard"}, ("a[i] = hw.load_global_word(source",)),
    "parity_of_the_next_tile": Fault({"barrier", "over-arrival"}, ("hw.mbarrier_arrive_expect_tx(full[stage]",)),
    "stage_released_early": Fault({"race"}, ("hw.tma_load(source, k_tile * 64",)),
    "store_buffer_reused": Fault({"race"}, ("hw.tma_load(source, 0, tile",)),
}


def line_of(hazard: Hazard) -> str:
    return hazard.to_json()["places"][0]["python"]["text"]


def test_there_are_twelve() -> None:
    assert NAMES == sorted(FAULTS)
    assert len(NAMES) == 12


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_found_where_it_is(name: str, seed: int) -> None:
    fault, simulation = FAULTS[name], import_module(f"examples.races.{name}").simulate(seed=seed)
    found = [line_of(hazard) for hazard in simulation.hazards if hazard.kind in fault.kinds]
    assert any(line in text for text in found for line in fault.lines), simulation.hazards
    assert simulation.record is not None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", SEEDS)
def test_its_mend_is_right(name: str, seed: int) -> None:
    race, rng = import_module(f"examples.races.{name}"), np.random.default_rng()
    example = race.simulate(mended=True, seed=seed)
    assert example.hazards == []
    source, target = example.result["source"], example.result["target"]
    assert np.isfinite(target).all()
    arrays = {"source": rng.standard_normal(source.shape).astype(source.dtype), "target": np.full_like(target, np.nan)}
    gemmsmith.launch(race.kernel(mended=True), **arrays)  # raises HazardError for a hazard
    np.testing.assert_allclose(arrays["target"], race.expected(arrays["source"]), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_its_mend_is_right_on_a_gpu(name: str) -> None:
    torch = pytest.importorskip("torch")
    race, rng = import_module(f"examples.races.{name}"), np.random.default_rng()
    like = race.simulate(mended=True).result
    x = rng.standard_normal(like["source"].shape).astype(like["source"].dtype)
    arrays = x, np.full_like(like["target"], np.nan)
    source, target = (torch.tensor(y.astype(float)).to("cuda", getattr(torch, y.dtype.name)) for y in arrays)
    gemmsmith.launch(race.kernel(mended=True), source=source, target=target)
    np.testing.assert_allclose(target.cpu().float().numpy(), race.expected(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mended", [False, True])
def test_it_compiles_without_warnings(name: str, mended: bool) -> None:
    kernel = import_module(f"examples.races.{name}").kernel(mended)
    resources = compile_source(kernel.source, kernel.name).resources
    assert (resources.advisories, resources.spill_store_bytes) == ((), 0)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_short_file_that_asks_and_answers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = FOLDER / f"{name}.py"
    assert 40 <= len(path.read_text().splitlines()) <= 90
    scope = runpy.run_path(f"{path}", run_name="__main__")
    parts = r"[^\n]+\?\n\npython \S+\n\n.+\?\n\nAnswer: .+\n\nMend: .+\n\nSource: https://github\.com/.+"
    assert re.fullmatch(parts, scope["__doc__"].strip(), re.DOTALL)
    title, source = scope["__doc__"].split("\n", 1)[0], re.search(r"https://\S+\d", scope["__doc__"])
    assert source
    listed = re.escape(f"| [{name}.py]({name}.py) | {title} | [") + r"\S+\]" + re.escape(f"({source[0]}) |")
    assert re.search(listed, (FOLDER / "README.md").read_text())
    printed = capsys.readouterr().out
    assert [x for x in FAULTS[name].kinds if printed.startswith(f"{x} at {name}.py:")]
    assert "\nmended: " in printed
