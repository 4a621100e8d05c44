"""The benchmark of PyTorch's layers, at tiny size: every case and contender, the checks, the rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from benchmarks import timing  # noqa: E402
from benchmarks.torch import layers as torch_layers  # noqa: E402

pytestmark = pytest.mark.torch


def rows(monkeypatch: pytest.MonkeyPatch, place: Path, *words: str) -> list[dict[str, Any]]:
    monkeypatch.setattr(timing, "machine", dict)  # there is no GPU to name
    monkeypatch.setattr(sys, "argv", ["torch_layers.py", "--tiny", "--json", str(place / "rows.json"), *words])
    torch_layers.main()
    return json.loads((place / "rows.json").read_text())["rows"]


def test_every_case_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows_ = rows(monkeypatch, tmp_path)
    assert {r["case"] for r in rows_} == {"host", *torch_layers.CASES}
    for r in rows_:
        if r["case"] == "host":
            assert r["us"] > 0
        else:
            assert r["theirs"] in torch_layers.THEIRS
            names = {key.removesuffix("_us") for key in r if key.endswith("_us")}
            assert {"eager", "inductor", "max_autotune", "compiled", r["ours"]} <= names
            assert r["training"] == ("reduce_overhead" in names)
            assert all(r[f"{name}_error"] < 1e-5 for name in names)
    assert len(capsys.readouterr().out.splitlines()) == len(rows_)


def test_parts_are_all_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ["labels", "labels-1", "labels-16"]
    cases = [word for name in names for word in ("--case", name)]
    rows_ = [rows(monkeypatch, tmp_path, *cases, "--part", f"{i}/2") for i in range(2)]
    assert [r["case"] for part in rows_ for r in part] == ["labels", "labels-16", "labels-1"]
    resumed = rows(monkeypatch, tmp_path, *cases, "--resume")  # the last part's file
    assert resumed[:1] == rows_[1]
    assert [r["case"] for r in resumed] == ["labels-1", "labels", "labels-16"]


def test_a_step_that_is_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(nn.Module):
        def __init__(self, dim: int, classes: int, **options: Any) -> None:
            super().__init__()
            self.head = torch_layers.Head(dim, classes)
            self.weight = self.head.weight

        def load_state_dict(self, state: Any, assign: bool) -> None:
            del self.head.weight
            self.weight = self.head.weight = nn.Parameter(state["weight"])

        def forward(self, x: Any, target: Any) -> Any:
            return 1.01 * self.head(x, target)

    monkeypatch.setattr(torch_layers.gt, "FusedLinearCrossEntropy", Wrong)
    with pytest.raises(SystemExit, match="cross-entropy: fused is off the exact step by 0.01"):
        torch_layers.measure("cross-entropy", torch_layers.CASES["cross-entropy"], True, 0, 0)


def test_peers_of_a_loss_have_its_weight() -> None:
    work = torch_layers.head(tokens=4, dim=8, classes=16)
    contenders_ = torch_layers.contenders(work, training=True, is_tiny=True)
    assert {module.weight.data_ptr() for _, module in contenders_.values()} == {work.plain.weight.data_ptr()}
