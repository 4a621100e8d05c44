"""A GEMM with an epilogue in a jitted function of JAX: the exported kernel on a GPU, a float64 reference on a CPU.

pip install jax jax-tvm-ffi ninja; python examples/jax_gemm.py

The kernel needs g++ and cuda.h (CUDA_HOME) once, and serves any shapes whose rows are aligned to 16 bytes.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax_tvm_ffi
import numpy as np
import tvm_ffi

import gemmsmith
from gemmsmith import Spec


def bias_gelu(acc: Any, bias: Any) -> Any:
    return (acc + bias).gelu()


def kernel() -> tvm_ffi.Function:
    """Return the exported kernel: of a, b, bias and out, row-major bf16."""
    a, b, bias = Spec((4096, 1024), "bf16"), Spec((1024, 4096), "bf16"), Spec((4096,), "bf16")
    plan = gemmsmith.plan(a, b, epilogue=bias_gelu, bias=bias)
    folder = Path(tempfile.mkdtemp())
    plan.export(folder, "fused", tvm_ffi=True)
    include = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    library = tvm_ffi.cpp.build(
        "fused", cpp_files=str(folder / "fused_tvm_ffi.cc"), extra_include_paths=[str(folder), str(include)],
        extra_ldflags=["-ldl"], build_directory=str(folder),
    )  # fmt: skip
    return tvm_ffi.load_module(library).fused


@tvm_ffi.convert
def reference(a: tvm_ffi.Tensor, b: tvm_ffi.Tensor, bias: tvm_ffi.Tensor, out: tvm_ffi.Tensor) -> None:
    """What the kernel computes, for arrays on the host."""
    gemmsmith.gemm(a, b, out=out, epilogue=bias_gelu, bias=bias)


def register() -> None:
    """Make "fused" known to JAX, on the CPU and where there is a GPU on it."""
    jax_tvm_ffi.register_ffi_target("fused", reference, platform="cpu", pass_owned_tensor=True)
    if jax.default_backend() == "gpu":
        jax_tvm_ffi.register_ffi_target("fused", kernel(), platform="gpu", allow_cuda_graph=True)


def fused(a: jax.Array, b: jax.Array, bias: jax.Array) -> jax.Array:
    """gelu(a @ b + bias)."""
    result = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), jnp.bfloat16)
    return jax.ffi.ffi_call("fused", result)(a, b, bias)


@jax.jit
def error(a: jax.Array, b: jax.Array, bias: jax.Array) -> jax.Array:
    """The largest difference from JAX's own result in fp32."""
    want = jax.nn.gelu(a.astype(jnp.float32) @ b.astype(jnp.float32) + bias, approximate=False)
    return jnp.abs(fused(a, b, bias) - want).max()


def main() -> None:
    register()
    keys = jax.random.split(jax.random.key(np.random.default_rng().integers(1 << 30)), 3)
    shapes = (300, 128), (128, 256), (256,)
    a, b, bias = (jax.random.normal(key, shape, jnp.bfloat16) / 4 for key, shape in zip(keys, shapes, strict=True))
    print(f"{jax.default_backend()}: largest error {error(a, b, bias):.4f}")


if __name__ == "__main__":
    main()
