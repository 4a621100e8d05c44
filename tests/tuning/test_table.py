"""Tuned configs: which one a problem gets, and when it gets none."""

from __future__ import annotations

import gemmsmith
from gemmsmith import Config, Spec
from gemmsmith.core.problem import Problem
from gemmsmith.problems import problem_of
from gemmsmith.tuning.table import Table, shipped

SMALL, LARGE = Config(tile=(64, 64, 64), cluster=(1, 1), consumers=1, splits=2), Config(tile=(256, 128, 64))
ROWS = [
    {"m": m, "n": 4096, "k": 1024, "config": {**vars(c), "tile": list(c.tile)}} for m, c in ((64, SMALL), (512, LARGE))
]


def problem(m: int, n: int, k: int, dtype: str = "bf16") -> Problem:
    return problem_of(Spec((m, k), dtype), Spec((k, n), dtype, (1, k)))


def test_the_next_tuned_m() -> None:
    table = Table(reversed(ROWS))
    got = {m: table.get(problem(m, 4096, 1024)) for m in (1, 64, 65, 255, 256, 512, 513)}
    assert got == {1: SMALL, 64: SMALL, 65: None, 255: None, 256: LARGE, 512: LARGE, 513: None}
    assert table.get(problem(64, 4096, 1032)) is None
    assert table.get(problem(512, 4096, 1024, "fp16")) == LARGE


def test_a_config_that_does_not_suit_is_none() -> None:
    deep = LARGE.replace(stages=9)
    assert Table([{**ROWS[1], "config": vars(deep)}]).get(problem(512, 4096, 1024)) == LARGE  # as many as fit
    wide = LARGE.replace(consumers=1)  # its accumulator does not fit
    assert Table([{**ROWS[1], "config": vars(wide)}]).get(problem(512, 4096, 1024)) is None


def test_the_shipped_table_reads() -> None:
    assert shipped().get(problem(3, 5, 7)) is None


def test_why_says_where_it_comes_from() -> None:
    a, b = Spec((512, 4096), "bf16"), Spec((4096, 4096), "bf16", (1, 4096))
    assert "chosen by the model" in gemmsmith.plan(a, b).why
    said = gemmsmith.plan(a, b, config=Config(tile=(64, 256, 64), cluster=(1, 1), consumers=1, swap=True)).why
    assert "given" in said
    assert "swapped" in said
    assert said.count("beside it") == 3
