"""Ready-made fusions at the default config: compiled for the chip, without spills."""

from __future__ import annotations

import math

import numpy as np
import pytest

import gemmsmith
from gemmsmith import Config, Spec
from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.graph.frontend.fusions import ACTIVATIONS, NAMED_FUSIONS, bias_activation

WHOLE_ROWS = {"LinCombTopKSoftmaxCol"}
GIVEN = {
    "LinCombTopKSoftmaxCol": (2,), "LinCombDeEltAct": ("gelu",), "LinCombDeEltActDePerRowBias": ("silu",),
    "block_quantized": (bias_activation("silu"),),
}  # fmt: skip
"""What a factory needs."""
MORE = {"block_quantized": {"bias": "row"}}


def plan_of(epilogue, operands: dict[str, str], n: int = 4096) -> gemmsmith.Plan:
    shapes = {"row": (n,), "column": (4096, 1), "matrix": (4096, n)}
    given = {name: 0.5 if kind == "scalar" else Spec(shapes[kind], "bf16") for name, kind in operands.items()}
    a, b = Spec((4096, 4096), "bf16"), Spec((4096, n), "bf16", (1, 4096))
    return gemmsmith.plan(a, b, epilogue=epilogue, operands=given)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED_FUSIONS)
def test_no_spills(name: str) -> None:
    given = GIVEN.get(name, ())
    plan = plan_of(
        NAMED_FUSIONS[name].make(*given),
        {**NAMED_FUSIONS[name].operands, **MORE.get(name, {})},
        128 if name in WHOLE_ROWS else 4096,
    )
    r = plan.resources
    assert (r.spill_store_bytes, r.spill_load_bytes, r.stack_bytes, r.advisories) == (0, 0, 0, ())


@pytest.mark.slow
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str) -> None:
    plan = plan_of(bias_activation(activation), {"bias": "row"})
    assert (plan.resources.spill_store_bytes, plan.resources.stack_bytes) == (0, 0)


@pytest.mark.parametrize("tile", [(128, 256, 64), (128, 8, 64), (256, 128, 64)])
def test_gated_epilogues_of_swapped_tiles(tile: tuple[int, int, int]) -> None:
    def gated(acc, bias, c):
        gate, up = gemmsmith.deinterleave(acc + bias)
        return gate.silu() * up + c

    a, b = Spec((512, 4096), "bf16"), Spec((4096, 4096), "bf16", (1, 4096))
    given = {"bias": Spec((4096,), "bf16"), "c": Spec((512, 2048), "bf16")}
    config = Config(tile=tile, cluster=(1, 1), stages=3, swap_ab=True)
    plan = gemmsmith.plan(a, b, epilogue=gated, operands=given, config=config)
    assert (plan.resources.spill_store_bytes, plan.resources.stack_bytes) == (0, 0)


def test_function_and_tree_make_the_same_kernel() -> None:
    """The worked example of the literature."""
    from examples.bce import bce, bce_tree

    one, other = (plan_of(x, {"bias": "column", "labels": "matrix"}) for x in (bce, bce_tree()))
    assert one.source == other.source
    assert one.epilogue == other.epilogue


def test_any_name_makes_a_kernel_that_compiles() -> None:
    """Words of C++, names that another's arguments or registers might have, and letters beyond ASCII."""

    def named(acc, default, default_row, new, new_2, größe, max, fabsf):
        x = acc * default + default_row + new * new_2 + größe * fabsf
        results = {"x": x, "x_row": x * 2, "row": x * 3, "class": x.sum(-1), "class_2": x.max(-2), "größe_2": x.min(-1)}
        return {**results, "float": x + max}

    kinds = {"default": "column", "default_row": "column", "new": "row", "new_2": "row", "größe": "matrix",
             "max": "matrix", "fabsf": "column"}  # fmt: skip
    plan = plan_of(named, kinds, 130)  # TMA can neither read nor write these
    assert plan.resources.spill_store_bytes == 0
    names = [p.name for p in plan._planned.kernel.parameters]
    assert len(set(names)) == len(names)


def test_numbers_that_fp32_does_not_have() -> None:
    def extreme(acc):
        x = acc.clamp(max=1e300).clamp(min=-(10**400)) * 1e-60 + 1e-40
        return {"out": x, "nan": acc.where(acc > math.nan, 1e39), "sum": np.where(acc > 0, 1e38, 1e38).sum()}

    assert plan_of(extreme, {}).resources.spill_store_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_reductions_and_scales_of_every_dtype(dtype: str) -> None:
    def small(acc):
        q, s = gemmsmith.quantize(acc)
        return q, s.to(dtype), acc.sum(-1).to(dtype), acc.logsumexp(-2).to(dtype), acc.mean().to(dtype)

    plan = plan_of(small, {})
    assert plan._planned.compiled.cubin
    _, second = plan._planned.launches.all
    assert compile_source(second.kernel.source, second.kernel.name).resources.spill_store_bytes == 0


@pytest.mark.parametrize("dtype", ["int32", "int64", "bool"])
def test_operands_of_every_integer(dtype: str) -> None:
    def read(acc, row, column, matrix, scalar):
        return acc * row + column * matrix + scalar

    given = {"row": (256,), "column": (128, 1), "matrix": (128, 256), "scalar": ()}
    operands = {name: Spec(shape, dtype) for name, shape in given.items()}
    plan = gemmsmith.plan(Spec((128, 64), "bf16"), Spec((64, 256), "bf16"), epilogue=read, operands=operands)
    assert plan.resources.spill_store_bytes == 0
