"""A header of several plans chooses by M: its launches are those of the chosen plan's own header."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.host.export.test_headers import program_of, run
from tests.host.export.test_headers import pytestmark as needs

import gemmsmith
from gemmsmith import ArgumentError, Config, Plan, Spec
from gemmsmith.core.problem import MAX_EXTENT
from gemmsmith.host.export.signature import Signature

pytestmark = needs
CONFIGS = {
    16: Config("cooperative", (128, 16, 64), (1, 1), 4, cluster_splits=2, swap_ab=True),
    100: Config("cooperative", (128, 128, 64), (1, 1), 4, splits=3),
    2048: Config("pingpong", (128, 128, 64), (2, 1), 4),
}


def biased(acc: Any, bias: Any, c: Any) -> Any:
    return {"out": (acc + bias).relu(), "sum": acc + c}


def plan_of(m: int, config: Config | None = None, bias: str = "bf16") -> Plan:
    operands = {"bias": Spec((384,), bias), "c": Spec((m, 384), "bf16")}
    return gemmsmith.plan(Spec((m, 640), "bf16"), Spec((640, 384), "bf16", (1, 640)), epilogue=biased, config=config,
                          **operands)  # fmt: skip


def test_the_launches_are_those_of_the_plan(tmp_path: Path) -> None:
    plans = [plan_of(*x) for x in CONFIGS.items()]
    about, choice = program_of(plans[1].export(tmp_path, "choice", [plans[2], plans[0]]))
    assert about["configs"] == [[16, f"{CONFIGS[16]}"], [100, f"{CONFIGS[100]}"], [MAX_EXTENT, f"{CONFIGS[2048]}"]]
    signature, dice = Signature.of(plans[0]._planned), random.Random()
    alone = [program_of(x.export(tmp_path, f"alone{i}"))[1] for i, x in enumerate(plans)]
    problems: dict[int, list[list[int]]] = {}
    for _ in range(300):
        values = signature.draw(dice)
        if dice.random() < 0.7:
            values["m"] = dice.choice((1, 15, 16, 17, 99, 100, 101))
        chosen = (values["m"] > 16) + (values["m"] > 100)
        problems.setdefault(chosen, []).append([*values.values()])
    assert len(problems) == 3
    for i, given in problems.items():
        launched = 0
        for got, wanted in zip(run(choice, given), run(alone[i], given), strict=True):
            assert got[:2] == wanted[:2]
            assert [x[1:] for x in got[2]] == [x[1:] for x in wanted[2]]  # but for the kernel's number
            launched += bool(got[2])
        assert launched > 10


def test_one_config_for_all_rows_is_one_kernel(tmp_path: Path) -> None:
    config = CONFIGS[2048]
    about, _ = program_of(plan_of(64, config).export(tmp_path, "same", [plan_of(1000, config)]))
    assert len(about["kernels"]) == 1


def test_plans_that_no_header_can_choose_from_are_refused() -> None:
    for others, error in (
        (plan_of(32), "others: got a plan; use a list of plans"),
        ([plan_of(64)], r"others: got plans for m = \[64, 64\]; use plans for different m"),
        (
            [plan_of(128, bias="fp32")],
            "others: got a plan of arrays of another layout or alignment",
        ),
    ):
        with pytest.raises(ArgumentError, match=error):
            plan_of(64).export("unused", others=others)
