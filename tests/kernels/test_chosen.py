"""What is chosen on each chip but Hopper, compiled for it: nothing spills, whatever the epilogue, layout and dtype."""

from __future__ import annotations

from typing import Any

import pytest

import gemmsmith
from gemmsmith import Spec, plans
from gemmsmith.core.chip import CHIPS, HOPPER


def residual(acc: Any, c: Any) -> Any:
    return acc + c


def two_matrices(acc: Any, c: Any, d: Any) -> Any:
    return acc * c + d


def statistics(acc: Any, bias: Any, c: Any) -> Any:
    x = (acc + bias).relu() + c
    return x, x.sum(-1)


def reductions(acc: Any) -> Any:
    return acc, acc.sum(-1), acc.max(-2), acc.min(-1), acc.mean(), acc.logsumexp(-2)


def whole_rows(acc: Any) -> Any:
    return gemmsmith.top_k_softmax(acc, 4)


LARGE, RAGGED, FEW, DEEP = (4096, 4096, 4096), (4095, 4093, 777), (16, 4096, 4096), (512, 512, 16384)
PRODUCTS: list[tuple[str, dict[str, str], tuple[int, int, int], str, Any]] = [
    ("bf16", {}, LARGE, "nt", None),
    ("bf16", {}, LARGE, "tn", residual),
    ("bf16", {}, RAGGED, "nn", two_matrices),
    ("bf16", {}, FEW, "nt", statistics),
    ("fp16", {"accumulate": "fp16"}, LARGE, "nn", residual),
    ("fp32", {"precision": "tf32"}, DEEP, "nt", None),
    ("fp32", {"precision": "3xtf32"}, RAGGED, "nt", two_matrices),
    ("int8", {}, LARGE, "nt", statistics),
    ("fp32", {}, RAGGED, "nn", residual),
    ("fp32", {}, LARGE, "nt", reductions),
    ("fp32", {}, (2048, 128, 512), "nt", whole_rows),
]
CHOSEN = [(chip, *product) for chip in CHIPS.values() for product in PRODUCTS if chip != HOPPER or product[0] == "fp32"]


@pytest.mark.parametrize(("chip", "dtype", "options", "sizes", "layout", "epilogue"), CHOSEN)
def test_nothing_spills(
    chip: Any, dtype: str, options: dict[str, Any], sizes: tuple[int, int, int], layout: str, epilogue: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(plans, "_chip", lambda a: chip)
    m, n, k = sizes
    a, b = (
        Spec(shape, dtype, None if major == "n" else (1, shape[0]))
        for shape, major in zip(((m, k), (k, n)), layout, strict=True)
    )
    known = {"bias": Spec((n,), "fp32"), "c": Spec((m, n), "bf16"), "d": Spec((m, n), "fp32")}
    names = epilogue.__code__.co_varnames[1 : epilogue.__code__.co_argcount] if epilogue else ()
    plan = gemmsmith.plan(a, b, epilogue=epilogue, operands={name: known[name] for name in names}, **options)
    r = plan.resources
    assert plan.kernel.chip == chip
    assert (r.spill_stores, r.spill_loads, r.stack, r.advisories) == (0, 0, 0, ()), plan.config
    assert r.shared <= chip.shared_bytes
