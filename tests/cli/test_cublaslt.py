"""cuBLASLt's binding: the descriptors of A, B and D. Its results need a GPU."""

from __future__ import annotations

import ctypes
from itertools import product
from unittest.mock import MagicMock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from gemmsmith.cli import cublaslt  # noqa: E402

pytestmark = pytest.mark.torch

LAYOUTS = list(product("nt", repeat=3))
"""Of A, B and D: row-major (n) or column-major (t)."""


def matrix(rng: np.random.Generator, rows: int, columns: int, layout: str, device: str = "cpu") -> torch.Tensor:
    """Return integers that bf16 represents exactly, in a matrix with padded rows (columns)."""
    outer, inner = (rows, columns) if layout == "n" else (columns, rows)
    values = torch.from_numpy(rng.integers(-3, 4, (outer, inner + 8))).to(device, torch.bfloat16)[:, :inner]
    return values if layout == "n" else values.T


def column_major(x: torch.Tensor, rows: int, columns: int, ld: int) -> torch.Tensor:
    """Return what a column-major layout of these sizes reads from x's first element on."""
    return torch.as_strided(x, (rows, columns), (1, ld))


def test_structures_have_the_headers_sizes() -> None:
    assert ctypes.sizeof(cublaslt.MatmulAlgo) == 64
    assert ctypes.sizeof(cublaslt.MatmulHeuristicResult) == 96
    assert cublaslt.MatmulHeuristicResult.state.offset == 72


def test_other_strides_are_refused() -> None:
    for x in (torch.zeros(6, 8)[:, ::2], torch.zeros(1, 8).expand(6, 8)):
        with pytest.raises(ValueError, match=r"row-major or column-major, .* strides"):
            cublaslt.transposed(x)


@pytest.mark.parametrize("layouts", LAYOUTS, ids="".join)
@pytest.mark.parametrize(("m", "n", "k"), [(5, 7, 9), (1, 7, 9), (5, 1, 9), (5, 7, 1)])
def test_the_described_product_is_ours(
    m: int, n: int, k: int, layouts: tuple[str, ...], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ops and layouts given to the library, interpreted as its documentation says."""
    library = MagicMock()
    monkeypatch.setattr(cublaslt, "library", lambda: library)
    a, b, d = (matrix(rng, *s, layout) for s, layout in zip(((m, k), (k, n), (m, n)), layouts, strict=True))
    d.fill_(float("nan"))
    matmul = cublaslt.Matmul(a, b, d)
    ops = {c.args[1]: c.args[2]._obj.value for c in library.cublasLtMatmulDescSetAttribute.call_args_list}
    sizes = [c.args[2:] for c in library.cublasLtMatrixLayoutCreate.call_args_list]
    left, right, result = (column_major(x, *s) for x, s in zip(matmul.operands(a, b, d), sizes, strict=True))
    left = left.T if ops[cublaslt.CUBLASLT_MATMUL_DESC_TRANSA] == cublaslt.CUBLAS_OP_T else left
    right = right.T if ops[cublaslt.CUBLASLT_MATMUL_DESC_TRANSB] == cublaslt.CUBLAS_OP_T else right
    result.copy_(left.double() @ right.double())
    assert torch.equal(d.double(), a.double() @ b.double())


def test_a_batch_is_described_by_its_count_and_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    library = MagicMock()
    monkeypatch.setattr(cublaslt, "library", lambda: library)
    a, b, d = (torch.zeros(3, *shape, dtype=torch.bfloat16) for shape in ((5, 9), (9, 7), (5, 7)))
    matmul = cublaslt.Matmul(a, b, d)
    given = [c.args[1:] for c in library.cublasLtMatrixLayoutSetAttribute.call_args_list]
    assert [(name, x._obj.value) for name, x, _ in given] == [(5, 3), (6, 63), (5, 3), (6, 45), (5, 3), (6, 35)]
    assert [ctypes.sizeof(x._obj) for _, x, _ in given] == [4, 8] * 3
    assert [c.args[2:] for c in library.cublasLtMatrixLayoutCreate.call_args_list] == [(7, 9, 7), (9, 5, 9), (7, 5, 7)]
    assert [x.shape for x in matmul.operands(a, b, d)] == [x.shape for x in (b, a, d)]
    with pytest.raises(ValueError, match=r"\(m, k\), \(k, n\), \(m, n\), but came as"):
        cublaslt.Matmul(a, b[:2], d)


def require_products(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
    """Every algorithm computes the product of integers whose sums fp32 holds: the exact one, rounded once, or sums of
    parts that were rounded."""
    exact = a.double() @ b.double()
    algorithms = cublaslt.algorithms(a, b, d)
    assert algorithms
    for algorithm in algorithms:
        d.fill_(float("nan"))
        algorithm(a, b, d)
        assert ((d.double() - exact).abs() <= 2**-7 * (exact.abs() + 2 * a.shape[-1] ** 0.5)).all(), str(algorithm)


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", LAYOUTS[::2], ids="".join)
def test_every_algorithm_computes_each_product_of_a_batch(layouts: tuple[str, ...], rng: np.random.Generator) -> None:
    def batch(rows: int, columns: int, layout: str) -> torch.Tensor:
        sizes = (rows, columns) if layout == "n" else (columns, rows)
        values = torch.stack([matrix(rng, *sizes, "n", "cuda") for _ in range(3)])
        return values if layout == "n" else values.mT

    sizes = ((64, 96), (96, 128), (64, 128))
    a, b, d = (batch(*size, layout) for size, layout in zip(sizes, layouts, strict=True))
    require_products(a, b, d)


def test_operands_of_other_dtypes_or_shapes_are_refused() -> None:
    a, b, d = (torch.zeros(4, 4, dtype=torch.bfloat16) for _ in range(3))
    with pytest.raises(ValueError, match=r"all bf16 or all fp16, .* but came as .*float32"):
        cublaslt.Matmul(a, b, d.float())
    with pytest.raises(ValueError, match=r"\(m, k\), \(k, n\), \(m, n\), but came as .*\(4, 3\)"):
        cublaslt.Matmul(a, b[:, :3], d)


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", LAYOUTS, ids="".join)
@pytest.mark.parametrize(("m", "n", "k"), [(256, 384, 512), (1, 768, 2048), (100, 72, 4096)])
def test_every_algorithm_computes_the_product(
    m: int, n: int, k: int, layouts: tuple[str, ...], rng: np.random.Generator
) -> None:
    a, b, d = (matrix(rng, *s, layout, "cuda") for s, layout in zip(((m, k), (k, n), (m, n)), layouts, strict=True))
    require_products(a, b, d)
