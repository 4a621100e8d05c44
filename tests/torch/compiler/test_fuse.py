"""The pass on small graphs: values agree with torch's in float64, and the epilogues are the expected ones."""

from __future__ import annotations

import pytest
import torch
from tests.torch.compiler.passed import compiled
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gemmsmith.torch import graph_serialization
from gemmsmith.torch.compiler.fuse import fuse
from gemmsmith.torch.ops import call_op

SHAPE = M, N, K = 24, 32, 16


@pytest.fixture(autouse=True)
def _seed(rng):
    torch.manual_seed(int(rng.integers(2**31)))


def matrices(*shapes):
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def run(function, *inputs, **options):
    """Run the pass over a function and check that it agrees with torch."""
    actual, passed = compiled(function, **options)
    outputs, expected = (torch.utils._pytree.tree_leaves(f(*inputs)) for f in (actual, function))
    for x, y in zip(outputs, expected, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11, equal_nan=True)
    return passed


def ops(passed):
    """Return the operations of the only epilogue."""
    (written,) = passed.texts
    return [node.op for node in graph_serialization.deserialize(written).nodes]


def test_views_of_leading_indices_are_seen_through():
    x, w, c = matrices((2, 3, 4, K), (K, N), (2, 3, 4, N))
    passed = run(lambda x, w, c: (torch.relu((x @ w).unsqueeze(0)).squeeze(0) + c).flatten(0, 1), x, w, c)
    assert sorted(ops(passed)) == ["accumulator", "add", "operand", "relu"]


def test_operands_are_rows_columns_scalars_and_matrices():
    x, w, row, column, one, c = matrices((2, 12, K), (K, N), (N,), (2, 12, 1), (), (2, 12, N))
    passed = run(lambda x, w, r, col, one, c: (x @ w * r + col) * one - c, x, w, row, column, one, c)
    written = passed.texts[0].split(" | ")[0]
    assert [entry.split()[1] for entry in written.split("; ")] == ["n", "m", "one", "m,n"]


@pytest.mark.parametrize("shape", [(12, N), (2, 1, N), (2, 1, 1)])
def test_what_is_broadcast_over_some_rows_is_left_to_inductor(shape):
    x, w, c = matrices((2, 12, K), (K, N), shape)
    assert not run(lambda x, w, c: x @ w + c, x, w, c).fused


def test_other_reductions_and_other_views_are_left_to_inductor():
    x, w = matrices((2, 12, K), (K, N))
    assert not run(lambda x, w: (x @ w).sum(0), x, w).fused
    assert not run(lambda x, w: (x @ w).view(2, 12, 4, 8).sum(-1), x, w).fused
    assert not run(lambda x, w: torch.relu((x @ w).view(2, 12, 4, 8).transpose(1, 2)).contiguous(), x, w).fused


def test_a_producer_is_pulled_in_where_that_reads_fewer_bytes():
    a, b, z = torch.randn(M, K).bfloat16(), torch.randn(K, N).bfloat16(), torch.randn(M, N).bfloat16()
    actual, passed = compiled(lambda a, b, z: a @ b * torch.cos(z.float()).sigmoid())
    actual(a, b, z)
    (written,) = passed.texts
    assert written.startswith("x0 m,n bf16 | ")
    assert {"cos", "sigmoid"} <= {node.op for node in graph_serialization.deserialize(written).nodes}


def test_a_producer_of_more_operands_is_not():
    a, b, y, z = matrices((M, K), (K, N), (M, N), (M, N))
    passed = run(lambda a, b, y, z: (a @ b * (s := y + z), a.t() @ s), a, b, y, z)
    assert passed.texts[0].startswith("x0 m,n fp32 | accumulator; operand: x0; mul 0 1 | ")


def test_a_value_with_several_users_is_a_result_too():
    a, b, c = matrices((M, K), (K, N), (N, K))
    passed = run(lambda a, b, c: ((h := torch.relu(y := a @ b)) @ c, y, h.sum(0), h.amax(-1, keepdim=True)), a, b, c)
    assert len(graph_serialization.deserialize(passed.texts[0]).results) == 4
    assert "reduce 1: sum m; reduce 1: max n" in passed.texts[0]


def test_of_a_value_and_its_cast_one_is_stored():
    a, b, c = torch.randn(M, K).bfloat16(), torch.randn(K, N).bfloat16(), torch.randn(M, N)
    actual, passed = compiled(lambda a, b, c: ((y := (a @ b).float() + c), y.bfloat16().sum(0)))
    actual(a, b, c)
    assert passed.texts[0].endswith("add 1 2; cast 3: bf16; reduce 4: sum m | out 3 fp32; out1 5 bf16")


def test_a_value_and_its_cast_are_both_stored_where_both_have_to_be():
    a, b, c = torch.randn(M, K).bfloat16(), torch.randn(K, N).bfloat16(), torch.randn(M, N)
    actual, passed = compiled(lambda a, b, c: ((y := (a @ b).float() + c), y.bfloat16() @ a.new_ones(N, N)))
    actual(a, b, c)
    assert passed.texts[0].endswith("add 1 2 | out 3 fp32; out1 3 bf16")


def test_a_weights_gradient_in_fp32_is_stored_at_once():
    a, b = torch.randn(M, K).bfloat16(), torch.randn(K, N).bfloat16()
    actual, passed = compiled(lambda a, b: (a @ b).float())
    torch.testing.assert_close(actual(a, b), a.float() @ b.float(), rtol=1e-5, atol=1e-5)
    assert passed.texts == [" | accumulator | out 0 fp32"]


LOSSES = {
    "plain": lambda x, w, target: functional.cross_entropy((x @ w.T).float(), target),
    "in half precision": lambda x, w, target: functional.cross_entropy(x @ w.T, target),
    "with a temperature": lambda x, w, target: functional.cross_entropy((x @ w.T).float() / 0.7, target),
    "capped": lambda x, w, target: functional.cross_entropy(60 * torch.tanh((x @ w.T).float() / 60), target),
    "with a bias": lambda x, w, target: functional.cross_entropy(((x @ w.T) + w[:, 0]).float(), target),
    "computed again": lambda x, w, target: checkpoint(LOSSES["plain"], x, w, target, use_reentrant=False),
    "by hand": lambda x, w, target: ((y := x @ w.T).float().logsumexp(-1) - y.gather(-1, target[:, None])[:, 0]).mean(),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOSSES)
def test_values_are_rounded_where_eager_modes_are(name, dtype):
    """The loss and its gradient use the logits as they are stored."""
    # Multiples of 1/16, whose sums are exact in fp32 in every order, so that both round the same logits.
    x, w = (
        (torch.randn(*shape) * scale * 16).round().to(dtype) / 16 for shape, scale in (((64, 128), 2), ((256, 128), 1))
    )
    x[0], w[:, 0] = 0, 0
    x[0, 0], w[0, 0] = 1 + 2**-7, 100.5
    target = (x.double() @ w.double().T).argmax(-1)
    actual, passed = compiled(LOSSES[name])
    outputs = []
    for function in (actual, LOSSES[name]):
        inputs = [y.clone().requires_grad_() for y in (x, w)]
        value = function(*inputs, target)
        outputs.append([value.detach(), *torch.autograd.grad(value, inputs)])
    assert passed.fused or name in ("with a temperature", "capped")  # which Inductor computes
    assert outputs[0][0] >= 0
    most = 2 if name != "in half precision" else 16  # where rounded logarithms are exponentiated
    for y, expected in zip(*outputs, strict=True):
        assert (y - expected).double().norm() <= most * torch.finfo(dtype).eps * expected.double().norm()


def test_what_is_reduced_is_what_is_stored():
    """They agree in the last bit, whatever is computed between them."""
    a, b, bias = torch.randn(M, K).bfloat16(), torch.randn(K, N).bfloat16(), torch.randn(N).bfloat16()

    def function(a, b, bias):
        y = functional.silu(a @ b + bias)
        return y, y.float().sum(-1), y.float().logsumexp(-1), y.float().amax(0)

    actual, passed = compiled(function)
    y, *reduced = actual(a, b, bias)
    assert len(graph_serialization.deserialize(passed.texts[0]).results) == 4
    wants = y.float().sum(-1), y.float().logsumexp(-1), y.float().amax(0)
    for x, expected in zip(reduced, wants, strict=True):
        torch.testing.assert_close(x, expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("keepdim", [False, True])
def test_logsumexp_written_out_is_a_reduction(keepdim):
    a, b = matrices((M, K), (K, N))
    a *= 100
    passed = run(lambda a, b: (torch.log_softmax(a @ b, -1).sum(), torch.logsumexp(a @ b, -1, keepdim=keepdim)), a, b)
    assert any("logsumexp n" in written for written in passed.texts)


def test_a_logsumexp_that_no_product_takes_is_written_out_again():
    x, w = matrices((M, N), (N, N))
    passed = run(lambda x, w: torch.log_softmax(x, -1) @ w, x, w)
    assert not passed.fused
    assert not any("logsumexp" in str(node.target) for node in passed.graphs[0].nodes)


@pytest.mark.parametrize("function", [
    lambda z, s: (z - s).exp().sum(-1).log() + s, lambda z, s: (z - s).exp().sum(-1).log() + s.mT,
    lambda z, s: (z - s).exp().sum(-1).log() + s.squeeze(-1), lambda z, s: (z - s).exp().sum(-1).log() + s.double(),
    lambda z, s: (z - s.amax()).exp().sum(None, keepdim=True).log() + s.amax(),
])  # fmt: skip
def test_a_logsumexp_plus_its_shift_in_another_shape(function):
    """(m,) + (m, 1) is (m, m), and no logsumexp."""
    a, b = matrices((M, K), (K, N))
    run(lambda a, b: (y := function(a @ b, (a @ b).amax(-1, keepdim=True)), y.square().mean()), a, b)


def shifted(x, shift):
    return (x - shift).exp().sum(-1).log()


@torch.library.custom_op("gemmsmith_tests::mm", mutates_args=())
def twice_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return 2 * (a @ b)


twice_mm.register_fake(lambda a, b: a @ b)
LOOK_ALIKES = {
    "bits of a product": lambda a, b, x: (a.round().bfloat16() @ b.round().bfloat16()).view(torch.float16) * 2,
    "a wider shift": lambda a, b, x: (shifted(x.float(), m := x.amax(-1, keepdim=True)) + m.squeeze(-1), a @ b),
    "an integer that is full": lambda a, b, x: a @ b * torch.full((N,), 3.7, dtype=torch.int64),
    "a bool that is full": lambda a, b, x: a @ b * torch.full((N,), 2, dtype=torch.bool),
    "a shift that is fused": lambda a, b, x: (shifted(x, (y := a @ b).sum(-1, keepdim=True)), y),
    "a sum of what is fused": lambda a, b, x: shifted((y := a @ b).flip(-1), y.amax(-1, keepdim=True)),
    "another namespace": lambda a, b, x: torch.relu(twice_mm(a, b)),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_what_looks_like_another_operation(name):
    run(LOOK_ALIKES[name], *matrices((M, K), (K, N), (M, N)))


@pytest.mark.parametrize("shift", [lambda x: x[:, :1], lambda x: x.mean(-1, keepdim=True), lambda x: x.amax(-1, True)])
def test_the_gradient_of_a_maximum_behind_a_logsumexp(shift):
    """Backward computes the logsumexp again, with the same shift: else no element would equal the maximum."""
    (x,) = matrices((64, 32))
    x.requires_grad_()

    def function(x):
        m = shift(x)
        return (x + ((x - m).exp().sum(-1, keepdim=True).log() + m)).amax(-1).sum()

    actual, _ = compiled(function)
    torch.testing.assert_close(*(torch.autograd.grad(f(x), x)[0] for f in (actual, function)), rtol=1e-11, atol=1e-11)


def test_a_second_weight_that_is_computed_from_the_first_product():
    x, w = (torch.randn(32, 32).bfloat16() for _ in range(2))

    def function(x, w):
        y = x @ w.t()
        return y * (x @ torch.relu(y).t())

    torch.testing.assert_close(compiled(function)[0](x, w), function(x, w), rtol=2e-2, atol=0.5)


def test_a_logsumexp_alone_takes_no_maximum():
    a, b = matrices((M, K), (K, N))
    passed = run(lambda a, b: torch.logsumexp(a @ b, -1), a, b)
    assert passed.texts == [" | accumulator; reduce 0: logsumexp n | out 1 fp32"]


@pytest.mark.parametrize("value", [float("inf"), -float("inf")])
def test_a_logsumexp_of_infinities_that_is_written_out_again(value):
    x, w = matrices((M, N), (N, N))
    x[2], x[3, :4] = value, value
    run(lambda x, w: (torch.logsumexp(x, -1), x.relu() @ w), x, w)


@pytest.mark.parametrize("function", [torch.sigmoid, torch.tanh, torch.nn.functional.gelu])
def test_a_minimum_of_what_backward_recomputes(function):
    """Its gradient compares elements with it, and would be NaN if they differed in a bit."""
    x, w, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((12, 8), (16, 8), (16,)))

    def loss(x, w, b):
        y = function(torch.nn.functional.linear(x, w, b))
        return y, y.amin(0), y.mean()

    results = []
    for f in (compiled(loss)[0], loss):
        outputs = f(x, w, b)
        results.append(torch.autograd.grad([y.sum() for y in outputs], (x, w, b)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_a_maximum_is_that_of_the_values_as_they_are_stored():
    """Its gradient goes to the elements that equal it."""
    a, b = torch.randn(M, K).bfloat16(), torch.randn(K, N).bfloat16()
    actual, passed = compiled(lambda a, b: (y := ((a @ b).float() * 1.01).bfloat16(), y.float().amax(-1)))
    y, largest = actual(a, b)
    assert "cast 3: bf16; reduce 4: max n" in passed.texts[0]
    assert torch.equal(y.float().amax(-1), largest)


def test_a_maximum_of_values_that_are_not_stored_is_left_to_inductor():
    a, b = matrices((M, K), (K, N))
    passed = run(lambda a, b: ((y := a @ b), torch.sin(y).amax(-1)), a, b)
    assert not any("max" in written for written in passed.texts)


def test_gemmsmiths_own_product_is_extended():
    a, b, bias, c = matrices((M, K), (K, N), (N,), (M, N))
    nodes = "accumulator; operand: bias; operand: s; add 0 1; mul 3 2; reduce 4: sum m"
    epilogue = f"s one number; bias n fp32 | {nodes} | out 4; sums 5"

    def function(a, b, bias, c):
        y, sums = call_op(epilogue, a, b, [0.5], [bias])
        return torch.relu(y) + c, sums

    passed = run(function, a, b, bias, c)
    (written,) = passed.texts
    assert written.count("accumulator") == 1
    assert {"relu", "reduce"} <= {node.op for node in graph_serialization.deserialize(written).nodes}


def test_what_depends_on_the_product_twice_makes_no_cycle():
    a, b, w = matrices((M, K), (K, N), (N, N))
    passed = run(lambda a, b, w: (y := torch.relu(a @ b)) + torch.softmax(y @ w, -1), a, b, w)
    assert [x.operations for x in passed.fused] == [("relu",)]


def test_operands_that_are_computed_after_the_product():
    a, b, c, d = matrices((M, K), (K, N), (M, N), (N, N))

    def function(a, b, c, d):
        y = a @ b
        first = torch.relu(y)
        return first + torch.softmax(c @ d, -1).cumsum(-1), first @ d

    assert run(function, a, b, c, d).fused


def test_batched_products():
    a, b, c, row = matrices((3, M, K), (3, K, N), (3, M, N), (3, 1, N))
    passed = run(lambda a, b, c, row: torch.sigmoid(torch.bmm(a, b) + row) * c, a, b, c, row)
    assert passed.texts[0].startswith("x0 batch,n fp32; x1 batch,m,n fp32 | ")


def test_more_operands_and_results_than_an_operator_has():
    a, b, *others = matrices((M, K), (K, N), *[(M, N)] * 12)

    def function(a, b, *others):
        y, outputs = a @ b, []
        for x in others:
            y = y * x
            outputs.append(y)
        return outputs[1::3]

    run(function, a, b, *others)


@pytest.mark.parametrize("device", ["integers", "vector"])
def test_products_that_are_left_as_they_are(device):
    if device == "vector":
        a, b = matrices((M, K), (K, 1))
        assert run(lambda a, b: torch.relu(a @ b), a, b).outcomes[0].reason == "matrix-vector product"
    else:
        a, b = torch.randint(9, (M, K)), torch.randint(9, (K, N))
        assert (
            run(lambda a, b: torch.relu(a @ b), a, b).outcomes[0].reason == "unsupported operand dtypes int64 and int64"
        )


def test_integers_are_operands_where_they_become_numbers_and_are_not_compared():
    a, b = matrices((M, K), (K, N))
    labels = torch.randint(2, (M, N))
    run(lambda a, b, y: torch.relu(a @ b) * y + (y == 1), a, b, labels)


def test_any_number_of_rows_is_one_graph():
    w, bias = matrices((K, N), (N,))
    actual, passed = compiled(lambda x, w, b: functional.gelu(x @ w + b), dynamic=True)
    for rows in (7, 24, 60):
        (x,) = matrices((2, rows, K))
        torch.testing.assert_close(actual(x, w, bias), functional.gelu(x @ w + bias))
    assert len(passed.graphs) == 1
    assert passed.fused


def test_a_product_with_inf_and_nan():
    a, b = matrices((M, K), (K, N))
    a[3], a[5, 2] = float("inf"), float("nan")
    actual, _ = compiled(lambda a, b: torch.relu(a @ b).clamp(max=3))
    torch.testing.assert_close(actual(a, b), torch.relu(a @ b).clamp(max=3), equal_nan=True)


def test_fp8_is_left_to_torch():
    a, b = 100 * torch.randn(M, K).bfloat16(), torch.randn(K, N).bfloat16()
    function = lambda a, b: torch.relu(a @ b).to(torch.float8_e4m3fn)  # noqa: E731
    actual, passed = compiled(function)
    torch.testing.assert_close(actual(a, b).float(), function(a, b).float(), equal_nan=True, rtol=0, atol=0)
    assert not any("fp8" in written for written in passed.texts)


def test_a_product_with_a_dtype_of_its_own():
    a, b = torch.randn(M, K).bfloat16(), torch.randn(K, N).bfloat16()
    outcomes = []

    def function(a, b):
        graph = torch.fx.Graph()
        x, y = graph.placeholder("x"), graph.placeholder("y")
        x.meta["val"], y.meta["val"] = a, b
        made = graph.call_function(torch.ops.aten.mm.dtype, (x, y, torch.float32))
        made.meta["val"] = a.float() @ b.float()
        after = graph.call_function(torch.ops.aten.relu.default, (made,))
        after.meta["val"] = made.meta["val"].relu()
        graph.output((after,))
        outcomes.extend(fuse(graph))
        return torch.fx.GraphModule({}, graph)(a, b)[0]

    torch.testing.assert_close(function(a, b), (a.float() @ b.float()).relu())
    assert outcomes[0].operations == ("relu",)


def test_long_chains_of_operations_before_and_behind_a_product():
    a, b, c = matrices((M, K), (K, N), (M, N))

    def function(a, b, c):
        for _ in range(400):
            c = torch.sin(c)
        y = a @ b + c
        for _ in range(400):
            y = torch.sin(y)
        return y

    run(function, a, b, c)


def test_a_term_that_is_multiplied_by_0_is_not_read():
    c, a, b = matrices((M, N), (M, K), (K, N))
    c[:] = float("nan")
    assert run(lambda c, a, b: torch.relu(torch.addmm(c, a, b, beta=0, alpha=2)), c, a, b).fused


@pytest.mark.parametrize("constant", [1e300, 1e-300])
def test_numbers_that_fp32_does_not_hold_are_left_to_torch(constant):
    a, b = matrices((M, K), (K, N))
    passed = run(lambda a, b: torch.where((y := a @ b) > 0, y, constant), a, b)
    assert "in fp32" in passed.outcomes[0].reason


def test_functions_that_differ_from_numpys():
    a = torch.tensor([[float("nan"), 0], [float("inf"), 0], [1e30, 0], [-2, 0]], dtype=torch.float32)
    b = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    for function in (torch.sign, torch.sgn, lambda x: torch.hypot(x, torch.full_like(x, 1e30))):
        actual, _ = compiled(lambda a, b, f=function: f(a @ b))
        assert torch.equal(actual(a, b).nan_to_num(), function(a @ b).nan_to_num())


def test_values_that_are_not_row_major_are_left_as_they_are():
    """Other operations may depend on their strides, as views and as_strided do."""
    a, b, c = matrices((M, K), (K, N), (N, M))
    for after in (lambda y: y.as_strided((5, 7), (1, 9)), lambda y: y.t().view(-1), lambda y: y):
        actual, passed = compiled(lambda a, b, c, f=after: f(torch.relu(c.t() + a @ b)))
        outputs, expected = actual(a, b, c), after(torch.relu(c.t() + a @ b))
        torch.testing.assert_close(outputs, expected, rtol=1e-11, atol=1e-11)
        assert outputs.stride() == expected.stride()
        assert not passed.fused


@pytest.mark.parametrize("function", [lambda p, q: p + q, torch.maximum, lambda p, q: torch.where(p, q, ~q) + p * q])
def test_a_sum_of_bools_is_a_bool(function):
    x, w = matrices((M, K), (K, N))

    def choices(x, w):
        y = x @ w
        chosen = torch.where(y > 0, y > 1, y < -1)
        return function(chosen, chosen) * y + function(chosen, y < 2) * y.square()

    run(choices, x, w)
