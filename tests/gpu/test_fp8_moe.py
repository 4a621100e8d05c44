"""FusedMoE with experts in FP8 on a GPU, against float64 of the dequantized weights."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.torch.fp8_bounds import dequantized, fp8_experts_and_bound  # noqa: E402

import gemmsmith  # noqa: E402
from gemmsmith.torch import FusedMoE  # noqa: E402
from gemmsmith.torch.moe.fp8_experts import fp8_gated_experts  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 7, 300])
@pytest.mark.parametrize(("dim", "hidden"), [(256, 384), (1000, 128), (2048, 512)])
def test_experts(dim: int, hidden: int, tokens: int, dtype: Any) -> None:
    """Some experts are other ranks'."""
    count, top_k = 24, 4
    scaled = [
        x.contiguous()
        for shape in ((count, 2 * hidden, dim), (count, dim, hidden))
        for x in gemmsmith.quantize(torch.randn(shape, device="cuda") * shape[-1] ** -0.5, "128x128")
    ]
    x, weights = torch.randn(tokens, dim, device="cuda").to(dtype), torch.rand(tokens, top_k, device="cuda")
    experts = torch.rand(tokens, count + 4, device="cuda").topk(top_k).indices - 2
    got = fp8_gated_experts(x, experts, weights, *scaled)
    want, bound = fp8_experts_and_bound(x, experts, weights, dequantized(*scaled[:2]), dequantized(*scaled[2:]))
    assert bool(((got.double() - want).abs() <= bound).all())
    assert bool((got.double() - want).norm() <= 0.07 * want.norm())


def test_a_layer_in_a_graph_and_compiled() -> None:
    wide = FusedMoE(256, 128, 16, 2, shared_hidden=128, device="cuda", dtype=torch.bfloat16)
    layer = FusedMoE(
        256, 128, 16, 2, shared_hidden=128, device="cuda", dtype=torch.bfloat16, experts_dtype=torch.float8_e4m3fn
    )  # fmt: skip
    layer.load_state_dict(wide.state_dict())
    x = torch.randn(3, 50, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        want = layer(x)
        assert bool((want - wide(x)).norm() <= 0.1 * want.norm())
        torch.testing.assert_close(torch.compile(layer)(x), want, rtol=0.05, atol=0.05)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = layer(x)
        x.normal_()
        graph.replay()
        assert torch.equal(got, layer(x))
