"""The explanation of a model: a table, a picture, and nothing changed by it."""

from __future__ import annotations

import pytest
import torch
from tests.torch.compiler import models
from torch import nn
from torch.nn import functional

import gemmsmith.torch as gt


def test_what_is_fused_and_what_not_and_why(tmp_path):
    model, inputs = models.model("classifier", torch.bfloat16)
    explanation = gt.explain(model, *inputs)
    forward, backward = explanation.graphs
    assert forward[0].computed == ("add", "gelu")
    assert "mean all" in forward[1].computed
    assert [x.why for x in backward][1:] == ["it is a result of the graph"] * 2
    assert explanation.fused == [*forward, backward[0]]
    table = str(explanation)
    assert table.startswith("3 of 5 products have an epilogue; ")
    assert "24 x 48  add, gelu: " in table
    assert "models.py:" in table
    explanation.picture(tmp_path / "epilogues.png")
    assert (tmp_path / "epilogues.png").stat().st_size > 10_000


def test_nothing_is_changed():
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    gt.explain(model, torch.randn(24, 16))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_model_without_products(tmp_path):
    explanation = gt.explain(nn.ReLU(), torch.randn(4, 4))
    assert str(explanation).startswith("0 of 0 products have an epilogue")
    with pytest.raises(ValueError, match="no product has an epilogue"):
        explanation.picture(tmp_path / "none.png")


def test_a_function_with_numbers_of_rows_that_are_symbols():
    w = torch.randn(16, 32, requires_grad=True)
    x = torch.randn(24, 16)
    torch._dynamo.mark_dynamic(x, 0)
    explanation = gt.explain(lambda x, w: torch.relu(x @ w), x, w)
    assert explanation.graphs[0][0].computed == ("relu",)


WHY = {
    "view: it has the shape (2, 12, 4, 8), and the product (24, 32)": lambda x, w: (x @ w).view(2, 12, 4, 8).sum(-1),
    "cumsum reads it from memory": lambda x, w: (x @ w).cumsum(0),
    "mm reads it from memory": lambda x, w: (x @ w) @ w.t(),
    "convert_element_type: it gives torch.int8": lambda x, w: (x @ w).to(torch.int8),
    "hypot: its squares may be beyond fp32": lambda x, w: torch.hypot(x @ w, w[:1]),
    "var_mean: it gives more than one tensor": lambda x, w: functional.layer_norm(x @ w, (32,)),
    "no fewer bytes would be moved; it needs a reduction of the product": lambda x, w: (x @ w).softmax(-1),
    "it is a result of the graph": lambda x, w: x @ w,
    "it is a product with a vector": lambda x, w: torch.relu(x @ w[:, :1]),
}


@pytest.mark.parametrize("why", WHY)
def test_why_a_product_has_no_epilogue(why):
    ((outcome, *_), *_) = gt.explain(WHY[why], torch.randn(24, 16), torch.randn(16, 32)).graphs
    assert outcome.why.startswith(why)
    assert f"24 x {outcome.shape[1]}  - {why}" in str(gt.explain(WHY[why], torch.randn(24, 16), torch.randn(16, 32)))
