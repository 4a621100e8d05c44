"""cuBLASLt through ctypes: every algorithm that its heuristic suggests for a GEMM, each callable on its own.

Constants and functions have cublasLt.h's names. The library is the one that torch has loaded, otherwise that of the
nvidia-cublas wheel.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import (
    POINTER,
    byref,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

ALGORITHMS = 32
"""Algorithms that the heuristic is asked for."""
WORKSPACE_BYTES = 32 * 2**20
"""Bytes for split-K: as many as torch gives cuBLAS on Hopper."""

CUBLAS_STATUS_SUCCESS, CUBLAS_STATUS_NOT_SUPPORTED = 0, 15
CUBLAS_OP_N, CUBLAS_OP_T = 0, 1
CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32I, CUBLAS_COMPUTE_32F_FAST_TF32 = 68, 72, 77
CUDA_R_32F, CUDA_R_16F, CUDA_R_8I, CUDA_R_32I, CUDA_R_16BF, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2 = 0, 2, 3, 10, 14, 28, 29
CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSB = 3, 4
CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER = 17, 18
CUBLASLT_MATMUL_DESC_FAST_ACCUM = 25
CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_DESC_B_SCALE_MODE = 31, 32
SCALE_MODES = {"tensor": 0, "rows": 3, "1x128": 4, "128x128": 5}
"""CUBLASLT_MATMUL_MATRIX_SCALE_: SCALAR_32F, OUTER_VEC_32F, VEC128_32F, BLK128x128_32F."""
CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1
CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 5, 6
CONFIG_ATTRIBUTES = {  # CUBLASLT_ALGO_CONFIG_...: its number, its type, its name here
    "ID": (0, c_int32, "algo"),
    "TILE_ID": (1, c_uint32, "tile"),
    "STAGES_ID": (6, c_uint32, "stages"),
    "CLUSTER_SHAPE_ID": (8, c_uint16, "cluster"),
    "SPLITK_NUM": (2, c_int32, "splitk"),
    "REDUCTION_SCHEME": (3, c_uint32, "reduction"),
    "CTA_SWIZZLING": (4, c_uint32, "swizzling"),
    "CUSTOM_OPTION": (5, c_uint32, "custom"),
}
DTYPES = {
    torch.float16: CUDA_R_16F, torch.bfloat16: CUDA_R_16BF, torch.float32: CUDA_R_32F, torch.int8: CUDA_R_8I,
    torch.int32: CUDA_R_32I, torch.float8_e4m3fn: CUDA_R_8F_E4M3, torch.float8_e5m2: CUDA_R_8F_E5M2,
}  # fmt: skip
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
Scales = tuple[torch.Tensor, torch.Tensor]
"""Scales of A and of B in cuBLASLt's layouts: torch._scaled_mm's."""


class MatmulAlgo(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = [("data", c_uint64 * 8)]


class MatmulHeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [("algo", MatmulAlgo), ("workspaceSize", c_size_t), ("state", c_int), ("wavesCount", c_float),
                ("reserved", c_int * 4)]  # fmt: skip


PROTOTYPES = {
    "cublasLtCreate": [POINTER(c_void_p)],
    "cublasLtMatmulDescCreate": [POINTER(c_void_p), c_int, c_int],
    "cublasLtMatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatrixLayoutCreate": [POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatrixLayoutSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmulPreferenceCreate": [POINTER(c_void_p)],
    "cublasLtMatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmulAlgoGetHeuristic": [*[c_void_p] * 7, c_int, POINTER(MatmulHeuristicResult), POINTER(c_int)],
    "cublasLtMatmulAlgoConfigGetAttribute": [c_void_p, c_int, c_void_p, c_size_t, POINTER(c_size_t)],
    "cublasLtMatmul": [*[c_void_p] * 14, c_size_t, c_void_p],
}


class CublasLtError(RuntimeError):
    """A function of cuBLASLt returned a status other than CUBLAS_STATUS_SUCCESS."""

    def __init__(self, function: str, status: int) -> None:
        super().__init__(f"{function} returned status {status}")
        self.status = status


@cache
def library() -> Any:
    """Return libcublasLt with its prototypes; functions that fail raise CublasLtError.

    Raises FileNotFoundError if it is not installed.
    """
    maps = Path("/proc/self/maps")
    loaded = {line.split()[-1] for line in maps.read_text().splitlines()} if maps.exists() else set()
    wheels = (file for folder in sys.path for file in Path(folder).glob("nvidia/*/lib/libcublasLt.so*"))
    path = next((file for file in [*loaded, *map(str, wheels)] if Path(file).name.startswith("libcublasLt.so")), None)
    if path is None:
        raise FileNotFoundError("no libcublasLt: install torch with CUDA, or the wheel nvidia-cublas")
    lt = ctypes.CDLL(path)
    lt.cublasLtGetVersion.restype = c_size_t
    for name, types in PROTOTYPES.items():
        function = getattr(lt, name)
        function.argtypes, function.errcheck = types, _checked
    return lt


def _checked(status: int, function: Any, _: tuple[Any, ...]) -> None:
    if status != CUBLAS_STATUS_SUCCESS:
        raise CublasLtError(function.__name__, status)


@cache
def handle() -> c_void_p:
    """Return a handle for the device that is current at the first call."""
    torch.cuda.init()
    return created("cublasLtCreate")


@cache
def workspace() -> torch.Tensor:
    """Return the memory for split-K, on the current device."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def created(function: str, *arguments: int) -> c_void_p:
    """Return what a cublasLt...Create function creates."""
    made = c_void_p()
    getattr(library(), function)(byref(made), *arguments)
    return made


@cache
def preference() -> c_void_p:
    """Return a preference for any algorithm that needs at most WORKSPACE_BYTES."""
    made = created("cublasLtMatmulPreferenceCreate")
    attribute, limit = CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, c_uint64(WORKSPACE_BYTES)
    library().cublasLtMatmulPreferenceSetAttribute(made, attribute, byref(limit), ctypes.sizeof(limit))
    return made


def transposed(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Return x^T as cuBLASLt takes it: (op, rows, columns, leading dimension). op of that column-major matrix is x^T.

    The argument x is a matrix, or a batch of them, row-major or column-major. Raises ValueError for other strides.
    """
    for op, row_major in ((CUBLAS_OP_N, x), (CUBLAS_OP_T, x.mT)):
        (outer, inner), (ld, step) = row_major.shape[-2:], row_major.stride()[-2:]
        if (step == 1 or inner == 1) and (ld >= inner or outer == 1):
            return op, inner, outer, max(ld, inner)
    raise ValueError(f"operands are row-major or column-major, but one has the shape {x.shape}, strides {x.stride()}")


def matrix_layout(x: torch.Tensor, rows: int, columns: int, ld: int) -> c_void_p:
    """Return the layout of a column-major matrix of x's dtype, batched if x has three dimensions."""
    made = created("cublasLtMatrixLayoutCreate", DTYPES[x.dtype], rows, columns, ld)
    if x.dim() == 3:
        count, offset = c_int32(x.shape[0]), c_int64(x.stride(0))
        for attribute, value in (
            (CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, count), (CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, offset)
        ):  # fmt: skip
            library().cublasLtMatrixLayoutSetAttribute(made, attribute, byref(value), ctypes.sizeof(value))
    return made


class Matmul:
    """cuBLASLt's descriptors of D = A B in fp32, written D^T = B^T A^T, for its matrices are column-major.

    Here a is (m, k), b (k, n), d (m, n), or all with a batch first, each row-major or column-major. The dtypes are all
    bf16 or all fp16; fp32, multiplied as TF32 unless `tf32` is False; int8 with an int32 d; or fp8 with a bf16 d, for
    which `modes` are the SCALE_MODES of a's and b's scales and `fast` is CUBLASLT_MATMUL_DESC_FAST_ACCUM. Raises
    ValueError for others, and CublasLtError if cuBLASLt rejects them. The descriptors, a few hundred bytes on the host,
    are never freed.
    """

    def __init__(
        self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, modes: tuple[str, str] | None = None,
        fast: bool = False, tf32: bool = True,
    ) -> None:  # fmt: skip
        compute, of_alpha = kinds(a.dtype, b.dtype, d.dtype, tf32)
        (*batch, m, k), n = a.shape, b.shape[-1]
        if (tuple(b.shape), tuple(d.shape)) != ((*batch, k, n), (*batch, m, n)):
            raise ValueError(f"a, b, d are (m, k), (k, n), (m, n), but came as {[tuple(x.shape) for x in (a, b, d)]}")
        self.of_transpose = transposed(d)[0] == CUBLAS_OP_T
        """Whether D is column-major. Then D^T is row-major, and the problem is D^T = B^T A^T to begin with."""
        self.factors = (c_int32(1), c_int32(0)) if of_alpha == CUDA_R_32I else (c_float(1), c_float(0))
        """alpha and beta."""
        self.desc = created("cublasLtMatmulDescCreate", compute, of_alpha)
        operands = self.operands(a, b, d)
        (op_a, *layout_a), (op_b, *layout_b), (_, *layout_d) = map(transposed, operands)
        self.set(CUBLASLT_MATMUL_DESC_TRANSA, c_int32(op_a))
        self.set(CUBLASLT_MATMUL_DESC_TRANSB, c_int32(op_b))
        if modes:
            first, second = self.operands(*modes, "")[:2]
            self.set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, c_int32(SCALE_MODES[first]))
            self.set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, c_int32(SCALE_MODES[second]))
        if fast:
            self.set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, c_int8(1))
        self.layouts = [
            matrix_layout(x, *sizes) for x, sizes in zip(operands, (layout_a, layout_b, layout_d), strict=True)
        ]

    def set(self, attribute: int, value: Any) -> None:
        library().cublasLtMatmulDescSetAttribute(self.desc, attribute, byref(value), ctypes.sizeof(value))

    def scale(self, scales: Scales) -> None:
        first, second = self.operands(*scales, scales[0])[:2]
        self.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, c_void_p(first.data_ptr()))
        self.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, c_void_p(second.data_ptr()))

    def operands(self, a: Any, b: Any, d: Any) -> tuple[Any, ...]:
        """Return cuBLASLt's A, B and D for ours, or their scales in that order."""
        if not self.of_transpose:
            return b, a, d
        return tuple(x.mT if isinstance(x, torch.Tensor) and x.dim() >= 2 else x for x in (a, b, d))

    def heuristic(self) -> list[MatmulHeuristicResult]:
        """Return up to ALGORITHMS that cuBLASLt suggests; the first is the one that it expects to be the fastest."""
        a, b, d = self.layouts
        results, count = (MatmulHeuristicResult * ALGORITHMS)(), c_int()
        try:
            library().cublasLtMatmulAlgoGetHeuristic(
                handle(), self.desc, a, b, d, d, preference(), ALGORITHMS, results, byref(count)
            )
        except CublasLtError as error:
            if error.status != CUBLAS_STATUS_NOT_SUPPORTED:  # it knows none for these layouts
                raise
        return [f for f in results[: count.value] if f.state == CUBLAS_STATUS_SUCCESS]


@dataclass(frozen=True, eq=False)
class Algorithm:
    """One of cuBLASLt's algorithms for a matmul, called with operands of the same shapes, strides and dtypes."""

    matmul: Matmul
    algo: MatmulAlgo

    def __call__(self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, *scales: torch.Tensor) -> None:
        """Compute D = A B on the current stream. Raises CublasLtError if the algorithm does not run."""
        if scales:
            self.matmul.scale((scales[0], scales[1]))
        one, zero = self.matmul.factors
        left, right, result = (x.data_ptr() for x in self.matmul.operands(a, b, d))
        of_left, of_right, of_result = self.matmul.layouts
        library().cublasLtMatmul(
            handle(), self.matmul.desc, byref(one), left, of_left, right, of_right, byref(zero), result, of_result,
            result, of_result, byref(self.algo), workspace().data_ptr(), WORKSPACE_BYTES,
            torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip

    def __str__(self) -> str:
        """Return its configuration in cublasLt.h's ids: "algo 66, tile 393, ..."."""
        parts = []
        for number, kind, name in CONFIG_ATTRIBUTES.values():
            value, written = kind(), c_size_t()
            library().cublasLtMatmulAlgoConfigGetAttribute(
                byref(self.algo), number, byref(value), ctypes.sizeof(value), byref(written)
            )
            parts.append(f"{name} {value.value}")
        return ", ".join(parts)


def kinds(a: torch.dtype, b: torch.dtype, d: torch.dtype, tf32: bool = True) -> tuple[int, int]:
    """Return cublasComputeType_t and the type of alpha for operands of these dtypes. Raises ValueError for others."""
    if a == b == d and d in (torch.bfloat16, torch.float16):
        return CUBLAS_COMPUTE_32F, CUDA_R_32F
    if a == b == d == torch.float32:
        return CUBLAS_COMPUTE_32F_FAST_TF32 if tf32 else CUBLAS_COMPUTE_32F, CUDA_R_32F
    if a == b == torch.int8 and d == torch.int32:
        return CUBLAS_COMPUTE_32I, CUDA_R_32I
    if a in FP8 and b in FP8 and d == torch.bfloat16:
        return CUBLAS_COMPUTE_32F, CUDA_R_32F
    raise ValueError(
        "a, b and d are all bf16 or all fp16, all fp32, int8 with d of int32, or fp8 with d of bf16, but came as "
        f"{a}, {b} and {d}"
    )


def algorithms(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    modes: tuple[str, str] | None = None,
    scales: Scales | None = None,
    fast: bool = False,
    tf32: bool = True,
) -> list[Algorithm]:
    """Return the algorithms that cuBLASLt's heuristic suggests for D = A B.

    The shapes are a (m, k), b (k, n), d (m, n), of Matmul's dtypes, on the GPU and aligned to 256 bytes, as torch
    allocates them; `modes` and `scales` are for fp8.
    """
    matmul = Matmul(a, b, d, modes, fast, tf32)
    if scales:  # without their addresses it suggests nothing
        matmul.scale(scales)
    return [Algorithm(matmul, heuristic.algo) for heuristic in matmul.heuristic()]
