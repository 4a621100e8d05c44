"""`b` as a tuple of two arrays on a GPU, against float64, in marked outputs."""

from __future__ import annotations

import random
from typing import Any

import pytest

import gemmsmith
from gemmsmith import Config, deinterleave

torch = pytest.importorskip("torch")
gt = pytest.importorskip("gemmsmith.torch")
pytestmark = pytest.mark.gpu

CONFIGS = [
    None,
    Config("cooperative", (128, 256, 64), (2, 1)),
    Config("cooperative", (256, 128, 64), (2, 1)),
    Config("cooperative", (128, 176, 64), (1, 2)),
    Config("cooperative", (64, 16, 128), (1, 1), consumers=1),
    Config("cooperative", (128, 64, 64), (1, 2), swap_ab=True),
    Config("cooperative", (64, 8, 256), (1, 1), 5, 1, swap_ab=True),
    Config("cooperative", (128, 64, 64), (1, 1), splits=0),
    Config("cooperative", (128, 64, 64), (1, 1), cluster_splits=2, stages=3),
    Config("pingpong", (64, 256, 64), (2, 1)),
    Config("pingpong", (64, 64, 64), (1, 2), swap_ab=True),
]


def normal(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(shape, device="cuda").to(dtype)


def weights(k: int, n: int, *leading: int, second_first: bool, dtype: Any = torch.bfloat16) -> Any:
    """Return two K-major weights; which one is at the lower address is given."""
    low, _, high = normal(3, *leading, n, k, dtype=dtype).mT.unbind()
    return (high, low) if second_first else (low, high)


def gated(acc: Any) -> Any:
    gate, up = deinterleave(acc)
    return gate.relu() * up


def check(d: Any, a: Any, b: Any) -> None:
    gate, up = (a.double() @ x.double() for x in b)
    want = gate.relu() * up
    size = a.double().abs() @ b[1].double().abs()
    allowed = 2.0**-8 * 1.01 * want.abs() + 2.0**-16 * gate.relu() * size + 2.0**-16 * (up.abs() + 1) * size
    assert bool(((d.double() - want).abs() <= allowed).all())


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_products_of_two_weights(config: Any) -> None:
    rng = random.Random()
    for second_first in (False, True):
        m, n, k = rng.choice([1, 17, 64, 200, 513]), 8 * rng.randint(1, 90), 8 * rng.randint(1, 90)
        a, b = normal(m, k), weights(k, n, second_first=second_first)
        out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        gemmsmith.gemm(a, b, epilogue=gated, out=out, config=config)
        check(out, a, b)


def test_arrays_that_were_allocated_apart() -> None:
    """One plan serves them, in either order, at any distance."""
    a, kept = normal(96, 256), []
    for _ in range(6):
        b = normal(88, 256).mT, normal(88, 256).mT
        kept.append((b, normal(random.randint(1, 1 << 20))))
        for pair in (b, b[::-1]):
            check(gemmsmith.gemm(a, pair, epilogue=gated), a, pair)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_other_dtypes(dtype: Any) -> None:
    def drawn(*shape: int) -> Any:
        return torch.randint(-4, 5, shape, device="cuda").to(dtype)

    a, (first, _, second) = drawn(130, 192), drawn(3, 72, 192).mT
    for b in ((first, second), (second, first)):
        out = gemmsmith.gemm(a, b)
        want = a.double() @ gemmsmith.interleave(*(x.double().contiguous() for x in b))
        assert bool(((out.double() - want).abs() <= 2.0**-8 * want.abs()).all())


FP8_CONFIGS = [
    None,
    Config("cooperative", (128, 256, 128), (2, 1)),
    Config("cooperative", (128, 176, 128), (1, 2)),
    Config("cooperative", (64, 16, 128), (1, 1), consumers=1),
    Config("cooperative", (128, 64, 128), (1, 2), swap_ab=True),
    Config("cooperative", (128, 128, 128), (1, 1), splits=0),
    Config("pingpong", (64, 128, 128), (2, 1)),
]


@pytest.mark.parametrize("config", FP8_CONFIGS, ids=str)
def test_block_scales_of_each(config: Any) -> None:
    rng = random.Random()
    for order in range(4):
        m, n, k = rng.choice([1, 17, 64, 200, 513]), 8 * rng.randint(1, 90), 16 * rng.randint(1, 60)
        a, scale_a = gemmsmith.quantize(normal(m, k))
        values, scales = gemmsmith.quantize(normal(3, n, k), "128x128")
        pairs = (values[0].T, values[2].T), (scales[0].T, scales[2].T)
        b, scale_b = (x[::-1] if order >> i & 1 else x for i, x in enumerate(pairs))
        out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        gemmsmith.gemm(a, b, scale_a=scale_a, scale_b=scale_b, epilogue=gated, out=out, config=config)
        by_torch = gt.gemm(a, b, scale_a=scale_a, scale_b=scale_b, epilogue=gated)
        wide = a.double() * scale_a.double().repeat_interleave(128, 1)[:, :k]
        of_columns = (s.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:k, :n] for s in scale_b)
        gate, up = pair = [w.double() * s for w, s in zip(b, of_columns, strict=True)]
        error = [2.0**-11 * (wide.abs() @ w.abs()) for w in pair]  # steps of the tensor core
        gate, up = wide @ gate, wide @ up
        want = gate.relu() * up
        allowed = 2.0**-8 * 1.01 * want.abs() + error[0] * (up.abs() + error[1]) + gate.abs() * error[1]
        for got in (out, by_torch):
            assert bool(((got.double() - want).abs() <= allowed).all())


@pytest.mark.parametrize("config", [None, *(c for c in CONFIGS[1:] if c.splits == c.cluster_splits == 1)], ids=str)
@pytest.mark.parametrize("gathers", [False, True])
def test_two_weights_of_each_group(config: Any, gathers: bool) -> None:
    if gathers and config and config.cluster[0 if config.swap_ab else 1] > 1:
        pytest.skip("gathered rows are not multicast")
    rng, groups, n, k = random.Random(), 7, 8 * random.randint(1, 40), 8 * random.randint(1, 60)
    for second_first in (False, True):
        sizes = [rng.choice([0, 1, 63, 64, 65, 127, 200]) for _ in range(groups)]
        rows, b = sum(sizes) + 5, weights(k, n, groups, second_first=second_first)
        source = normal(300 if gathers else rows, k)
        gather = torch.randint(0, 300, (rows,), device="cuda", dtype=torch.int32) if gathers else None
        out = torch.full((rows, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        table = torch.tensor(sizes, device="cuda", dtype=torch.int32)
        gemmsmith.grouped_gemm(source, b, sizes=table, gather=gather, epilogue=gated, out=out, config=config)
        a, begin = source if gather is None else source[gather.long()], 0
        for g, size in enumerate(sizes):
            check(out[begin : begin + size], a[begin : begin + size], [x[g] for x in b])
            begin += size
        assert not out[begin:].any()


def test_a_graph_replays_it() -> None:
    a, b = normal(128, 512), weights(512, 256, second_first=True)
    out = gemmsmith.gemm(a, b, epilogue=gated)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemmsmith.gemm(a, b, epilogue=gated, out=out)
    for _ in range(5):
        for x in (a, *b):
            x.copy_(normal(*x.shape))
        out.fill_(float("nan"))
        graph.replay()
        check(out, a, b)


class Gated(torch.nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def trained(forward: Any, module: Any, x: Any, gradient: Any) -> list[Any]:
    """Return the output and all gradients of a step."""
    for t in (x, *module.parameters()):
        t.grad = None
    y = forward(x)
    y.backward(gradient)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("tokens", [1, 100, 1024])
def test_in_torch(tokens: int) -> None:
    """FusedMLP, and the plain module by torch.compile: a step is as near to float64 as eager PyTorch's."""
    import gemmsmith.torch as gt

    plain = Gated(256, 648).to("cuda", torch.bfloat16)
    fused = gt.FusedMLP(256, 648, device="cuda", dtype=torch.bfloat16)
    fused.load_state_dict(plain.state_dict())
    wide = Gated(256, 648).to("cuda", torch.float64)
    wide.load_state_dict(plain.state_dict())
    x, gradient = normal(tokens, 256).requires_grad_(), normal(tokens, 256)
    exact = trained(wide, wide, x.detach().double().requires_grad_(), gradient.double())
    eager = trained(plain, plain, x, gradient)
    compiled = torch.compile(plain, options=gt.options())
    for forward, module in ((fused, fused), (compiled, plain)):
        for got, theirs, want in zip(trained(forward, module, x, gradient), eager, exact, strict=True):
            allowed = 1.25 * (theirs.double() - want).norm() + 1e-3 * want.norm()
            assert bool((got.double() - want).norm() <= allowed)
        with torch.no_grad():
            assert bool((forward(x).double() - exact[0]).norm() <= 2.0**-6 * exact[0].norm())


def test_a_tuple_in_torch() -> None:
    """Without gradients one kernel reads both; with gradients they are interleaved first."""
    import gemmsmith.torch as gt

    a, b = normal(96, 256), weights(256, 88, second_first=True)
    check(gt.gemm(a, b, epilogue=gated), a, b)
    leaves = [x.detach().clone().requires_grad_() for x in (a, *b)]
    check(gt.gemm(leaves[0], tuple(leaves[1:]), epilogue=gated).detach(), a, b)
    offsets = torch.tensor([40, 96], device="cuda", dtype=torch.int32)
    both = weights(256, 88, 2, second_first=False)
    out = gt.grouped_gemm(a, both, offsets=offsets, epilogue=gated)
    for g, rows in enumerate((slice(0, 40), slice(40, 96))):
        check(out[rows], a[rows], [x[g] for x in both])
