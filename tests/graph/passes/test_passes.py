"""Every pass keeps the meaning, changes nothing the second time, and does what it is for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.epilogue.graphs import M, N, data, graphs

from gemmsmith.backends.reference.epilogue import execute
from gemmsmith.core.dtypes import BF16
from gemmsmith.core.graph import OPERATIONS, BroadcastDims, EpilogueGraph
from gemmsmith.graph.frontend.tracer import trace
from gemmsmith.graph.passes import FINAL_PASSES, PASSES, optimize, trace_passes

KINDS = {
    "x": (BroadcastDims(rows_per_value=1, columns_per_value=1), BF16),
    "row": (BroadcastDims(columns_per_value=1), BF16),
    "s": (BroadcastDims(), None),
}


def ops(graph: EpilogueGraph) -> list[str]:
    """The names of the computed nodes, sorted."""
    return sorted(n.op for n in graph.nodes if n.op not in ("accumulator", "operand", "constant"))


def traced(function, *names: str) -> EpilogueGraph:
    return trace(function, (M, N), {name: KINDS[name] for name in names})


def same(before: EpilogueGraph, after: EpilogueGraph) -> None:
    rng = np.random.default_rng()
    product, operands = rng.standard_normal((M, N)), data(rng, before)
    want, got = (execute(g, product, operands) for g in (before, after))
    for r in before.results:
        np.testing.assert_allclose(got[r.name], want[r.name], rtol=1e-9, atol=1e-9, err_msg=r.name)


@settings(max_examples=150, deadline=None)
@given(graph=graphs())
def test_all_passes_keep_the_meaning(graph: EpilogueGraph) -> None:
    done = optimize(graph)
    same(graph, done)
    assert optimize(done) == done
    assert len(done.nodes) <= len(graph.nodes) + 4


@pytest.mark.parametrize(("name", "step"), [*PASSES, *FINAL_PASSES], ids=lambda x: x if isinstance(x, str) else "")
@settings(max_examples=40, deadline=None)
@given(graph=graphs(), seed=st.integers(0, 3))
def test_each_pass_keeps_the_meaning(name: str, step, graph: EpilogueGraph, seed: int) -> None:
    after = step(graph)
    same(graph, after)
    if name not in ("fuse", "fission"):  # one of their patterns may uncover another
        assert step(after) == after


@pytest.mark.parametrize(("function", "want"), [
    (lambda acc: (acc + 0) * 1, []),
    (lambda acc: acc * -1, ["neg"]),
    (lambda acc: -(0 - acc), []),
    (lambda acc: -acc * -1, []),
    (lambda acc: (-acc).pow(1).abs(), ["abs"]),
    (lambda acc: acc / 4, ["mul"]),
    (lambda acc: acc / 3, ["div"]),
    (lambda acc: acc ** 2, ["mul"]),
    (lambda acc: acc.abs().abs().relu(), ["abs"]),
    (lambda acc: acc * (2 * 3 - 5), []),
    (lambda acc: acc * 0, ["mul"]),
    (lambda acc: acc - acc, ["sub"]),
    (lambda acc: (acc.exp() + acc.exp()), ["add", "exp"]),
    (lambda acc: (acc + 1).exp() * (1 + acc).exp(), ["add", "exp", "mul"]),
    (lambda acc: acc * acc.sigmoid(), ["silu"]),
    (lambda acc: acc / (1 + (-acc).exp()), ["silu"]),
    (lambda acc: 1 / (1 + (-acc).exp()), ["sigmoid"]),
    (lambda acc: acc * acc.softplus().tanh(), ["mish"]),
    (lambda acc: 0.5 * acc * (1 + (acc / 2**0.5).erf()), ["gelu"]),
    (lambda acc: 0.5 * acc * (1 + ((2 / np.pi) ** 0.5 * (acc + 0.044715 * acc**3)).tanh()), ["gelu_tanh"]),
    (lambda acc: 0.5 * acc * (1 + ((2 / np.pi) ** 0.5 * acc * (1 + 0.044715 * acc * acc)).tanh()), ["gelu_tanh"]),
    (lambda acc: 1 / acc.sqrt(), ["rsqrt"]),
    (lambda acc: acc - acc * 0.5 + acc, ["add", "fma"]),
    (lambda acc: acc.clamp(min=0), ["relu"]),
    (lambda acc: np.where(acc > 0, 2, 2).sum(-1), ["reduce"]),
    (lambda acc: acc.relu().abs().max(-1), ["reduce", "relu"]),
    (lambda acc: (1 + acc).log(), ["log1p"]),
    (lambda acc: acc.exp() - 1, ["expm1"]),
    (lambda acc: acc * 2 + 1, ["fma"]),
    (lambda acc: 1 - acc * 2, ["fma"]),
    (lambda acc: acc.sigmoid().log(), ["neg", "neg", "softplus"]),
    (lambda acc: 0.5 + 0.5 * (acc * 0.5**0.5).erf(), ["ndtr"]),
    (lambda acc: 0.5 * ((acc / 2**0.5).erf() + 1), ["ndtr"]),
    (lambda acc: acc * (0.5 + 0.5 * (acc * 0.5**0.5).erf()), ["gelu"]),
])  # fmt: skip
def test_what_becomes_of(function, want: list[str]) -> None:
    graph = traced(function)
    done = optimize(graph)
    assert ops(done) == sorted(want)
    same(graph, done) if "log" not in ops(graph) else None


@pytest.mark.parametrize(("function", "want"), [
    (lambda x: (x.softplus(), x.sigmoid()), ["sigmoid", "softplus_of_sigmoid"]),
    (lambda x: (x.softplus(), (-x).sigmoid()), ["neg", "sigmoid", "softplus_of_sigmoid"]),
    (lambda x: (x.sigmoid(), (-x).softplus()), ["neg", "sigmoid", "softplus_of_sigmoid"]),
    (lambda x: (x.log_sigmoid(), x.sigmoid()), ["neg", "neg", "sigmoid", "softplus_of_sigmoid"]),
    (lambda x: (x.relu() + (-x.abs()).exp().log1p(), x.sigmoid()), ["sigmoid", "softplus_of_sigmoid"]),
    (lambda x: (x.clamp(max=0) - (-x.abs()).exp().log1p(), x.sigmoid()), ["neg", "neg", "sigmoid",
                                                                       "softplus_of_sigmoid"]),
    (lambda x: ((-x.abs()).softplus(), x.sigmoid()), ["abs", "neg", "sigmoid", "softplus_of_sigmoid"]),
    (lambda x: (x.softplus(), (x + 1).sigmoid()), ["add", "sigmoid", "softplus"]),
    (lambda x: (x.softplus(), x.exp()), ["exp", "softplus"]),
])  # fmt: skip
def test_softplus_and_sigmoid_share_an_exponential(function, want: list[str]) -> None:
    graph = traced(function)
    done = optimize(graph)
    assert ops(done) == want
    assert optimize(done) == done
    same(graph, done)


def test_a_loss_and_its_gradient_share_an_exponential() -> None:
    """Binary cross-entropy of logits, as its definition has it."""
    function = lambda acc, row: (((acc.softplus() - acc * row).sum()), acc.sigmoid() - row)  # noqa: E731
    done = optimize(traced(function, "row"))
    assert [op for op in ops(done) if OPERATIONS[op].style == "special"] == ["sigmoid"]
    same(traced(function, "row"), done)


@pytest.mark.parametrize(("function", "want"), [
    (lambda acc: acc.to("bf16").float() * 3, ["cast", "mul"]),
    (lambda acc: acc.to("fp8_e4m3").float() * 3, ["cast", "mul"]),
    (lambda acc: acc.to("bf16").to("bf16").float() * 3, ["cast", "mul"]),
    (lambda acc: acc.to("bf16").relu().to("bf16") * 3, ["cast", "mul", "relu"]),
    (lambda acc: acc.to("fp16").to("bf16") * 3, ["cast", "cast", "mul"]),
    (lambda acc: acc.to("bf16").exp().to("bf16") * 3, ["cast", "cast", "exp", "mul"]),
])  # fmt: skip
def test_roundings_stay_but_of_what_is_rounded(function, want: list[str]) -> None:
    graph = traced(function)
    assert ops(optimize(graph)) == want
    same(graph, optimize(graph))


def test_an_operand_is_not_rounded_to_its_own_dtype() -> None:
    operands = {"x": (BroadcastDims(columns_per_value=1), BF16)}
    for dtype, want in (("bf16", ["mul"]), ("fp16", ["cast", "mul"])):
        graph = trace(lambda acc, x: acc * -x.to(dtype).abs(), (M, N), operands)  # noqa: B023
        assert ops(optimize(graph)) == sorted([*want, "abs", "neg"])


def special(graph: EpilogueGraph) -> int:
    return sum(n.operation.cost_per_element("default")[1] for n in graph.nodes)


@pytest.mark.parametrize("function", [
    lambda acc: (acc.silu(), acc.sigmoid()),
    lambda acc, x: (acc / (x.abs() + 1), 2 / (x.abs() + 1)),
    lambda acc: acc.sigmoid().clamp(1e-3, 1 - 1e-3).log(),
])  # fmt: skip
def test_fission_saves_special_functions(function) -> None:
    graph = traced(function, *(["x"] if function.__code__.co_argcount == 2 else []))
    done = optimize(graph)
    assert special(done) < special(graph)
    rng = np.random.default_rng()
    product, operands = rng.standard_normal((M, N)), {"x": rng.standard_normal((M, N))}
    want, got = (execute(g, product, operands) for g in (graph, done))
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-9, atol=1e-12)


def test_intermediates_with_other_users_stay() -> None:
    graph = traced(lambda acc: (acc * 2 + 1, acc * 2))
    assert ops(optimize(graph)) == ["add", "mul"]


def test_what_nobody_asked_for_is_pruned() -> None:
    def function(acc, x):
        x.exp()
        return acc + x

    assert ops(traced(function, "x")) == ["add"]


def test_equal_reductions_are_one() -> None:
    graph = optimize(traced(lambda acc: (acc, acc.abs().sum(-1), acc.abs().sum(-1))))
    assert ops(graph) == ["abs", "reduce"]
    assert graph.results[1].node == graph.results[2].node
    assert ops(optimize(traced(lambda acc: acc.relu().abs().amax()))) == ["reduce", "relu"]


def test_order_of_writing_does_not_matter() -> None:
    one = optimize(traced(lambda acc, row, x: (acc + row) * x + 1, "row", "x"))
    other = optimize(traced(lambda acc, x, row: 1 + x * (row + acc), "x", "row"))
    assert one == other
    assert hash(one) == hash(other)


def test_steps_lead_from_the_first_to_the_last() -> None:
    graph = traced(lambda acc, row: (acc + row) * (acc + row).sigmoid() * 1, "row")
    done = trace_passes(graph)
    assert done[-1][1] == optimize(graph)
    assert {name for name, _ in done} <= {name for name, _ in (*PASSES, *FINAL_PASSES)}


def test_a_one_hot_row_is_not_known() -> None:
    """A label outside of the columns, as those that are to be ignored have, names none."""
    kinds = {"labels": (BroadcastDims(rows_per_value=1), BF16)}
    for kind, axis in (("sum", -1), ("max", -1), ("sum", -2)):
        graph = optimize(trace(lambda acc, labels: getattr(labels.one_hot(N), kind)(axis), (M, N), kinds))  # noqa: B023
        assert graph.constant_operand_of(graph.results[0]) is None
        assert [o.name for o in graph.operands] == ["labels"]
