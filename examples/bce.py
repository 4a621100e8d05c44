"""Binary cross-entropy of a multi-label classifier, fused into its last layer: the GEMM's result never reaches memory.

python examples/bce.py
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import gemmsmith
from gemmsmith.graph import (
    EVT,
    AccFetch,
    ColBroadcast,
    Compute,
    ScalarReduction,
    SrcFetch,
    TopologicalVisitor,
    Void,
)


def bce(acc: Any, bias: Any, labels: Any) -> Any:
    """Return the loss before its division by -m n, of acc (m, n), bias (m, 1), labels (m, n) of 0 and 1."""
    x = acc + bias
    return {"loss": ((labels - 1) * x + x.sigmoid().clamp(1e-3, 1 - 1e-3).log()).sum()}


def bce_tree() -> Any:
    """Return `bce` as a topological visitor tree of seven compute nodes; the logits are used twice."""
    loss = TopologicalVisitor(
        [(), (), (0, 1), (), (3,), (2, 4), (2,), (6,), (7,), (5, 8), (9,)],
        AccFetch(), ColBroadcast("bias"), Compute("plus"),
        SrcFetch("labels"), Compute("minus", 1), Compute("multiplies"),
        Compute("Sigmoid"), Compute("Clamp", 1e-3, 1 - 1e-3), Compute("log"),
        Compute("plus"), ScalarReduction("plus", "loss"),
    )  # fmt: skip
    return EVT(Void(), loss)


def main() -> None:
    rng = np.random.default_rng()
    m, n, k = 256, 256, 128
    features = rng.standard_normal((m, k)).astype(ml_dtypes.bfloat16)
    weights = rng.standard_normal((k, n)).astype(ml_dtypes.bfloat16)
    bias = rng.uniform(-1, 1, (m, 1)).astype(ml_dtypes.bfloat16)
    labels = rng.integers(0, 2, (m, n)).astype(ml_dtypes.bfloat16)
    for epilogue in (bce, bce_tree()):
        for backend in ("reference", "sim"):
            results = gemmsmith.gemm(features, weights, epilogue=epilogue, bias=bias, labels=labels, backend=backend)
            print(f"{backend:>9}: {float(results['loss']) / (-m * n):.6f}")


if __name__ == "__main__":
    main()
