"""Why a config was chosen: what the text says is what the model says."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

import gemmsmith
from gemmsmith import Config, Grouping, Spec
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.chip import HOPPER
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.problem import Problem
from gemmsmith.tuning.candidates import spec_for
from gemmsmith.tuning.choose import rank_configs
from gemmsmith.tuning.choose_sm80 import sgemm_estimate
from gemmsmith.tuning.config_table import ConfigTable
from gemmsmith.tuning.costs import SM_CLOCK_MHZ
from gemmsmith.tuning.explain_config import MIN_SHARE, WIDTH, explain_config
from gemmsmith.tuning.model import estimate
from gemmsmith.tuning.tuned_table import find_tuned


def problem(m: int, n: int, k: int) -> Problem:
    return bind(Request(Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, k)))).problem


@pytest.mark.parametrize(
    ("shape", "tile", "bound"),
    [
        ((4096, 2048, 4096), (128, 256, 64), "compute"),
        ((16, 16384, 16384), (64, 64, 64), "memory"),
        ((16384, 16384, 16384), (128, 152, 64), "power"),
    ],
)
def test_what_bounds_a_product(shape: tuple[int, int, int], tile: tuple[int, int, int], bound: str) -> None:
    p, config = problem(*shape), Config("pingpong" if bound == "power" else "cooperative", tile, cluster=(1, 2))
    config = config.replace(consumers=1, stages=12) if bound == "memory" else config
    e = estimate(p, ConfigTable.from_configs([config]))
    bounds = {"compute": e.work_cycles[0], "memory": e.memory_cycles[0], "power": e.power_limited_cycles[0]}
    assert max(bounds, key=bounds.__getitem__) == bound
    text = explain_config(p, config, None, "chosen")
    total = float(e.cycles[0])
    assert f"\n{bound}-bound: estimated {total / SM_CLOCK_MHZ:.1f} us (H200, 1600 MHz), not measured\n" in text
    found = parts(text)
    serial = sum(found.get(name, (0, 0))[0] for name in ("mainloop", "uneven waves", "epilogue"))
    assert serial == pytest.approx(bounds["compute"] / SM_CLOCK_MHZ, abs=0.2, rel=0.05)
    for name, key in (("DRAM", "memory"), ("power", "power")):
        assert (name in found) == (bounds[key] >= MIN_SHARE * total)
        if name in found:
            us, share = found[name]
            assert us == pytest.approx(bounds[key] / SM_CLOCK_MHZ, abs=0.051)
            assert share == pytest.approx(100 * bounds[key] / total, abs=0.51)


def unwrapped(text: str) -> str:
    return text.replace("\n    ", " ")


def parts(text: str) -> dict[str, tuple[float, float]]:
    """Return the microseconds and the share in percent of each part, by name."""
    found = re.findall(r"^  ([\w, ]+?) +([\d.]+) us +(\d+)%", text, re.MULTILINE)
    return {name: (float(us), float(share)) for name, us, share in found}


def test_a_small_product_is_bound_by_latency() -> None:
    """Most of its time is the launch; the parts add up to the estimate, as nothing overlaps much."""
    plan = gemmsmith.plan(Spec((128, 128), "bf16"), Spec((128, 128), "bf16", (1, 128)))
    name, share = max(parts(plan.why).items(), key=lambda x: x[1])
    assert plan.why.split("\n")[1].startswith("latency-bound: ")
    assert name == "launch, fill"
    assert share[1] > 80
    assert sum(us for us, _ in parts(plan.why).values()) == pytest.approx(plan.estimated_us, rel=0.1)


def test_tiles_that_do_not_fill_the_last_wave() -> None:
    """A tile more than the SMs compute at once: half of their time is idle."""
    config = Config(tile=(128, 256, 64), cluster=(1, 1))
    even, uneven = (explain_config(problem(128 * n, 256, 8192), config, None, "given") for n in (132, 133))
    assert "uneven waves" not in parts(even)
    assert "\nbound by wave quantization: " not in even
    assert parts(uneven)["uneven waves"][0] == pytest.approx(parts(uneven)["mainloop"][0], rel=0.05)
    assert "133 tiles of clusters, 132 at once; 50% of SM time idle" in uneven


def test_a_tuned_plan_says_what_was_measured() -> None:
    """And of what: the table's M, and without the epilogue."""
    a, b = Spec((504, 4096), "bf16"), Spec((4096, 4096), "bf16", (1, 4096))
    entry = find_tuned(problem(504, 4096, 4096))
    assert entry
    assert entry.m > 504
    measured = f", fastest measured (H200, M = {entry.m}"
    assert f"{measured})\n" in gemmsmith.plan(a, b).why
    assert f"{measured}, no epilogue)\n" in gemmsmith.plan(a, b, epilogue=lambda acc: acc.relu()).why


@pytest.mark.parametrize("m", [1, 64, 500, 4096, 20000])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (64, 64), (128, 8192), (7168, 2048)])
def test_it_is_short(m: int, n: int, k: int) -> None:
    lines = gemmsmith.plan(Spec((m, k), "bf16"), Spec((k, n), "bf16", (1, k))).why.split("\n")
    assert len(lines) <= 11
    assert max(map(len, lines)) <= WIDTH


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (Config(tile=(128, 256, 64), cluster=(2, 1), stages=4), "math"),
        (Config(tile=(64, 64, 64), cluster=(1, 1), stages=8, consumers=1), "copies"),
        (Config(tile=(64, 8, 64), cluster=(1, 1), stages=2, consumers=1), "copy latency"),
    ],
)
def test_what_limits_a_k_tile(config: Config, limit: str) -> None:
    p = problem(2048, 4096, 4096)
    e = estimate(p, ConfigTable.from_configs([config]))
    math, copies, k_tile = (float(x[0]) for x in (e.math_cycles, e.copy_cycles, e.k_tile_cycles))
    larger = "math" if math >= copies else "copies"
    assert limit == ("copy latency" if k_tile > 1.2 * max(math, copies) else larger)
    text, names = unwrapped(explain_config(p, config, None, "given")), {"math": "compute", "copy latency": "latency"}
    assert f"of {k_tile:.0f} cycles: tensor cores {math:.0f}, copies {copies:.0f}" in text
    assert (", else waiting" in text) == (limit == "copy latency")
    bound = "bound by copies from the L2" if limit == "copies" else f"{names[limit]}-bound"
    assert text.split("\n")[1].startswith(f"{bound}: ")


def test_the_config_comes_first_and_last_the_best_other() -> None:
    """Its estimate is of the same kind, and the changes make it of the plan's config."""
    p = problem(4096, 4096, 4096)
    best = rank_configs(p, limit=2)
    for config in (best[0], best[1], Config()):
        first, *_, last = unwrapped(explain_config(p, config, None, "chosen by hand")).split("\n")
        assert first == f"{config}: chosen by hand"
        other = next(c for c in best if c != config)
        us = estimate(p, ConfigTable.from_configs([other])).cycles[0] / SM_CLOCK_MHZ
        said, changes = last.split(" with ")
        assert said == f"best other config: estimated {us:.1f} us"
        assert eval(changes, {"config": config, "Config": Config}) == other


def test_a_swapped_plan_is_explained_with_its_epilogue() -> None:
    """As it was chosen: for the product that is not transposed."""

    def epilogue(acc: Any, bias: Any) -> Any:
        return (acc + bias).maximum(0.0)

    a, b, bias = Spec((16, 4096), "bf16"), Spec((4096, 28672), "bf16", (1, 4096)), Spec((28672,), "bf16")
    plan = gemmsmith.plan(a, b, epilogue=epilogue, bias=bias, config=Config(tile=(128, 16, 64), swap_ab=True))
    p = bind(Request(a, b, operands={"bias": bias}, epilogue=epilogue))
    assert plan.why == explain_config(p.problem, plan.config, p.spec, "given", names="ba")
    assert plan.why != explain_config(p.problem, plan.config, None, "given")


@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(4096, 4096, 4096), (16, 4096, 4096), (512, 500, 300), (64, 64, 1 << 16)])
def test_cuda_cores(m: int, n: int, k: int, swap_ab: bool) -> None:
    """By the model that ranks their tiles, in the time of an H100."""
    a, b = Spec((m, k), "fp32"), Spec((k, n), "fp32", (1, k))
    config = gemmsmith.plan(a, b).config.replace(swap_ab=swap_ab)
    plan, p = gemmsmith.plan(a, b, config=config), bind(Request(a, b)).problem
    e = sgemm_estimate(p, m, spec_for(config, p, EpilogueSpec.identity(p.d)), HOPPER)
    assert plan.estimated_us == pytest.approx(e.cycles / SM_CLOCK_MHZ)
    assert f": estimated {plan.estimated_us:.1f} us (H100, 1600 MHz), not measured" in plan.why
    cycles = {"mainloop": e.mainloop_cycles, "DRAM": e.memory_cycles, "epilogue": e.epilogue_cycles}
    found = parts(plan.why)
    assert set(found) == {name for name, x in cycles.items() if x >= MIN_SHARE * e.cycles}
    for name, (us, share) in found.items():
        assert us == pytest.approx(cycles[name] / SM_CLOCK_MHZ, abs=0.051)
        assert share == pytest.approx(100 * cycles[name] / e.cycles, abs=0.51)
    longest, summary = max(cycles, key=cycles.__getitem__), unwrapped(plan.why).split("\n")[1]
    bounds = {"DRAM": ("memory",), "epilogue": ("epilogue",), "mainloop": ("compute", "latency", "bound by copies")}
    assert summary.startswith(bounds[longest])
    assert unwrapped(plan.why).split("\n")[-1].startswith("best other config: estimated ")


@pytest.mark.parametrize("design", ["mma_multistage", "sgemm"])
def test_a_kernel_that_no_model_covers(design: str) -> None:
    """What is known of it without one: its tiles, its bytes, and that there is no estimate."""
    tile, dtype = ((128, 128, 32), "bf16") if design == "mma_multistage" else ((128, 64, 8), "fp32")
    config = Config(design, tile, (1, 1), chip="sm_86", stages=3)
    plan = gemmsmith.plan(Spec((512, 1024), dtype), Spec((1024, 768), dtype), config=config)
    first, summary, tiles, nbytes, *others = unwrapped(plan.why).split("\n")
    assert first == f"{config}: given"
    assert summary.startswith("no estimate: the cost models are for ")
    assert summary.endswith(f"this is {design} on sm_86")
    count = 512 * 768 // (tile[0] * tile[1])
    assert tiles == f"  {count} tiles on 84 SMs, {count / 84:.1f} for each"
    size = (512 * 1024 + 1024 * 768 + 512 * 768) * (2 if dtype == "bf16" else 4)
    assert nbytes == f"  {size / 1e6:.1f} MB of operands and results, {2 * 512 * 768 * 1024 / size:.0f} FLOPs per byte"
    assert [x.split(":")[0] for x in others] == ["next in the ranking by waves and copies"]
    assert math.isnan(plan.estimated_us)
    assert "estimate " not in repr(plan)


TABLE = Spec((8,), "int32")


@pytest.mark.parametrize(
    ("a", "b", "grouping", "more", "size"),
    [
        ((4096, 4096), (8, 4096, 2048), Grouping("sizes"), {"sizes": TABLE}, "512 rows"),
        ((8, 640, 4096), (8, 4096, 2048), Grouping("counts"), {"counts": TABLE}, "640 rows"),
        ((4096, 4096), (4096, 2048), Grouping("offsets", along="k"), {"offsets": TABLE}, "K = 512"),
        ((4096, 512), (8, 512, 256), Grouping("sizes", gathers=True),
         {"sizes": TABLE, "gather": Spec((4096,), "int32")}, "512 rows"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("swap_ab", [None, False, True])
def test_groups(a: Any, b: Any, grouping: Grouping, more: Any, size: str, swap_ab: bool | None) -> None:
    """They are explained as if they were equally large, and estimated so."""
    given = {"a": Spec(a, "bf16"), "b": Spec(b, "bf16"), "grouping": grouping, **more}
    plan = gemmsmith.plan(**given)
    if swap_ab is not None:
        plan = gemmsmith.plan(
            **given, config=plan.config.replace(swap_ab=swap_ab, tile=(128, 128, 64), cluster=(1, 1), stages=3)
        )
    lines = unwrapped(plan.why).split("\n")
    assert lines[0] == f"{plan.config}: {plan.origin}"
    assert f": estimated {plan.estimated_us:.1f} us (H200, 1600 MHz), not measured" in lines[1]
    assert {"mainloop", "DRAM"} <= set(parts(plan.why))
    (line,) = (x for x in lines if x.startswith("as if each "))
    assert line.startswith(f"as if each of the 8 groups had {size}")
    assert ("gathering them" in line) == grouping.gathers
    copied = [x for x in lines if "before each run, since groups along K are read MN-major" in x]
    assert len(copied) == (grouping.along == "k")
    assert bool(copied) == bool(plan.workspace_bytes)


def test_groups_that_no_model_covers() -> None:
    a, b = Spec((256, 64), "bf16"), Spec((8, 64, 128), "bf16")
    config = Config("mma_multistage", (64, 64, 64), (1, 1), chip="sm_80", stages=3, consumers=1)
    why = gemmsmith.plan(a, b, grouping=Grouping("sizes"), sizes=TABLE, config=config).why
    assert "\n  16 tiles on 108 SMs, 0.1 for each\n" in why
    assert "\nas if each of the 8 groups had 32 rows" in why
