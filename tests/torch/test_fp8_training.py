"""Experts whose products are computed in e4m3, with gradients, against float64 with the same operands rounded."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.torch.fp8_bounds import OF_RECIPE, OF_ROUNDING, relative_errors, trained_in_float64, trained_in_fp8  # noqa: E402

from gemmsmith import ArgumentError  # noqa: E402
from gemmsmith.torch import FusedMoE  # noqa: E402
from gemmsmith.torch.mlp.gated_epilogues import Gate  # noqa: E402
from gemmsmith.torch.moe.experts import gated_experts  # noqa: E402
from gemmsmith.torch.moe.slots import sort_slots, sum_slots  # noqa: E402
from gemmsmith.torch.moe.training import BACKWARD, FORWARD, backward_in_fp8, forward_in_fp8  # noqa: E402

pytestmark = pytest.mark.torch
DIM, HIDDEN, EXPERTS, TOP_K = 208, 128, 6, 2


def inputs(tokens: int, dtype: Any = torch.bfloat16, dim: int = DIM, hidden: int = HIDDEN) -> list[Any]:
    """x, experts, weights, gate_up, down and the result's gradient; some experts are other ranks', one has no token."""
    experts = torch.rand(tokens, EXPERTS - 1).topk(TOP_K).indices
    experts[::7, 0], experts[1:2] = -1, EXPERTS
    x, gate_up, down, gradient = (
        (torch.randn(shape) * shape[-1] ** -scale).to(dtype)
        for shape, scale in (
            ((tokens, dim), 0), ((EXPERTS, 2 * hidden, dim), 0.5), ((EXPERTS, dim, hidden), 0.5), ((tokens, dim), 0)
        )
    )  # fmt: skip
    return [x, experts, torch.rand(tokens, TOP_K) + 0.1, gate_up, down, gradient]


def check(got: Any, arrays: Any, activation: str = "silu") -> None:
    """Of the result and the gradients of x, weights, gate_up and down: of each token's, and of each expert's."""
    dtypes = [arrays[i].dtype for i in (0, 0, 2, 3, 4)]
    assert [x.dtype for x in got] == dtypes
    for errors in relative_errors(got, trained_in_fp8(*arrays, activation)):
        assert (errors <= OF_ROUNDING[arrays[0].dtype]).all()
    if len(arrays[0]) >= 20:
        for x, y in zip(got, trained_in_float64(*arrays, activation), strict=True):
            assert (x.double() - y).norm() <= OF_RECIPE * y.norm()


def trained(*arrays: Any, activation: str = "silu") -> list[Any]:
    x, experts, weights, gate_up, down, gradient = arrays
    leaves = [t.clone().requires_grad_() for t in (x, weights, gate_up, down)]
    y = gated_experts(leaves[0], experts, *leaves[1:], Gate(activation), in_fp8=True)
    return [y.detach(), *torch.autograd.grad(y, leaves, gradient)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "dim", "hidden"), [(1, DIM, 128), (40, DIM, 200), (300, 72, 40)])
def test_results_and_gradients(tokens: int, dim: int, hidden: int, dtype: Any) -> None:
    arrays = inputs(tokens, dtype, dim, hidden)
    # Along the result, so that no weight's gradient is a small sum of large terms.
    arrays[-1] += trained_in_float64(*arrays)[0].to(dtype)
    check(trained(*arrays), arrays)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_activations(activation: str) -> None:
    arrays = inputs(20, torch.float32)
    check(trained(*arrays, activation=activation), arrays, activation)


def test_relu() -> None:
    """Its gradient jumps where gate is 0, which a rounding error may cross: no bound for a single token."""
    arrays = inputs(100, torch.float32)
    for x, y in zip(trained(*arrays, activation="relu"), trained_in_fp8(*arrays, "relu"), strict=True):
        assert (x.double() - y).norm() <= 0.05 * y.norm()


def test_no_token() -> None:
    got = trained(*inputs(0))
    assert [x.shape[0] for x in got] == [0, 0, 0, EXPERTS, EXPERTS]
    assert not any(x.any() for x in got)


def test_the_kernels() -> None:
    """In the simulator."""
    arrays = x, experts, weights, gate_up, down, gradient = inputs(23, dim=144, hidden=136)
    order = sort_slots(experts, weights, EXPERTS)
    table = [order.offsets, order.token_of_row, order.row_of_slot], order.row_weights, gate_up, down, "silu"
    rows, *halves = forward_in_fp8(x, *table, backend="sim")
    y = sum_slots(rows, len(x), row_of_slot=order.row_of_slot)
    grad_x, of_rows, *of_weights = backward_in_fp8(gradient, x, halves, *table, [True] * 3, backend="sim")
    check([y, grad_x, of_rows[order.row_of_slot.long()].view(-1, TOP_K), *of_weights], arrays)


def test_the_operators() -> None:
    x, experts, weights, gate_up, down, gradient = inputs(9, dim=64, hidden=32)
    order = sort_slots(experts, weights, EXPERTS)
    arrays = [order.offsets, order.token_of_row, order.row_of_slot], order.row_weights, gate_up, down
    options = "silu", False, True, True
    _, halves = FORWARD(x, *arrays, None, *options)
    torch.library.opcheck(FORWARD, (x, *arrays, None, *options))
    for needed in ([True, False, True, False], [False, True, False, False]):
        torch.library.opcheck(BACKWARD, (gradient, x, halves, *arrays, *options, needed))


def layer(**options: Any) -> FusedMoE:
    return FusedMoE(DIM, HIDDEN, EXPERTS, TOP_K, shared_hidden=48, **options)


def test_a_layer() -> None:
    """Its parameters stay what they are; some are frozen; results without gradients are the same."""
    wide, ours, x = layer(), layer(multiply_in_fp8=True), torch.randn(3, 7, DIM)
    ours.load_state_dict(wide.state_dict())
    ours.experts.down_proj.requires_grad_(False)
    got, want = ours(x), wide(x)
    for y in (got, want):
        y.square().sum().backward()
    assert (got - want).norm() < OF_RECIPE * want.norm()
    assert ours.experts.down_proj.grad is None
    for name in ("gate.weight", "experts.gate_up_proj", "shared_experts.up.weight"):
        gradient, expected = (model.get_parameter(name).grad for model in (ours, wide))
        assert gradient.dtype == torch.float32
        assert (gradient - expected).norm() < 2 * OF_RECIPE * expected.norm()
    with torch.no_grad():
        torch.testing.assert_close(ours(x), got, rtol=1e-5, atol=1e-5)


def test_compiled_and_in_autocast() -> None:
    ours, x = layer(multiply_in_fp8=True, dtype=torch.bfloat16), torch.randn(9, DIM, dtype=torch.bfloat16)
    parameters = [ours.experts.gate_up_proj, ours.experts.down_proj]
    compiled = torch.compile(ours, fullgraph=True)
    results = [(y, *torch.autograd.grad(y.float().sum(), parameters)) for y in (compiled(x), ours(x))]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
    exact, x = layer(multiply_in_fp8=True), torch.randn(9, DIM)
    routed = exact.gate(x)
    with torch.autocast("cpu", torch.bfloat16):
        got = exact.experts(x, *routed)
    assert got.dtype == torch.bfloat16
    got.sum().backward()
    assert exact.experts.gate_up_proj.grad.dtype == torch.float32
    want = exact.experts(x, *routed)
    assert (got.float() - want).norm() < OF_RECIPE * want.norm()


def test_wrong_arguments_are_refused() -> None:
    x, experts, weights, gate_up, down, _ = inputs(5)
    for match, arguments in (
        ("x: got torch.float64; use one of torch.bfloat16", (x.double(), experts, weights, gate_up, down)),
        ("down: got torch.float8_e4m3fn; use one of", (x, experts, weights, gate_up, down.to(torch.float8_e4m3fn))),
        ("hidden: got 4 with experts in fp8; use a multiple of 8",
         (x, experts, weights, gate_up[:, :8], down[:, :, :4])),
        ("activation: got 'tanh'; use one of silu", (x, experts, weights, gate_up, down, Gate("tanh"))),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=match):
            gated_experts(*arguments, in_fp8=True)
    with pytest.raises(ArgumentError, match="hidden: got 100 with experts in fp8"):
        FusedMoE(DIM, 100, EXPERTS, TOP_K, multiply_in_fp8=True)
    with pytest.raises(ArgumentError, match="experts_dtype, multiply_in_fp8: got both; use one"):
        FusedMoE(DIM, HIDDEN, EXPERTS, TOP_K, multiply_in_fp8=True, experts_dtype=torch.float8_e4m3fn)
    y = gated_experts(x.requires_grad_(), experts, weights, gate_up, down, in_fp8=True)
    with pytest.raises(ArgumentError, match="create_graph: got True for a function without second derivatives"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
