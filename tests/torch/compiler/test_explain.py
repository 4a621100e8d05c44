"""The explanation of a model: a table and a plot, without changes to the model."""

from __future__ import annotations

import pytest
import torch
from tests.torch.compiler import models
from torch import nn
from torch.nn import functional

import gemmsmith.torch as gt


def test_fused_and_unfused_matmuls(tmp_path):
    model, inputs = models.model("classifier", torch.bfloat16)
    explanation = gt.explain(model, *inputs)
    forward, backward = explanation.graphs
    assert forward[0].operations == ("add", "gelu")
    assert "mean all" in forward[1].operations
    assert [x.reason for x in backward][1:] == ["it is a graph output"] * 2
    assert explanation.fused == [*forward, backward[0]]
    table = str(explanation)
    assert table.startswith("3 of 5 matmuls have fused epilogues; memory traffic saved: ")
    assert "24 x 48  add, gelu: " in table
    assert "models.py:" in table
    explanation.plot(tmp_path / "epilogues.png")
    assert (tmp_path / "epilogues.png").stat().st_size > 10_000


def test_nothing_is_changed():
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    gt.explain(model, torch.randn(24, 16))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_model_without_matmuls(tmp_path):
    explanation = gt.explain(nn.ReLU(), torch.randn(4, 4))
    assert str(explanation).startswith("0 of 0 matmuls have fused epilogues")
    with pytest.raises(ValueError, match="no matmul has a fused epilogue"):
        explanation.plot(tmp_path / "none.png")


def test_a_function_with_numbers_of_rows_that_are_symbols():
    w = torch.randn(16, 32, requires_grad=True)
    x = torch.randn(24, 16)
    torch._dynamo.mark_dynamic(x, 0)
    explanation = gt.explain(lambda x, w: torch.relu(x @ w), x, w)
    assert explanation.graphs[0][0].operations == ("relu",)


REASONS = {
    "view: its shape (2, 12, 4, 8) is not the matmul's, (24, 32)": lambda x, w: (x @ w).view(2, 12, 4, 8).sum(-1),
    "cumsum is not a pointwise op or a reduction": lambda x, w: (x @ w).cumsum(0),
    "mm is not a pointwise op or a reduction": lambda x, w: (x @ w) @ w.t(),
    "convert_element_type: it returns torch.int8": lambda x, w: (x @ w).to(torch.int8),
    "hypot: its squares may overflow fp32": lambda x, w: torch.hypot(x @ w, w[:1]),
    "var_mean: it returns more than one tensor": lambda x, w: functional.layer_norm(x @ w, (32,)),
    "fusion would not reduce memory traffic; it needs a reduction over the whole matmul": lambda x, w: (x @ w).softmax(
        -1
    ),
    "it is a graph output": lambda x, w: x @ w,
    "matrix-vector product": lambda x, w: torch.relu(x @ w[:, :1]),
}


@pytest.mark.parametrize("reason", REASONS)
def test_reason_for_no_epilogue(reason):
    ((outcome, *_), *_) = gt.explain(REASONS[reason], torch.randn(24, 16), torch.randn(16, 32)).graphs
    assert outcome.reason.startswith(reason)
    assert f"24 x {outcome.shape[1]}  - {reason}" in str(
        gt.explain(REASONS[reason], torch.randn(24, 16), torch.randn(16, 32))
    )
