"""A mixture-of-experts layer as three grouped GEMMs: its tokens are gathered, its results scattered.

    python examples/moe_layer.py

Without a GPU the kernels are executed by the simulator, on a layer of a few experts. On a Hopper GPU the layer has the
sizes of Qwen3-30B-A3B.
"""

import ml_dtypes
import numpy as np

import gemmsmith


def gated(acc, gate):
    return gate.silu() * acc


def weighted(acc, weight):
    return acc * weight


def moe(x, gate, up, down, token_of_row, slot_of_row, offsets, weight_of_row, empty, **backend):
    """Return the sum over each token's experts of weight * down (silu(gate x) * up x).

    x (tokens, dim); gate, up (experts, dim, hidden); down (experts, hidden, dim). Rows are (token, i-th expert), sorted
    by expert: token_of_row, slot_of_row (rows,), weight_of_row (1, rows, 1), and the experts' ends offsets (experts,).
    """
    routed = {"offsets": offsets, "gather": token_of_row, **backend}
    g = gemmsmith.grouped_gemm(x, gate, **routed)
    h = gemmsmith.grouped_gemm(x, up, epilogue=gated, gate=g[None], **routed)
    slots = empty((len(token_of_row), x.shape[1]))  # each is written once
    gemmsmith.grouped_gemm(
        h, down, offsets=offsets, scatter=slot_of_row, epilogue=weighted, weight=weight_of_row, out=slots, **backend
    )
    return slots.reshape(len(x), -1, x.shape[1]).sum(1)  # in the order of a token's experts


def in_the_simulator(tokens: int = 40, dim: int = 64, hidden: int = 48, experts: int = 6, top_k: int = 2) -> None:
    rng = np.random.default_rng(48)
    scores = rng.random((tokens, experts))
    chosen = np.argsort(-scores, 1)[:, :top_k]
    order = np.argsort(chosen.ravel(), kind="stable").astype(np.int32)
    offsets = np.cumsum(np.bincount(chosen.ravel(), minlength=experts)).astype(np.int32)
    weight = np.take_along_axis(scores, chosen, 1).ravel()[order].astype(np.float32)

    def bf16(*shape):
        return (rng.standard_normal(shape) * shape[-2] ** -0.5).astype(ml_dtypes.bfloat16)

    x, (gate, up), down = bf16(tokens, dim), bf16(2, experts, dim, hidden), bf16(experts, hidden, dim)
    y = moe(x, gate, up, down, order // top_k, order, offsets, weight[None, :, None],
            lambda shape: np.full(shape, np.nan, ml_dtypes.bfloat16), backend="sim")  # fmt: skip
    want = np.zeros((tokens, dim))
    for row, slot in enumerate(order):
        token, expert = slot // top_k, chosen.ravel()[slot]
        g, u = (x[token].astype(float) @ w[expert].astype(float) for w in (gate, up))
        want[token] += weight[row] * ((g / (1 + np.exp(-g)) * u) @ down[expert].astype(float))
    error = np.linalg.norm(y.astype(float) - want) / np.linalg.norm(want)
    print(f"{tokens} tokens, {experts} experts, rows of each {np.diff(offsets, prepend=0)}: error {error:.1e}")
    assert error < 0.01


def on_a_gpu(tokens: int = 4096, dim: int = 2048, hidden: int = 768, experts: int = 128, top_k: int = 8) -> None:
    import torch

    torch.manual_seed(48)

    def bf16(*shape):
        return (torch.randn(shape, device="cuda") * shape[-1] ** -0.5).bfloat16()

    x, gate_up, down = bf16(tokens, dim), bf16(2, experts, hidden, dim), bf16(experts, dim, hidden)
    weights, chosen = torch.rand(tokens, experts, device="cuda").topk(top_k)
    order = chosen.ravel().argsort(stable=True)
    offsets = chosen.ravel().bincount(minlength=experts).cumsum(0).int()
    rows = (order // top_k).int(), order.int(), offsets, weights.ravel()[order][None, :, None]

    def layer():
        return moe(x, *gate_up.mT, down.mT, *rows, x.new_empty)

    y, want = layer(), torch.zeros(tokens, dim, device="cuda", dtype=torch.float64)
    for e in range(experts):
        token, i = torch.where(chosen == e)
        g, u = (x[token].double() @ w[e].double().T for w in gate_up)
        h = torch.nn.functional.silu(g) * u
        want.index_add_(0, token, h @ down[e].double().T * weights[token, i, None])
    error = float((y.double() - want).norm() / want.norm())
    assert error < 0.01
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(20):
        layer()
    stop.record()
    torch.cuda.synchronize()
    print(f"{tokens} tokens, {experts} experts: error {error:.1e}, {start.elapsed_time(stop) * 50:.0f} us")


def has_hopper_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


if __name__ == "__main__":
    on_a_gpu() if has_hopper_gpu() else in_the_simulator()
