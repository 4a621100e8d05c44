"""The choice of a matmul's kernel as on a GPU: by the cost model, and by times that are made up."""

from __future__ import annotations

import pytest
import torch
from tests.torch.compiler import models
from tests.torch.compiler.passed import compiled
from torch.nn import functional

import gemmsmith.torch as gt
from gemmsmith import Plan
from gemmsmith.torch.compiler import explain, kernel_choice, measure
from gemmsmith.torch.compiler.matmuls import Matmul

SIZE = 64


@pytest.fixture(autouse=True)
def started(monkeypatch, rng):
    """Choose kernels as on a GPU. Returns the plans that are compiled."""
    torch.manual_seed(int(rng.integers(2**31)))
    torch._dynamo.reset()
    plans = []
    monkeypatch.setattr(Matmul, "is_on_gpu", True)
    monkeypatch.setattr(kernel_choice, "compile_async", plans.append)
    monkeypatch.setattr(kernel_choice, "MIN_SAVED_US", 0)
    return plans


@pytest.fixture
def all_long(monkeypatch):
    """Let the rule take small matmuls, too."""
    monkeypatch.setattr(kernel_choice, "MIN_PLAIN_US", 0)


@pytest.fixture
def tf32():
    torch.set_float32_matmul_precision("high")


def matrices(*shapes, dtype=torch.bfloat16):
    return [torch.randn(shape).to(dtype) for shape in shapes]


def timer(plain, torch, fused=0.0):
    """Return a timer of made-up times, which records what it times in `calls`."""

    def time(calls):
        time.calls.append(calls)
        return (plain, torch, fused)[: len(calls)]

    time.calls = []
    return time


def matmuls(passed):
    """Return the names of the operators that multiply."""
    names = [str(node.target) for graph in passed.graphs for node in graph.nodes]
    return [name for name in names if "mm" in name]


def close(actual, expected, tolerance=0.02):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * float(expected.detach().abs().max()))


# -- by the cost model -------------------------------------------------------------------------------------------------


def test_a_long_matmul_is_replaced_as_it_is(started):
    """The largest layer of Llama 3 8B, without computing it."""
    a, w = torch.empty(8192, 4096, dtype=torch.bfloat16), torch.empty(14336, 4096, dtype=torch.bfloat16)
    explanation = gt.explain(lambda a, w: a @ w.T, a, w)
    (outcome,) = explanation.matmuls
    assert explanation.plain == [outcome]
    assert not explanation.fused
    assert outcome.times.plain > kernel_choice.MIN_PLAIN_US
    (planned,) = started
    plan = Plan(planned)
    assert plan.estimated_us < outcome.times.plain < plan.estimated_us + 2  # and the launch


LEFT = {
    "short": lambda: [*matrices((64, 4096), (4096, 4096))],
    "TF32": lambda: [*matrices((4096, 4096), (4096, 4096), dtype=torch.float32)],
    "batched": lambda: [*matrices((8, 2048, 2048), (8, 2048, 2048))],
}


@pytest.mark.parametrize("name", LEFT)
def test_what_the_measured_rows_do_not_claim_stays_with_torch(name, started, tf32):
    explanation = gt.explain(torch.matmul, *LEFT[name]())
    assert not explanation.plain
    assert not started
    assert "- it is a graph output" in str(explanation)


def test_3xtf32_is_replaced():
    assert gt.explain(torch.matmul, *matrices((2048, 2048), (2048, 2048), dtype=torch.float32)).plain


def test_small_matrices_in_3xtf32_stay_with_torch():
    """Those of an attention in fp32: they are packed first, which takes longer than torch's fp32 kernel."""
    weights, values = torch.empty(128, 512, 512), torch.empty(128, 512, 64)
    explanation = gt.explain(lambda w, v: (w @ v) * 0.125, weights, values)
    assert not explanation.fused
    assert not explanation.plain
    assert "fusing would slow the matmul" in str(explanation)


@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
def test_values_strides_and_gradients_of_a_plain_matmul(transposed, all_long):
    a, b = matrices((SIZE, 48), (48, 32), dtype=torch.float32)
    a, b = (x.T.contiguous().T if name in transposed else x for name, x in (("a", a), ("b", b)))
    a.requires_grad_()
    b.requires_grad_()
    function = lambda a, b: (y := a @ b, y.T.contiguous(), y.view(-1))  # noqa: E731
    actual, passed = compiled(function)
    outputs, expected = actual(a, b), function(a, b)
    for x, y in zip(outputs, expected, strict=True):
        assert x.stride() == y.stride()
        close(x, y, 1e-6)
    gradients = [torch.autograd.grad(sum(y.square().sum() for y in x), (a, b)) for x in (outputs, expected)]
    for x, y in zip(*gradients, strict=True):
        close(x, y, 1e-5)
    assert sum(x.replaced for x in passed.outcomes) == 3
    assert matmuls(passed) == ["gemmsmith.gemm_1.default"] * 3


def test_the_bias_of_a_plain_matmul_is_its_epilogue(all_long):
    x, w, bias = matrices((SIZE, 48), (32, 48), (32,))
    actual, passed = compiled(functional.linear)
    close(actual(x, w, bias), functional.linear(x, w, bias))
    (outcome,) = passed.outcomes
    assert outcome.operations == ("add",)
    assert matmuls(passed) == ["gemmsmith.gemm_1.default"]


def test_sizes_without_a_hint_stay_with_torch(all_long, monkeypatch):
    monkeypatch.setattr(kernel_choice, "have_hints", lambda extents: all(isinstance(x, int) for x in extents))
    a, b = matrices((SIZE, 48), (48, 32))
    actual, passed = compiled(torch.matmul, timer(1, 2), dynamic=True)
    close(actual(a, b), a @ b)
    assert not passed.outcomes[0].replaced


def test_fusing_that_would_take_longer_leaves_a_plain_matmul(all_long, started, monkeypatch):
    monkeypatch.setattr(kernel_choice, "saved_us", lambda candidate: 0.0)
    a, b = matrices((SIZE, 48), (48, 32))
    actual, passed = compiled(lambda a, b: torch.relu(a @ b))
    close(actual(a, b), torch.relu(a @ b))
    (outcome,) = passed.outcomes
    assert outcome.reason.endswith("us and save 0.0 us elsewhere")
    assert (outcome.replaced, outcome.epilogue) == (True, None)
    assert len(started) == 1


def test_a_fusion_that_saves_a_launch(started):
    a, b = matrices((SIZE, 64), (64, 64))
    actual, passed = compiled(lambda a, b: torch.relu(a @ b))
    close(actual(a, b), torch.relu(a @ b))
    (outcome,) = passed.outcomes
    assert outcome.operations == ("relu",)
    assert outcome.times.fused < outcome.times.unfused
    assert "relu" in Plan(started[0]).epilogue


@pytest.mark.parametrize("case", ["training", "CUDA graphs", "inference"])
def test_what_saves_less_than_a_call_costs(case, monkeypatch):
    """A residual of BERT: of 20 us fusing would save 3, which the host of a training step does not."""
    monkeypatch.setattr(kernel_choice, "MIN_SAVED_US", 5)
    x, residual = (torch.empty(4096, 1024, dtype=torch.bfloat16) for _ in range(2))
    w = torch.empty(1024, 1024, dtype=torch.bfloat16, requires_grad=case != "inference")
    with torch._inductor.config.patch({"triton.cudagraphs": case == "CUDA graphs"}):
        explanation = gt.explain(lambda x, w, residual: (x @ w + residual).sum(0).square().sum(), x, w, residual)
    first = explanation.matmuls[0]
    assert 0 < first.times.unfused - first.times.fused < 5
    assert (first.reason == "") == (case != "training")
    assert ("less than a call may cost on the host" in first.reason) == (case == "training")


def test_a_step_of_plain_and_fused_matmuls(all_long):
    model, inputs = models.model("llama", torch.bfloat16)
    expected = models.trained(model, model, inputs)
    forward, passed = compiled(model)
    actual = models.trained(forward, model, inputs)
    assert all(x.replaced for x in passed.outcomes)
    assert any(x.epilogue for x in passed.outcomes)
    for name in expected:
        error = (actual[name].double() - expected[name].double()).norm() / expected[name].double().norm()
        assert error < 0.03, name


# -- by measured times -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("plain", "torchs"), [(1.0, 2.0), (2.0, 1.0)])
def test_the_faster_plain_matmul(plain, torchs):
    a, b = matrices((3, SIZE, 48), (3, 48, 32))
    measured = timer(plain, torchs)
    actual, passed = compiled(torch.bmm, measured)
    close(actual(a, b), a @ b)
    assert passed.outcomes[0].replaced == (plain < torchs)
    ((ours, theirs),) = measured.calls
    assert theirs.op == torch.ops.aten.bmm.default
    assert ours.args[:2] == theirs.args
    assert theirs.args[0].shape == (3, SIZE, 48)


@pytest.mark.parametrize(("times", "chosen"), [
    ((9.0, 8.0, 7.9), "fused"), ((9.0, 8.0, 100.0), "torch"), ((7.0, 8.0, 100.0), "plain"), ((1.0, 9.0, 8.9), "plain"),
])  # fmt: skip
def test_a_fused_matmul_against_the_faster_plain_one(times, chosen):
    a, b, bias = matrices((SIZE, 48), (48, 32), (32,))
    function = lambda a, b, bias: functional.gelu(a @ b + bias)  # noqa: E731
    actual, passed = compiled(function, timer(*times))
    close(actual(a, b, bias), function(a, b, bias))
    (outcome,) = passed.outcomes
    assert (outcome.replaced, bool(outcome.epilogue)) == (
        chosen != "torch", chosen == "fused" or (chosen == "plain" and "addmm" in outcome.matmul)
    )  # fmt: skip


def test_both_matmuls_of_a_pair_are_replaced_at_once_if_that_is_faster():
    x, v, w = matrices((48, 64), (128, 64), (128, 64))
    function = lambda x, v, w: functional.silu(x @ v.T) * (x @ w.T)  # noqa: E731
    for fused, count in ((11.0, 1), (100.0, 2)):
        measured = timer(10.0, 6.0, fused)
        actual, passed = compiled(function, measured)
        close(actual(x, v, w), function(x, v, w), 0.05)
        assert len(passed.outcomes) == count
        assert measured.calls[0][2].op == torch.ops.gemmsmith.gemm_1.default
    assert not any(x.replaced for x in passed.outcomes)


def test_without_memory_to_measure_the_cost_model_decides(all_long):
    def exhausted(calls):
        raise torch.OutOfMemoryError("made up")

    a, b = matrices((SIZE, 48), (48, 32))
    actual, passed = compiled(torch.matmul, exhausted)
    close(actual(a, b), a @ b)
    assert passed.outcomes[0].replaced
    assert not passed.outcomes[0].times.measured


def test_equal_layers_are_equal_calls():
    """The timer caches by them."""
    x, *weights = matrices((SIZE, 64), *[(64, 64)] * 3)
    measured = timer(2.0, 1.0, 3.0)
    compiled(lambda x, a, b, c: torch.relu(torch.relu(torch.relu(x @ a) @ b) @ c), measured)[0](x, *weights)
    assert len(measured.calls) == 3
    assert len(set(measured.calls)) == 1


def test_what_is_timed_runs():
    a, b, bias, labels = *matrices((SIZE, 48), (48, 32), (32,)), torch.randint(9, (SIZE, 1))
    measured = timer(2.0, 1.0, 3.0)
    compiled(lambda a, b, bias, labels: ((a.T @ a), torch.addmm(bias, a, b, alpha=0.5) * labels), measured)[0](
        a, b, bias, labels
    )
    for call in (call for calls in measured.calls for call in calls):
        result = call.bind(torch.Generator().manual_seed(0))()
        assert result.shape[-1] in (32, 48)
        assert result.float().std() > 0 or call.op != torch.ops.aten.mm.default


@pytest.mark.parametrize("options", [{}, {"max_autotune": True}, {"max_autotune_gemm": True}])
def test_max_autotune_measures(options):
    with torch._inductor.config.patch(options):
        assert measure.configured_timer() is (measure.time_on_gpu if options else None)
        with torch._inductor.config.patch(deterministic=True):
            assert measure.configured_timer() is None


# -- explained ---------------------------------------------------------------------------------------------------------


def test_times_in_the_explanation(monkeypatch):
    a, b = matrices((SIZE, 64), (64, 64))
    model = lambda a, b: (torch.relu(a @ b), b @ a.T)  # noqa: E731
    estimated = str(gt.explain(model, a, b)).splitlines()
    assert estimated[1].split() == ["graph", "0", "us", "fused", "unfused", "plain"]
    assert [x.startswith("~") for x in estimated[2].split()[4:8]] == [True, True, True, False]
    monkeypatch.setattr(explain, "time_on_gpu", timer(5.0, 8.0, 5.25))
    measured = str(gt.explain(model, a, b, measure=True)).splitlines()
    assert measured[0].startswith("1 of 2 matmuls have fused epilogues; replaced without: 1; memory traffic saved")
    assert measured[1].split() == ["graph", "0", "us", "fused", "unfused", "plain", "torch"]
    assert measured[2].split()[4] == "5.2"
    assert measured[2].split()[6:9] == ["5.0", "8.0", "relu:"]
    assert measured[3].split()[4:8] == ["5.0", "5.0", "8.0", "plain:"]
