"""The ladder's benchmark: the rows of its times, and the check of results. Its times need a GPU."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from benchmarks.ladder import speed as ladder  # noqa: E402
from gemmsmith.ladder.rungs import RUNG_CASES  # noqa: E402

pytestmark = pytest.mark.torch

SHAPE = 512, 256, 1024


def test_rows() -> None:
    """The floor is the slower of a copy and the loop; cuBLAS and loops are those of the dtype and the instruction."""
    flops, us = 2 * math.prod(SHAPE), {}
    for x in RUNG_CASES:
        us |= {ladder.title(x): 40.0, f"copy {ladder.nbytes(x, SHAPE)}": 3.0}
    us |= {f"cuBLAS {name}": float(i) for i, name in enumerate(ladder.CUBLAS_LAYOUT, 8)}  # 8 us, 9 ...
    slowdowns = {name: 10.0 if name == "fma" else 2.0 for name in ladder.MICROBENCHMARKS}
    us |= {f"loop {name}": ladder.loop_flops(name) / flops * slowdown for name, slowdown in slowdowns.items()}
    rows = [ladder.row(x, SHAPE, us) for x in RUNG_CASES]
    assert all((r["m"], r["n"], r["k"]) == SHAPE for r in rows)
    for r in rows:
        assert r["tflops"] == pytest.approx(flops / 40e6)
        assert r["of_cublas"] == {"fp32": 0.2, "tf32": 0.225, "bf16": 0.25, "int8": 0.275}[r["dtype"]]
        assert r["of_roofline"] == pytest.approx(10 / 40 if r["dtype"] == "fp32" else 3 / 40)
    loops = {r["rung"]: r["loop"] for r in rows}
    assert (loops["sgemm"], loops["wmma"], loops["cooperative"]) == ("fma", "mma_bf16", "wgmma_bf16")
    assert [r["loop"] for r in rows if r["dtype"] in ("int8", "tf32")] == ["dp4a", "mma_int8", "mma_tf32"]


@pytest.mark.parametrize(("dtype", "output"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("int8", "int32")])
def test_a_result_is_right_only_where_every_element_is(dtype: str, output: str) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(size) if dtype != "int8" else torch.randint(-128, 128, size) for size in ((48, 256), (256, 80)))
    a, b, d = a.to(ladder.TORCH[dtype]), b.to(ladder.TORCH[dtype]), torch.empty(48, 80, dtype=ladder.TORCH[output])

    def right(a: Any, b: Any, d: Any) -> None:
        d.copy_(a.double() @ b.double())

    def one_is_missing(a: Any, b: Any, d: Any) -> None:
        d[:-1], d[-1, :-1] = a[:-1].double() @ b.double(), a[-1].double() @ b[:, :-1].double()

    def a_step_is_missing(a: Any, b: Any, d: Any) -> None:
        d.copy_(a[:, :-16].double() @ b[:-16].double())

    def cut(a: Any, b: Any, d: Any) -> None:
        d.copy_((a.view(torch.int32) & -0x2000).view(torch.float32).double() @ b.double())

    assert ladder.is_right(right, a, b, d)
    assert not ladder.is_right(one_is_missing, a, b, d)
    if dtype == "fp32":
        assert not ladder.is_right(cut, a, b, d)
        assert ladder.is_right(cut, a, b, d, "tf32")
    assert not ladder.is_right(a_step_is_missing, a, b, d)


def test_help() -> None:
    words, root = [sys.executable, "-m", ladder.__name__, "--help"], Path(__file__).parents[2]
    assert "--rung" in subprocess.run(words, capture_output=True, text=True, check=True, cwd=root).stdout
