"""The comparison with torch.mm and cuBLASLt: the check of results, the choice of an algorithm, the summary."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import gemmsmith  # noqa: E402
from benchmarks import timing  # noqa: E402
from benchmarks.rows import load  # noqa: E402
from benchmarks.speed import dense  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_result_is_right_only_where_every_element_is(dtype: torch.dtype, rng: np.random.Generator) -> None:
    m, n, k = 48, 80, 512
    a, b = (torch.from_numpy(rng.standard_normal(size)).to(dtype) for size in ((m, k), (k, n)))
    d, product = torch.empty(m, n, dtype=dtype), timing.exact(a, b)

    def right(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
        d.copy_(a.float() @ b.float())

    def one_is_missing(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
        d[:-1], d[-1, :-1] = (a[:-1].float() @ b.float()), (a[-1].float() @ b[:, :-1].float())

    def a_step_is_missing(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
        d.copy_(a[:, :-16].float() @ b[:-16].float())

    def all_is_a_little_larger(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
        d.copy_(1.05 * (a.float() @ b.float()))

    assert timing.is_right(right, a, b, d, product)
    for wrong in (one_is_missing, a_step_is_missing, all_is_a_little_larger):
        assert not timing.is_right(wrong, a, b, d, product), wrong


def test_algorithms_that_fail_or_are_wrong_are_left_out(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (torch.from_numpy(rng.standard_normal((64, 64))).bfloat16() for _ in range(2))

    def right(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
        torch.mm(a, b, out=d)

    def wrong(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
        d.zero_()

    def failing(*_: torch.Tensor) -> None:
        raise dense.cublaslt.CublasLtError("cublasLtMatmul", 15)

    monkeypatch.setattr(dense.cublaslt, "algorithms", lambda a, b, d: [failing, wrong, right])
    monkeypatch.setattr(dense, "captured", lambda call, sets: call)
    lt_graphs = dense.lt_graphs([(a, b, torch.empty(64, 64, dtype=torch.bfloat16))], timing.exact(a, b))
    assert list(lt_graphs) == [right]
    assert "result is wrong" in capsys.readouterr().err


def test_the_fastest_algorithm_is_found_in_ever_longer_blocks(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shorter a block, the further off it may be, as on a chip at its power limit."""
    noise = dict(zip((seconds for _, seconds in timing.SELECTION), (0.05, 0.009, 0), strict=True))
    measured: list[float] = []

    def block(graph: float, calls: int, seconds: float, warm_up: float) -> float:
        assert calls == 3
        assert warm_up < seconds
        measured.append(seconds)
        return float(graph * rng.uniform(1, 1 + noise[seconds]))

    monkeypatch.setattr(timing, "block", block)
    graphs: dict[Any, Any] = {f"algorithm {i}": 10 + 0.1 * i for i in range(32)}
    assert timing.fastest(graphs, 3) == "algorithm 0"
    assert [measured.count(seconds) for _, seconds in timing.SELECTION] == [32, 8, 2]
    assert timing.fastest({}, 3) is None
    assert timing.fastest({"only": 1.0}, 3) == "only"


def test_the_summary_has_both_ratios_of_a_class() -> None:
    shapes = [(1, 4096, 4096), (16, 4096, 4096), (64, 4096, 4096)]
    rows = [{"m": m, "n": n, "k": k, "us": 1.0, "ratio": ratio, "lt_us": lt, "lt_ratio": lt}
            for (m, n, k), ratio, lt in zip(shapes, (1.0, 2.0, 4.0), (0.5, 1.0, 2.0), strict=True)]  # fmt: skip
    text = "\n".join(dense.summary(rows))
    for name in ("all", "layers", "memory-bound, M <= 64"):
        assert f"{name:<22}    3 shapes   torch.mm / ours   geometric mean 2.000   least 1.000 at 1x4096x4096" in text
        assert f"{name:<22}    3 shapes   cuBLASLt / ours   geometric mean 1.000   least 0.500 at 1x4096x4096" in text
    del rows[0]["lt_us"], rows[0]["lt_ratio"]  # where cuBLASLt suggests nothing
    text = "\n".join(dense.summary(rows))
    assert "   2 shapes   cuBLASLt / ours   geometric mean 1.414   least 1.000 at 16x4096x4096" in text


@pytest.mark.parametrize("name", ["dense-half-h200"])
def test_rows_without_cublaslt_have_a_summary(name: str) -> None:
    lines = dense.summary(load(name)["rows"])
    assert lines
    assert not any("cuBLASLt" in line for line in lines)
    assert all("geometric mean" in line for line in lines)


def test_resuming_measures_the_shapes_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[int, int, int]] = []

    def config_name(m: int, n: int, k: int) -> str:
        return str(gemmsmith.plan(*dense.specs((m, n, k))).config)

    def measure(m: int, n: int, k: int, *_: Any) -> dict[str, Any]:
        measured.append((m, n, k))
        return {"m": m, "n": n, "k": k, "us": 1.0, "torch_us": 1.0, "ratio": 1.0, "tflops": 1.0, "torch_tflops": 1.0,
                "config": config_name(m, n, k)}  # fmt: skip

    file = tmp_path / "rows.json"
    monkeypatch.setattr(dense, "measure", measure)
    monkeypatch.setattr(timing, "machine", dict)
    for shapes in (["1x16x16"], ["1x16x16", "2x16x16"], ["1x16x16", "2x16x16"]):
        words = [word for shape in shapes for word in ("--shape", shape)]
        monkeypatch.setattr(sys, "argv", ["dense.py", *words, "--json", str(file), "--resume"])
        dense.main()
    assert measured == [(1, 16, 16), (2, 16, 16)]
    assert [row["m"] for row in json.loads(file.read_text())["rows"]] == [1, 2]

    rows = json.loads(file.read_text())["rows"]
    rows[0]["config"] = "one that was chosen before"
    file.write_text(json.dumps({"rows": rows}))
    dense.main()
    assert measured[2:] == [(1, 16, 16)]
    assert [row["m"] for row in json.loads(file.read_text())["rows"]] == [2, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 256])
def test_a_row_has_both_ratios(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "block_seconds", lambda m: 0.05)
    row = dense.measure(m, 768, 1536, torch.bfloat16, "nt", 2, False, True)
    assert 1 <= row["lt_algorithms"] <= 32
    assert row["lt_us"] > 0
    assert row["lt_ratio"] > 0
    assert row["lt_algorithm"].startswith("algo ")
    assert "lt_us" not in dense.measure(m, 768, 1536, torch.bfloat16, "nt", 2, False, False)
