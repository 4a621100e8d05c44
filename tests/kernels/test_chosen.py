"""What is chosen on each chip but Hopper, compiled for it: nothing spills, whatever the epilogue, layout and dtype; on
Hopper the functions of whole rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmsmith
from gemmsmith import Spec
from gemmsmith.core.chip import CHIPS, HOPPER
from gemmsmith.host import planned_gemm


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


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(6))
@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.target)
def test_nothing_spills(chip: Any, turn: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every sixth product one by chance."""
    products = [x for x in PRODUCTS if chip != HOPPER or x[0] == "fp32"][turn::6]
    if not products:
        return
    dtype, options, sizes, layout, epilogue = products[int(rng.integers(len(products)))]
    monkeypatch.setattr(planned_gemm, "chip_of", lambda a: chip)
    m, n, k = sizes
    a, b = (
        Spec(shape, dtype, None if major == "n" else (1, shape[0]))
        for shape, major in zip(((m, k), (k, n)), layout, strict=True)
    )
    known = {"bias": Spec((n,), "fp32"), "c": Spec((m, n), "bf16"), "d": Spec((m, n), "fp32")}
    names = epilogue.__code__.co_varnames[1 : epilogue.__code__.co_argcount] if epilogue else ()
    plan = gemmsmith.plan(a, b, epilogue=epilogue, operands={name: known[name] for name in names}, **options)
    r = plan.resources
    assert plan._planned.kernel.chip == chip
    assert (r.spill_store_bytes, r.spill_load_bytes, r.stack_bytes, r.advisories) == (0, 0, 0, ()), plan.config
    assert r.shared_bytes <= chip.max_shared_bytes_per_cta


def top_k(acc: Any) -> Any:
    return gemmsmith.top_k_softmax(acc, 2)


def top_k_of_biased(acc: Any, bias: Any) -> Any:
    return gemmsmith.top_k_softmax((acc + bias).silu(), 2)


def top_k_and_logits(acc: Any) -> Any:
    return acc.to("bf16"), gemmsmith.top_k_softmax(acc, 2).to("bf16")


def quantized_rows(acc: Any) -> Any:
    return gemmsmith.quantize(acc.relu(), "1x256")


def quantized(acc: Any) -> Any:
    return gemmsmith.quantize(acc.relu(), "1x128")


EACH_COLUMN = {"scale_a": Spec((2048, 1), "fp32"), "scale_b": Spec((1, 256), "fp32")}
OPERANDS: list[tuple[str, dict[str, Any]]] = [
    ("bf16", {}), ("fp8_e4m3", {}), ("fp8_e4m3", EACH_COLUMN), ("fp32", {}), ("fp32", {"precision": "tf32"}),
    ("fp32", {"precision": "3xtf32"}),
]  # fmt: skip
ROWS = [*((n, top_k) for n in (64, 128, 200, 256))]
ROWS += [(256, f) for f in (top_k_of_biased, top_k_and_logits, quantized_rows, quantized)]


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize(("n", "epilogue"), ROWS)
def test_whole_rows_do_not_spill_on_hopper(n: int, epilogue: Any, turn: int, rng: np.random.Generator) -> None:
    """With every third kind of operands, one by chance."""
    dtype, options = OPERANDS[turn + 3 * int(rng.integers(2))]
    given = {name: Spec((2048, 1) if name == "scale_a" else (1, n), "fp32") for name in options if "scale" in name}
    operands = {"bias": Spec((n,), "fp32")} if epilogue is top_k_of_biased else {}
    a, b = Spec((2048, 512), dtype), Spec((512, n), dtype, (1, 512))
    r = gemmsmith.plan(a, b, epilogue=epilogue, operands=operands, **{**options, **given}).resources
    assert (r.spill_store_bytes, r.spill_load_bytes, r.stack_bytes, r.advisories) == (0, 0, 0, ())
