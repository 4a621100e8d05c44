"""The modules against plain PyTorch with the same state dict, in float64: values and gradients."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.utils import prune

from gemmsmith.core.errors import ArgumentError
from gemmsmith.torch import FusedLinear, FusedLinearCrossEntropy, FusedMLP, FusedMoE, gemm
from gemmsmith.torch import loss as losses
from gemmsmith.torch.loss import _chunk_count

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
    """Check values and gradients, of the first input and of all parameters by name."""
    x, *others = inputs
    results = []
    for module in (fused, plain):
        own = x.clone().requires_grad_()
        y = module(own, *others)
        parameters = dict(module.named_parameters())
        torch.manual_seed(0)
        grads = torch.autograd.grad(y, [own, *parameters.values()], torch.randn_like(y))
        results.append({"y": y, "x": grads[0], **dict(zip(parameters, grads[1:], strict=True))})
    assert list(results[0]) == list(results[1])
    for name, actual in results[0].items():
        torch.testing.assert_close(actual, results[1][name])


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
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", [*GATES, "gelu", "relu"])
def test_mlp(activation: str, recompute: bool, bias: bool) -> None:
    fused = FusedMLP(DIM, HIDDEN, activation, bias, dtype=torch.float64, recompute=recompute)
    plain = PlainMLP(activation, bias)
    fused.load_state_dict(plain.state_dict())
    for leading in ((), (5,), (2, 3), (0,), (2, 0)):
        same(fused, plain, torch.randn(*leading, DIM, dtype=torch.float64))


@pytest.mark.parametrize(("activation", "bias", "dtype", "products"), [
    ("swiglu", False, torch.bfloat16, 0), ("gelu", True, torch.float32, 0), ("swiglu", True, torch.float32, 1),
])  # fmt: skip
@pytest.mark.parametrize("recompute", [False, True])
def test_what_an_mlp_saves(recompute: bool, activation: str, bias: bool, dtype: Any, products: int) -> None:
    """With `recompute` its input, and gate's product if there are biases; else h and the products, too."""
    mlp, x = FusedMLP(DIM, HIDDEN, activation, bias, dtype=dtype, recompute=recompute), torch.randn(3, DIM).to(dtype)
    parameters, saved = {p.untyped_storage().data_ptr() for p in mlp.parameters()}, {}

    def pack(t: Any) -> Any:
        saved[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        mlp(x)
    shapes = sorted(tuple(t.shape) for address, t in saved.items() if address not in parameters)
    assert shapes == [(3, DIM), *[(3, HIDDEN)] * (products if recompute else 2 + (activation == "swiglu"))]


def test_a_function_as_activation() -> None:
    fused = FusedMLP(DIM, HIDDEN, lambda x: x.relu().square(), dtype=torch.float64)
    x = torch.randn(5, DIM, dtype=torch.float64)
    torch.testing.assert_close(fused(x), fused.down(fused.up(x).relu().square()))


def test_a_changed_activation_counts() -> None:
    x = torch.randn(5, DIM)
    linear, mlp = FusedLinear(DIM, HIDDEN, activation="gelu"), FusedMLP(DIM, HIDDEN, "geglu")
    linear(x), mlp(x)
    linear.activation, mlp.activation = "relu", "reglu"
    torch.testing.assert_close(linear(x), F.linear(x, linear.weight, linear.bias).relu())
    torch.testing.assert_close(mlp(x), mlp.down(mlp.gate(x).relu() * mlp.up(x)))


@pytest.mark.parametrize("make", [
    lambda: FusedLinear(DIM, HIDDEN, activation="gelu"), lambda: FusedMLP(DIM, HIDDEN, bias=True),
])  # fmt: skip
def test_autocast(make: Any) -> None:
    """Results as of nn.Linear, gradients of the parameters' dtype."""
    module, x = make(), torch.randn(5, DIM)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), module(x), rtol=2e-2, atol=2e-2)
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: Any) -> None:
    module = FusedMLP(DIM, HIDDEN, bias=True).to(dtype)
    x = torch.randn(5, DIM, dtype=dtype)
    torch.testing.assert_close(module(x).double(), module.double()(x.double()), rtol=2e-2, atol=2e-2)
    assert module.to("meta")(x.double().to("meta")).shape == x.shape


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


@pytest.mark.parametrize("rows", [0, 20])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_where_all_rows_are_ignored(reduction: Any, rows: int) -> None:
    """As F.cross_entropy: the mean of nothing is NaN, and has no gradient."""
    loss = FusedLinearCrossEntropy(DIM, HIDDEN, reduction=reduction, dtype=torch.float64)
    x, target = torch.randn(rows, DIM, dtype=torch.float64, requires_grad=True), torch.full((rows,), -100)
    actual, expected = loss(x, target), F.cross_entropy(x @ loss.weight.T, target, reduction=reduction)
    torch.testing.assert_close(actual, expected, equal_nan=True)
    with torch.no_grad():
        torch.testing.assert_close(loss(x, target), expected.detach(), equal_nan=True)
    actual.sum().backward()
    assert not x.grad.any()
    assert not loss.weight.grad.any()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_what_is_in_an_ignored_row_does_not_count(reduction: Any) -> None:
    loss = FusedLinearCrossEntropy(DIM, HIDDEN, reduction=reduction)
    x, target = torch.randn(20, DIM), torch.randint(HIDDEN, (20,))
    x[3], target[3] = float("inf"), -100
    expected = F.cross_entropy(x @ loss.weight.T, target, reduction=reduction)
    torch.testing.assert_close(loss(x, target), expected)
    with torch.no_grad():
        torch.testing.assert_close(loss(x, target), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_of_half_precision_is_fp32(dtype: Any) -> None:
    """It can be multiplied by a factor beyond fp16's range, as a gradient scaler does."""
    loss = FusedLinearCrossEntropy(DIM, HIDDEN, dtype=dtype)
    x, target = torch.randn(200, DIM, dtype=dtype, requires_grad=True), torch.randint(HIDDEN, (200,)).int()
    value = loss(x, target)
    (value * 2**17).backward()
    exact, weight = (y.detach().double().requires_grad_() for y in (x, loss.weight))
    expected = F.cross_entropy(exact @ weight.T, target.long())
    (expected * 2**17).backward()
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=0)
    for actual, right in ((x.grad, exact.grad), (loss.weight.grad, weight.grad)):
        assert (actual.double() - right).norm() < 2e-2 * right.norm()


def test_the_gradients_of_a_mean_stay_in_fp16_where_those_of_the_sum_do_not() -> None:
    loss = FusedLinearCrossEntropy(8, 4, dtype=torch.float16)
    least_likely = int(loss.weight.sum(1).argmin())  # whatever the weights: its gradient is at least 3/4 of x
    x, target = (8 + torch.randn(12_000, 8)).half(), torch.full((12_000,), least_likely)
    loss(x, target).backward()
    weight = loss.weight.detach().double().requires_grad_()
    F.cross_entropy(x.double() @ weight.mT, target).backward()
    assert weight.grad.abs().max() * len(x) > torch.finfo(torch.float16).max
    torch.testing.assert_close(loss.weight.grad.double(), weight.grad, rtol=5e-3, atol=5e-3)


def test_a_label_that_is_no_class_makes_the_loss_nan() -> None:
    loss = FusedLinearCrossEntropy(DIM, HIDDEN)
    for label in (HIDDEN, -1):
        assert loss(torch.randn(4, DIM), torch.tensor([0, 1, label, 2])).isnan()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_several_backward_passes(reduction: Any) -> None:
    """Gradients add up, and a saved gradient does not change with the next."""
    loss = FusedLinearCrossEntropy(DIM, HIDDEN, reduction=reduction, dtype=torch.float64)
    x, target = torch.randn(20, DIM, dtype=torch.float64, requires_grad=True), torch.randint(HIDDEN, (20,))
    exact, weight = (y.detach().clone().requires_grad_() for y in (x, loss.weight))
    value, expected = loss(x, target), F.cross_entropy(exact @ weight.T, target, reduction=reduction)
    for factor, keep in ((3.0, True), (-0.5, True), (2.0, False)):
        before = [y.grad if y.grad is None else y.grad.clone() for y in (x, loss.weight)]
        separate_grads = torch.autograd.grad(value, (x, loss.weight), torch.full_like(value, factor), retain_graph=True)
        copies = [y.clone() for y in separate_grads]
        value.backward(torch.full_like(value, factor), retain_graph=keep)
        expected.backward(torch.full_like(expected, factor), retain_graph=keep)
        for y, right, old, grads, copy_ in zip(
            (x, loss.weight), (exact, weight), before, separate_grads, copies, strict=True
        ):
            torch.testing.assert_close(y.grad, right.grad)
            torch.testing.assert_close(grads, right.grad - (0 if old is None else old))
            assert torch.equal(grads, copy_)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_what_is_frozen_has_no_gradient_computed(frozen: str) -> None:
    loss = FusedLinearCrossEntropy(DIM, HIDDEN, chunks=3, dtype=torch.float64)
    x, target = torch.randn(20, DIM, dtype=torch.float64), torch.randint(HIDDEN, (20,))
    x.requires_grad_(frozen != "x")
    loss.weight.requires_grad_(frozen != "weight")
    called: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.extend([str(func)] * ("gemmsmith" in str(func)))
            return func(*args, **(kwargs or {}))

    with Watch():
        loss(x, target).backward()
    scaled = frozen == "weight"  # the gradient of the first chunks' x, by that of the loss
    assert len(called) == 3 * 3 + scaled  # of each chunk the logits, their gradient, and one product of that
    trained = loss.weight if frozen == "x" else x
    assert (x if frozen == "x" else loss.weight).grad is None
    exact = trained.detach().clone().requires_grad_()
    F.cross_entropy((x.detach() @ exact.T) if frozen == "x" else (exact @ loss.weight.T), target).backward()
    torch.testing.assert_close(trained.grad, exact.grad)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_that_is_zero_has_no_gradient(reduction: Any) -> None:
    """Even if bf16 cannot represent the logit of the right class."""
    loss = FusedLinearCrossEntropy(1, 2, reduction=reduction, dtype=torch.bfloat16)
    loss.weight.data[:] = torch.tensor([[100.5], [0.0]])
    value = loss(torch.tensor([[1 + 2**-7]], dtype=torch.bfloat16), torch.tensor([0]))
    value.sum().backward()
    assert not value.any()
    assert not loss.weight.grad.any()


@pytest.mark.parametrize("size", [5, 20, 50])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_a_model_that_is_sure(dtype: Any, size: int) -> None:
    """They have the rounding errors of the results; torch's also have those of the logits."""
    x, loss = (torch.randn(64, 128) * size / 128**0.5).to(dtype), FusedLinearCrossEntropy(128, 200, dtype=dtype)
    loss.weight.data[:] = torch.randn(200, 128)
    exact, weight = (y.detach().double().requires_grad_() for y in (x, loss.weight))
    target = (exact @ weight.T).argmax(-1)
    F.cross_entropy(exact @ weight.T, target).backward()
    fused = x.clone().requires_grad_()
    loss(fused, target).backward()
    for actual, right in ((fused.grad, exact.grad), (loss.weight.grad, weight.grad)):
        assert (actual.double() - right).norm() < 2 * torch.finfo(dtype).eps * right.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weights_gradient_is_rounded_once(dtype: Any) -> None:
    """For any number of chunks."""
    x, target = (torch.randn(600, 16) * 0.1 + 1).to(dtype), torch.zeros(600, dtype=torch.long)
    weight = (torch.randn(32, 16) * 0.1).to(dtype)
    exact = weight.double().requires_grad_()
    F.cross_entropy(x.double() @ exact.T, target, reduction="sum").backward()
    for chunks in (1, 8, 600):
        loss = FusedLinearCrossEntropy(16, 32, reduction="sum", chunks=chunks, dtype=dtype)
        loss.weight.data[:] = weight
        loss(x, target).backward()
        assert (loss.weight.grad.double() - exact.grad).norm() < torch.finfo(dtype).eps * exact.grad.norm()


@pytest.mark.parametrize("size", [1, 20, 50])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_low_memory(dtype: Any, size: int) -> None:
    """Their errors are those of 8 sums and of logits in fp16, which err less than torch's in bf16."""
    x, target = (torch.randn(256, 128) * size / 128**0.5).to(dtype).requires_grad_(), torch.randint(200, (256,))
    loss = FusedLinearCrossEntropy(128, 200, low_memory=True, dtype=dtype)
    loss.weight.data[:] = torch.randn(200, 128)
    gradients = torch.autograd.grad(loss(x, target), (x, loss.weight))
    of_torch = torch.autograd.grad(F.cross_entropy((x @ loss.weight.T).float(), target), (x, loss.weight))
    exact, weight = (y.detach().double().requires_grad_() for y in (x, loss.weight))
    logits = exact @ weight.T
    rights = torch.autograd.grad(F.cross_entropy(logits, target), (exact, weight))
    of_a_logit = float(logits.abs().max()) * 2**-11
    for actual, other, right in zip(gradients, of_torch, rights, strict=True):
        error, others = ((y.double() - right).norm() / right.norm() for y in (actual, other))
        assert error < 2 * torch.finfo(dtype).eps + of_a_logit
        if dtype == torch.bfloat16 and size > 1 and right is rights[0]:
            assert error < others / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_low_memory_rounds_nothing_of_wide_dtypes(dtype: Any) -> None:
    x, target = torch.randn(40, DIM, dtype=dtype, requires_grad=True), torch.randint(HIDDEN, (40,))
    loss, lean = (FusedLinearCrossEntropy(DIM, HIDDEN, low_memory=low, dtype=dtype) for low in (False, True))
    lean.load_state_dict(loss.state_dict())
    expected, actual = (torch.autograd.grad(f(x, target), (x, f.weight)) for f in (loss, lean))
    for y, right in zip(actual, expected, strict=True):
        assert torch.equal(y, right)


@pytest.mark.parametrize("frozen", [False, True])
def test_low_memory_allocates_one_chunk_beside_the_gradients(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "sees_operators", lambda: False)  # as on a GPU
    monkeypatch.setattr(losses, "runs_kernels", lambda x: True)
    rows, classes, dim = 64, 256, 32
    loss = FusedLinearCrossEntropy(dim, classes, chunks=8, low_memory=True, dtype=torch.bfloat16)
    loss.weight.requires_grad_(not frozen)
    x, target = torch.randn(rows, dim, dtype=torch.bfloat16, requires_grad=True), torch.randint(classes, (rows,))
    stored: set[Any] = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            results = func(*args, **(kwargs or {}))
            if "gemmsmith" in str(func):
                for y in torch.utils._pytree.tree_leaves(results):
                    stored.add((tuple(y.shape), y.dtype))
            return results

    with Watch():
        loss(x, target).backward()
    of_weight = set() if frozen else {((classes, dim), torch.bfloat16)}
    chunk = rows // loss.chunks
    assert {y for y in stored if y[0][-1] > 1} == of_weight | {
        ((chunk, classes), torch.float16), ((chunk, dim), torch.bfloat16)
    }  # fmt: skip


@pytest.mark.parametrize("itemsize", [2, 4])
def test_chunks_never_take_more_memory_than_all_logits(itemsize: int) -> None:
    for rows, dim in zip(random.choices(range(200_000), k=500), random.choices(range(64, 20_000), k=500), strict=True):
        count = _chunk_count(rows, dim, itemsize, 0, low_memory=False)
        of_logits = -(-rows // count) * itemsize  # bytes for each class
        assert of_logits + (4 * dim if count > 1 else 0) <= max(rows, 1) * itemsize
        assert count == 1 or rows // count >= 4096
        lean = _chunk_count(rows, dim, itemsize, 0, low_memory=True)
        assert lean == 1 or rows // lean >= 512
        assert rows < 2048 or -(-rows // lean) <= max(0.3 * rows, 1)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_class_that_is_switched_off(dtype: Any, reduction: Any) -> None:
    """A logit of -inf in another column than the label's has the probability 0, and no gradient."""
    loss = FusedLinearCrossEntropy(2, 3, reduction=reduction, dtype=dtype)
    loss.weight.data[:] = torch.tensor([[1.0, 0.25], [0.5, 0.125], [-float("inf"), 0]])
    x, target = torch.tensor([[1.0, 1.0], [2.0, 0.5]], dtype=dtype), torch.tensor([0, 1])
    value = loss(x, target)
    value.sum().backward()
    weight = loss.weight.detach()[:2].double().requires_grad_()
    right = F.cross_entropy(x.double() @ weight.mT, target, reduction=reduction)
    right.sum().backward()
    torch.testing.assert_close(value.double(), right, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss.weight.grad[:2].double(), weight.grad, rtol=2e-2, atol=1e-2)
    assert not loss.weight.grad[2].any()
    loss.weight.data[0] = -float("inf")  # the label's own
    assert loss(x, target).sum() == float("inf")


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
def test_operators_of_the_loss_pass_opcheck(needed: Any, chunks: int, low_memory: bool) -> None:
    x, weight = torch.randn(7, DIM).bfloat16(), torch.randn(HIDDEN, DIM).bfloat16()
    labels, ops = torch.randint(HIDDEN, (7, 1)), torch.ops.gemmsmith
    arguments = x, weight, labels, torch.rand(7, 1), chunks, low_memory, *needed
    torch.library.opcheck(ops.cross_entropy.default, arguments)
    _, *gradients = ops.cross_entropy(*arguments)
    torch.library.opcheck(ops.cross_entropy_backward.default, (x, weight, *gradients, torch.tensor(2.0), *needed))


def test_logits_are_not_stored() -> None:
    """No tensor is as large; in eval mode not even a chunk of them is stored."""
    rows, classes = 64, 256
    loss = FusedLinearCrossEntropy(DIM, classes, chunks=8, dtype=torch.float64)
    x, target = torch.randn(rows, DIM, dtype=torch.float64, requires_grad=True), torch.randint(classes, (rows,))
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            grads = func(*args, **(kwargs or {}))
            sizes.extend(y.numel() for y in torch.utils._pytree.tree_leaves(grads) if isinstance(y, torch.Tensor))
            return grads

    with Watch():
        loss(x, target).backward()
    assert max(sizes) == classes * max(DIM, rows // 8)
    sizes.clear()
    with Watch(), torch.no_grad():
        loss(x, target)
    assert max(sizes) == classes * DIM  # the weight's transpose


def test_a_training_step_learns() -> None:
    """The losses of a few steps of a small classifier agree with plain PyTorch's, within rounding."""
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
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(50):
            optimizer.zero_grad()
            loss = model(x, target)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < 0.7 * losses[0][0]
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-3, atol=2e-3)


class Adapted(nn.Linear):
    """A layer by which torchao's convert_to_float8_training replaces a plain one."""

    def forward(self, input: Any) -> Any:
        return super().forward(input) + 1


class Lora(nn.Module):
    """A layer by which peft wraps a plain one."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer

    def forward(self, x: Any) -> Any:
        return self.base_layer(x) + 1


def adapted(layer: nn.Linear) -> nn.Linear:
    new = Adapted(layer.in_features, layer.out_features, layer.bias is not None)
    new.weight, new.bias = layer.weight, layer.bias
    return new


@pytest.mark.parametrize("replace", [adapted, Lora])
def test_what_replaces_linear_layers(replace: Any) -> None:
    """It finds none in a FusedLinear, and a FusedMLP calls the layers that it puts in place of its own."""
    model, x = nn.Sequential(FusedLinear(DIM, DIM, activation="relu"), FusedMLP(DIM, HIDDEN)), torch.randn(3, DIM)
    expected, mlp = model[0](x), model[1]
    layers = mlp.gate, mlp.up, mlp.down
    for parent in [*model.modules()]:
        for name, layer in [*parent.named_children()]:
            if isinstance(layer, nn.Linear):
                setattr(parent, name, replace(layer))
    assert isinstance(model[0], FusedLinear)
    torch.testing.assert_close(model[0](x), expected, rtol=0, atol=0)
    gate, up, down = (lambda z, layer=layer: layer(z) + 1 for layer in layers)
    torch.testing.assert_close(mlp(x), down(F.silu(gate(x)) * up(x)))


@pytest.mark.parametrize("bias", [False, True])
def test_a_fused_linear_has_what_a_plain_one_has(bias: bool) -> None:
    fused, plain = FusedLinear(DIM, HIDDEN, bias, "relu"), nn.Linear(DIM, HIDDEN, bias)
    assert not isinstance(fused, nn.Linear)
    assert [*fused.state_dict()] == [*plain.state_dict()] == [name for name, _ in fused.named_parameters()]
    assert (fused.in_features, fused.out_features) == (DIM, HIDDEN)
    assert (fused.bias is None) == (not bias)
    for one, other in ((fused, plain), (plain, fused)):
        one.load_state_dict(other.state_dict(), strict=True)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        fused.load_state_dict({**plain.state_dict(), "other": torch.ones(1)})
    on_meta = FusedLinear(DIM, HIDDEN, bias, device="meta").to_empty(device="cpu")
    for layer in (on_meta, plain):
        torch.manual_seed(0)
        layer.reset_parameters()
    for actual, expected in zip(on_meta.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_a_batch_norm_is_folded_into_a_layer_without_an_activation() -> None:
    linear, norm, x = FusedLinear(DIM, HIDDEN).eval(), nn.BatchNorm1d(HIDDEN), torch.randn(3, DIM)
    norm(torch.randn(20, HIDDEN) + 3)
    folded = nn.utils.fusion.fuse_linear_bn_eval(linear, norm.eval())
    assert isinstance(folded, FusedLinear)
    torch.testing.assert_close(folded(x), norm(linear(x)))
    activated = FusedLinear(DIM, HIDDEN, activation="relu").eval()
    with pytest.raises(ArgumentError, match="linear: got a FusedLinear with the activation 'relu'"):
        nn.utils.fusion.fuse_linear_bn_eval(activated, norm)
    for copied in (copy.deepcopy(activated), copy.copy(activated), pickle.loads(pickle.dumps(activated))):
        torch.testing.assert_close(copied(x), activated(x))


def plain_mlp_of(fused: FusedMLP) -> PlainMLP:
    plain = PlainMLP(fused.activation, fused.up.bias is not None)
    plain.load_state_dict(fused.state_dict())
    return plain


def add_own_forward(layer: Any) -> None:
    layer.forward = lambda x: nn.Linear.forward(layer, x) * 2


HOOKS = {
    "pre": lambda layer: layer.register_forward_pre_hook(lambda _, inputs: 2 * inputs[0]),
    "pre with kwargs": lambda layer: layer.register_forward_pre_hook(
        lambda _, inputs, named: ((2 * inputs[0],), named), with_kwargs=True
    ),
    "after": lambda layer: layer.register_forward_hook(lambda _, inputs, y: y + inputs[0].sum()),
    "backward": lambda layer: layer.register_full_backward_hook(lambda _, grads, of_outputs: (3 * grads[0],)),
    "before backward": lambda layer: layer.register_full_backward_pre_hook(lambda _, grads: (3 * grads[0],)),
    "own forward": add_own_forward,
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "prune": lambda layer: prune.ln_structured(layer, "weight", 0.5, 1, 0),
    "prune bias": lambda layer: prune.l1_unstructured(layer, "bias", 0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_hooks_and_forwards_of_layers_are_called(activation: str, name: str) -> None:
    fused = FusedMLP(DIM, HIDDEN, activation, bias=True, dtype=torch.float64)
    for layer in ("gate", "up", "down") if activation == "swiglu" else ("up", "down"):
        hooked = copy.deepcopy(fused)
        plain = plain_mlp_of(fused)
        for mlp in (hooked, plain):
            HOOKS[name](getattr(mlp, layer))
        same(hooked, plain, torch.randn(2, 3, DIM, dtype=torch.float64))


@pytest.mark.parametrize("name", ["pre", "after", "backward", "before backward", "own forward"])
def test_hooks_of_an_activation_are_called(name: str) -> None:
    x = torch.randn(3, DIM, dtype=torch.float64)
    activation = nn.GELU()
    if name == "own forward":
        activation.forward = lambda x: 2 * F.gelu(x)  # type: ignore[method-assign]
    else:
        HOOKS[name](activation)
    layer = FusedLinear(DIM, HIDDEN, activation=activation, dtype=torch.float64)
    mlp = FusedMLP(DIM, HIDDEN, activation, dtype=torch.float64)  # type: ignore[arg-type]
    for fused, plain in (
        (layer, lambda x: activation(F.linear(x, layer.weight, layer.bias))),
        (mlp, lambda x: mlp.down(activation(mlp.up(x)))),
    ):
        results = []
        for function in (fused, plain):
            own = x.clone().requires_grad_()
            y = function(own)
            results.append((y, *torch.autograd.grad(y.sin().sum(), own)))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_last_layer_of_another_dtype_is_refused(activation: str, requires_grad: bool) -> None:
    mlp = FusedMLP(DIM, HIDDEN, activation, dtype=torch.bfloat16)  # type: ignore[arg-type]
    mlp.down.float()
    with pytest.raises(ArgumentError, match="weight2: got torch.float32 with a first result of torch.bfloat16"):
        mlp(torch.randn(3, DIM, dtype=torch.bfloat16, requires_grad=requires_grad))


def test_hooks_and_forwards_of_layers_are_compiled() -> None:
    """A forward that is set later, too, but no later hook: Dynamo does not guard these (skip_nnmodule_hook_guards)."""
    mlp, x = FusedMLP(DIM, HIDDEN), torch.randn(3, DIM)
    compiled, expected = torch.compile(mlp, backend="aot_eager", fullgraph=True), mlp(x)
    torch.testing.assert_close(compiled(x), expected)
    add_own_forward(mlp.down)
    torch.testing.assert_close(compiled(x), 2 * expected)
    torch.compiler.reset()
    HOOKS["pre"](mlp.down)
    torch.testing.assert_close(compiled(x), 4 * expected)


def test_layers_without_hooks_are_not_called(monkeypatch: Any) -> None:
    """A parametrization, as weight_norm's, is no hook."""
    mlp, x = FusedMLP(DIM, HIDDEN), torch.randn(3, DIM)
    nn.utils.parametrizations.weight_norm(mlp.gate)
    monkeypatch.setattr(nn.Linear, "__call__", None)
    mlp(x).sum().backward()


class QuantizedWeight(torch.Tensor):
    """An int8 weight with a scale, of which only the product with it is implemented, as torchao's are."""

    @staticmethod
    def __new__(cls, values: Any, scale: float) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values: Any, scale: float) -> None:
        self.values_, self.scale = values, scale

    def __tensor_flatten__(self) -> Any:
        return ["values_"], self.scale

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, scale: float, *_: Any) -> Any:
        return cls(inner["values_"], scale)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.values_.float() * weight.scale, *bias)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values_, args[0].scale)
        raise NotImplementedError(func)


@pytest.mark.parametrize("make", [
    lambda: FusedLinear(DIM, HIDDEN, activation="gelu_tanh"), lambda: FusedMLP(DIM, HIDDEN),
    lambda: FusedMLP(DIM, HIDDEN, "gelu_tanh", bias=True),
])  # fmt: skip
def test_quantized_weights(make: Any) -> None:
    fused, x = make(), torch.randn(3, DIM)
    plain = copy.deepcopy(fused)
    for layer, other in zip(fused.modules(), plain.modules(), strict=True):
        if "weight" in layer._parameters:
            values = (layer.weight.detach() * 200).round().to(torch.int8)
            layer.weight = nn.Parameter(QuantizedWeight(values, 1 / 200), requires_grad=False)
            other.weight = nn.Parameter(values / 200)
    torch.testing.assert_close(fused(x), plain(x))
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(fused, backend="eager", fullgraph=True)(x), plain(x))


@pytest.mark.parametrize("make", [lambda: FusedMLP(DIM, HIDDEN, bias=True), lambda: FusedLinearCrossEntropy(DIM, 4)])
def test_reset_parameters(make: Any) -> None:
    """As nn.Linear's are, after to_empty."""
    torch.manual_seed(0)
    expected = make()
    with torch.device("meta"):
        module = make()
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    module.reset_parameters()
    for x, y in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("make", [
    lambda dtype: FusedLinear(DIM, HIDDEN, dtype=dtype),
    lambda dtype: FusedMLP(DIM, HIDDEN, dtype=dtype),
    lambda dtype: FusedMLP(DIM, HIDDEN, "gelu", bias=True, dtype=dtype),
    lambda dtype: FusedMoE(DIM, HIDDEN, 4, 2, shared_hidden=HIDDEN, dtype=dtype),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_modules_on_meta(make: Any, dtype: Any) -> None:
    """They have shapes; weights on meta with an input that is not are refused."""
    x = torch.randn(6, DIM, dtype=dtype)
    with torch.device("meta"):
        module = make(dtype)
    y, expected = module(x.to("meta")), make(dtype)(x)
    assert (y.is_meta, y.shape, y.dtype) == (True, expected.shape, expected.dtype)
    if not isinstance(module, FusedMoE):
        with pytest.raises(ArgumentError, match="input: got a tensor on cpu with a weight on meta; use one device"):
            module(x)
    parts = {FusedMoE: "experts", FusedMLP: "down"}
    if type(module) in parts:
        module = make(dtype)
        getattr(module, parts[type(module)]).to("meta")
        for is_recorded in (False, True):
            message = "got a tensor on (meta with .* on cpu|cpu with a weight on meta); use one device"
            with torch.set_grad_enabled(is_recorded), pytest.raises(ArgumentError, match=message):
                module(x)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_loss_refuses_a_weight_on_another_device(reduction: Any, is_recorded: bool) -> None:
    loss = FusedLinearCrossEntropy(DIM, HIDDEN, reduction=reduction, device="meta", dtype=torch.bfloat16)
    x = torch.randn(3, DIM, dtype=torch.bfloat16, requires_grad=is_recorded)
    with pytest.raises(ArgumentError, match="input: got a tensor on cpu with a weight on meta; use one device"):
        loss(x, torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout: Any) -> None:
    x = torch.nested.nested_tensor([torch.randn(3, DIM), torch.randn(5, DIM)], layout=layout)
    weight, target = torch.randn(DIM, HIDDEN), torch.zeros(2, 3, dtype=torch.int64)
    labels = torch.nested.nested_tensor([target[0], target[1]], layout=layout)
    loss = FusedLinearCrossEntropy(DIM, HIDDEN)
    for name, call in {
        "input": lambda: FusedLinear(DIM, HIDDEN)(x),
        "input ": lambda: FusedMLP(DIM, HIDDEN)(x),
        "input  ": lambda: FusedMLP(DIM, HIDDEN, dtype=torch.bfloat16)(x.bfloat16()),
        "input   ": lambda: loss(x, labels),
        "target": lambda: loss(torch.randn(2, 3, DIM), labels),
        "a": lambda: gemm(x, weight),
        "b": lambda: gemm(weight.T, (x, x)),
    }.items():
        with pytest.raises(ArgumentError, match=f"^{name.strip()}: got a nested tensor; use a dense one"):
            call()


def test_modules_are_pickled_and_copied() -> None:
    x = torch.randn(3, DIM)
    for module in (FusedLinear(DIM, HIDDEN, activation="gelu"), FusedMLP(DIM, HIDDEN), FusedMLP(DIM, HIDDEN, "relu")):
        for again in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
            torch.testing.assert_close(again(x), module(x), rtol=0, atol=0)


def test_refused() -> None:
    for module in (FusedLinear, FusedMLP):
        with pytest.raises(ArgumentError, match="activation: got 'relo'; use a function or one of"):
            module(8, 16, activation="relo")
    with pytest.raises(ArgumentError, match=r"activation: got 'swiglu'; .* softplus$"):
        FusedLinear(8, 16, activation="swiglu")
    with pytest.raises(ArgumentError, match="activation: got the class GELU; use an instance of it"):
        FusedMLP(8, 16, activation=nn.GELU)
    for module in (FusedLinear(8, 16), FusedMLP(8, 16), lambda x: FusedLinearCrossEntropy(8, 16)(x, torch.ones(4))):
        for x, message in (
            ([1.0] * 8, "input: got list; use a tensor"),
            (torch.ones(4, 7), r"input: got shape \(4, 7\); use \(..., 8\)"),
            (torch.tensor(1.0), r"input: got shape \(\); use \(..., 8\)"),
            (torch.ones(4, 8).bfloat16(), "input: got torch.bfloat16 with a weight of torch.float32; use the same"),
        ):
            with pytest.raises(ArgumentError, match=message):
                module(x)
    for make in (lambda: FusedLinear(8, 16, "relu"), lambda: FusedMLP(8, 16, "relu", None)):  # what is the activation?
        with pytest.raises(ArgumentError, match=r"bias: got ('relu'|None); use True or False"):
            make()
    for index in (None, 1.5, True, "-100"):
        with pytest.raises(ArgumentError, match=f"ignore_index: got {index!r}; use an integer"):
            FusedLinearCrossEntropy(8, 16, ignore_index=index)
    for chunks in (0, 2.5):
        with pytest.raises(ArgumentError, match=f"chunks: got {chunks}; use an integer from 1 on"):
            FusedLinearCrossEntropy(8, 16, chunks=chunks)
    for target, message in (
        ([0] * 4, "target: got list; use a tensor"),
        (torch.ones(4), r"target: got shape \(4,\) of torch.float32; use integers"),
        (torch.ones(4).bool(), r"target: got shape \(4,\) of torch.bool; use integers"),
    ):
        with pytest.raises(ArgumentError, match=message):
            FusedLinearCrossEntropy(8, 16)(torch.ones(4, 8), target)
    with pytest.raises(ArgumentError, match="reduction: got 'all'"):
        FusedLinearCrossEntropy(8, 16, reduction="all")
    with pytest.raises(ArgumentError, match=r"target: got shape \(3,\) of torch.int64; use integers of shape \(4,\)"):
        FusedLinearCrossEntropy(8, 16)(torch.ones(4, 8), torch.ones(3, dtype=torch.int64))
