"""Experts that are trained by FP8 products on a GPU, against float64 with the same operands rounded."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.torch.fp8_bounds import OF_RECIPE, OF_ROUNDING, relative_errors, trained_in_float64, trained_in_fp8  # noqa: E402

from gemmsmith.torch import FusedMoE  # noqa: E402
from gemmsmith.torch.moe.experts import gated_experts  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", OF_ROUNDING)
@pytest.mark.parametrize(
    ("dim", "hidden", "tokens"), [(256, 384, 1), (1000, 128, 60), (2048, 512, 300), (768, 1152, 2000)]
)
def test_results_and_gradients(dim: int, hidden: int, tokens: int, dtype: Any) -> None:
    """Some experts are other ranks', one has no token."""
    count, top_k = 24, 4
    x, gate_up, down, gradient = (
        (torch.randn(shape, device="cuda") * shape[-1] ** -scale).to(dtype)
        for shape, scale in (
            ((tokens, dim), 0), ((count, 2 * hidden, dim), 0.5), ((count, dim, hidden), 0.5), ((tokens, dim), 0)
        )
    )  # fmt: skip
    experts = torch.rand(tokens, count, device="cuda").topk(top_k).indices - 1
    weights = torch.rand(tokens, top_k, device="cuda") + 0.1
    leaves = [t.clone().requires_grad_() for t in (x, weights, gate_up, down)]
    for _ in range(2):
        y = gated_experts(leaves[0], experts, *leaves[1:], in_fp8=True)
        got = [y.detach(), *torch.autograd.grad(y, leaves, gradient)]
        arrays = x, experts, weights, gate_up, down, gradient
        for errors in relative_errors(got, trained_in_fp8(*arrays)):
            assert bool((errors <= OF_ROUNDING[dtype]).all())
        for a, b in zip(got, trained_in_float64(*arrays), strict=True):
            assert tokens < 20 or bool((a.double() - b).norm() <= OF_RECIPE * b.norm())


def test_steps_of_a_compiled_layer() -> None:
    """Training lowers a loss as much as it does in bf16."""
    torch.manual_seed(0)
    narrow = FusedMoE(256, 256, 8, 2, device="cuda", dtype=torch.float32, multiply_in_fp8=True)
    wide = FusedMoE(256, 256, 8, 2, device="cuda", dtype=torch.float32)
    wide.load_state_dict(narrow.state_dict())
    x = torch.randn(512, 256, device="cuda")
    target, decreases = torch.randn(512, 256, device="cuda"), []
    for layer in (torch.compile(narrow), wide):
        losses: list[float] = []
        optimizer = torch.optim.Adam(layer.parameters(), 3e-3)
        for _ in range(30):
            with torch.autocast("cuda", torch.bfloat16):
                loss = (layer(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        decreases.append(1 - losses[-1] / losses[0])
    assert decreases[1] > 0.9
    assert abs(decreases[0] - decreases[1]) < 0.01 * decreases[1]
