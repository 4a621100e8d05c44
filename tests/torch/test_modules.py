"""The modules against plain PyTorch with the same state dict, in float64: values and gradients."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from gemmsmith.core.errors import ArgumentError
from gemmsmith.torch import FusedLinear, FusedLinearCrossEntropy, FusedMLP

DIM, HIDDEN = 8, 16
ACTIVATIONS = {None: lambda x: x, "gelu": F.gelu, "relu": F.relu, "tanh": torch.tanh, "silu": F.silu}
GATES = {"swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu}


class PlainMLP(nn.Module):
    def __init__(self, activation: Any, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        if activation in GATES:
            self.gate = nn.Linear(DIM, HIDDEN, bias, dtype=torch.float64)
        self.up = nn.Linear(DIM, HIDDEN, bias, dtype=torch.float64)
        self.down = nn.Linear(HIDDEN, DIM, bias, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        if self.activation in GATES:
            return self.down(GATES[self.activation](self.gate(x)) * self.up(x))
        return self.down(ACTIVATIONS[self.activation](self.up(x)))


def same(fused: nn.Module, plain: Any, *inputs: Any) -> None:
    """Values and gradients, of the first input and all parameters by their names."""
    x, *others = inputs
    results = []
    for module in (fused, plain):
        own = x.clone().requires_grad_()
        y = module(own, *others)
        parameters = dict(module.named_parameters())
        torch.manual_seed(0)
        found = torch.autograd.grad(y, [own, *parameters.values()], torch.randn_like(y))
        results.append({"y": y, "x": found[0], **dict(zip(parameters, found[1:], strict=True))})
    assert list(results[0]) == list(results[1])
    for name, got in results[0].items():
        torch.testing.assert_close(got, results[1][name])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear(activation: str | None, bias: bool) -> None:
    fused = FusedLinear(DIM, HIDDEN, bias, activation, dtype=torch.float64)

    class Plain(nn.Linear):
        def forward(self, input: Any) -> Any:
            return ACTIVATIONS[activation](super().forward(input))

    plain = Plain(DIM, HIDDEN, bias, dtype=torch.float64)
    plain.load_state_dict(fused.state_dict())
    for leading in ((), (5,), (2, 3)):
        same(fused, plain, torch.randn(*leading, DIM, dtype=torch.float64))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [*GATES, "gelu", "relu"])
def test_mlp(activation: str, bias: bool) -> None:
    fused, plain = FusedMLP(DIM, HIDDEN, activation, bias, dtype=torch.float64), PlainMLP(activation, bias)
    fused.load_state_dict(plain.state_dict())
    for leading in ((5,), (2, 3)):
        same(fused, plain, torch.randn(*leading, DIM, dtype=torch.float64))


def test_a_function_as_activation() -> None:
    fused = FusedMLP(DIM, HIDDEN, lambda x: x.relu().square(), dtype=torch.float64)
    x = torch.randn(5, DIM, dtype=torch.float64)
    torch.testing.assert_close(fused(x), fused.down(fused.up(x).relu().square()))


@pytest.mark.parametrize("ignore_index", [-100, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(reduction: Any, ignore_index: int) -> None:
    fused = FusedLinearCrossEntropy(DIM, HIDDEN, ignore_index, reduction, dtype=torch.float64)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(fused.weight.detach().clone())

        def forward(self, x: Any, target: Any) -> Any:
            logits = (x @ self.weight.T).flatten(0, -2)
            loss = F.cross_entropy(logits, target.flatten(), ignore_index=ignore_index, reduction=reduction)
            return loss.reshape(target.shape) if reduction == "none" else loss

    for leading in ((20,), (2, 9), (3,)):
        target = torch.randint(HIDDEN, leading)
        target.view(-1)[0] = ignore_index
        x = torch.randn(*leading, DIM, dtype=torch.float64)
        same(fused, Plain(), x, target)
        with torch.no_grad():
            torch.testing.assert_close(fused(x, target), Plain()(x, target))


def test_a_label_that_is_no_class_makes_the_loss_nan() -> None:
    loss = FusedLinearCrossEntropy(DIM, HIDDEN)
    for label in (HIDDEN, -1):
        assert loss(torch.randn(4, DIM), torch.tensor([0, 1, label, 2])).isnan()


def test_the_gradients_of_a_loss_are_used_once() -> None:
    loss = FusedLinearCrossEntropy(DIM, HIDDEN)
    value = loss(torch.randn(4, DIM), torch.tensor([0, 1, 3, 2]))
    value.backward(retain_graph=True)
    with pytest.raises(ArgumentError, match="retain_graph: got a second backward pass"):
        value.backward()


def test_logits_are_not_stored() -> None:
    """No tensor is as large, in eval mode not even part of them."""
    rows, classes = 64, 256
    loss = FusedLinearCrossEntropy(DIM, classes, dtype=torch.float64)
    x, target = torch.randn(rows, DIM, dtype=torch.float64, requires_grad=True), torch.randint(classes, (rows,))
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            sizes.extend(y.numel() for y in torch.utils._pytree.tree_leaves(found) if isinstance(y, torch.Tensor))
            return found

    with Watch():
        loss(x, target).backward()
    assert max(sizes) == classes * max(DIM, rows // 8)
    sizes.clear()
    with Watch(), torch.no_grad():
        loss(x, target)
    assert max(sizes) == classes * DIM  # the weight's transpose


def test_a_training_step_learns() -> None:
    """A few steps of a small classifier: losses as plain PyTorch's, within rounding."""
    torch.manual_seed(0)
    x, target = torch.randn(64, DIM), torch.randint(4, (64,))

    class Model(nn.Module):
        def __init__(self, fused: bool) -> None:
            super().__init__()
            self.mlp = FusedMLP(DIM, HIDDEN) if fused else PlainMLP("swiglu", False).float()
            self.head = FusedLinearCrossEntropy(DIM, 4) if fused else nn.Linear(DIM, 4, bias=False)
            self.fused = fused

        def forward(self, x: Any, target: Any) -> Any:
            h = x + self.mlp(x)
            return self.head(h, target) if self.fused else F.cross_entropy(self.head(h), target)

    plain, fused = Model(False), Model(True)
    fused.load_state_dict(plain.state_dict())
    losses = []
    for model in (plain, fused):
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(50):
            optimiser.zero_grad()
            loss = model(x, target)
            loss.backward()
            optimiser.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < 0.7 * losses[0][0]
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-3, atol=2e-3)


def test_modules_are_pickled_and_copied() -> None:
    x = torch.randn(3, DIM)
    for module in (FusedLinear(DIM, HIDDEN, activation="gelu"), FusedMLP(DIM, HIDDEN), FusedMLP(DIM, HIDDEN, "relu")):
        for again in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
            torch.testing.assert_close(again(x), module(x), rtol=0, atol=0)


def test_refused() -> None:
    for module in (FusedLinear, FusedMLP):
        with pytest.raises(ArgumentError, match="activation: got 'relo'; use a function or one of"):
            module(8, 16, activation="relo")
    with pytest.raises(ArgumentError, match="reduction: got 'all'"):
        FusedLinearCrossEntropy(8, 16, reduction="all")
    with pytest.raises(ArgumentError, match=r"target: got shape \(3,\) of torch.int64; use integers of shape \(4,\)"):
        FusedLinearCrossEntropy(8, 16)(torch.ones(4, 8), torch.ones(3, dtype=torch.int64))
