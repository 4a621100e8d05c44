"""Calls in generated code: which go through the dispatcher, and that all compute the same.

Tensors on the CPU pass for tensors on a GPU, and what is launched executes in the simulator.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.torch.test_cached_calls import Calls, calls  # noqa: F401 - a fixture
from torch.utils._python_dispatch import TorchDispatchMode

from gemmsmith import deinterleave
from gemmsmith.core.dtypes import BF16
from gemmsmith.core.graph import BroadcastDims
from gemmsmith.graph.frontend.tracer import trace
from gemmsmith.torch import compiled_call, ops
from gemmsmith.torch.compiled_call import MAX_LAYOUTS, CompiledCall
from gemmsmith.torch.graph_serialization import serialize

M, N, K = 24, 32, 16
ROW = BroadcastDims(columns_per_value=1)


class Operator:
    """An operator whose calls are counted."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return ops._cuda_kernel(*arguments)


class Mode(TorchDispatchMode):
    """A mode that sees operators and changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def two_results(acc: Any, bias: Any, factor: Any) -> Any:
    return (acc + bias).relu(), acc * factor


EPILOGUE = serialize(trace(two_results, (M, N), {"bias": (ROW, BF16), "factor": (BroadcastDims(), None)}))
PLAIN = " | accumulator | out 0"


@pytest.fixture
def operator(calls: Calls) -> Operator:  # noqa: F811
    return Operator()


def inputs(m: int = M, dtype: Any = torch.bfloat16) -> tuple[Any, Any, Any]:
    return torch.randn(m, K).to(dtype), torch.randn(N, K).to(dtype).mT, torch.randn(N).bfloat16()


def check(call: Any, a: Any, b: Any, bias: Any, factor: float) -> None:
    first, second = call(a, b, None, None, 0, EPILOGUE, [factor], [bias])
    product = a.double() @ b.double()
    torch.testing.assert_close(first.double(), (product + bias.double()).relu(), rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(second.double(), product * factor, rtol=1e-2, atol=2e-2)


GATED = serialize(trace(lambda acc: deinterleave(acc)[0].silu() * deinterleave(acc)[1], (M, 2 * N), {}))


@torch.no_grad()
def test_two_arrays_b_are_dispatched_within_a_block_that_measures(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring: list[int] = []
    monkeypatch.setattr(compiled_call, "active", lambda block: nullcontext(measuring.append(block.max_configs)))
    a, b, b2 = torch.randn(M, K).bfloat16(), torch.randn(N, K).bfloat16().mT, torch.randn(N, K).bfloat16().mT
    call = CompiledCall(operator, autotune=True)
    for _ in range(2):
        actual = call(a, b, b2, None, 0, GATED, [], [])
        expected = torch.nn.functional.silu(a.double() @ b.double()) * (a.double() @ b2.double())
        torch.testing.assert_close(actual.double(), expected, rtol=2e-2, atol=5e-2)
    assert operator.calls == 2
    assert measuring == [16, 16]


@torch.no_grad()
def test_only_calls_with_new_layouts_are_dispatched(calls: Calls, operator: Operator) -> None:  # noqa: F811
    call = CompiledCall(operator)
    for m, factor in ((M, 2.0), (M, -3.0), (M + 8, 0.5), (M, 0.0), (M + 8, 1.0)):
        check(call, *inputs(m), factor)
    assert operator.calls == 2
    assert calls.launches == 5
    for m in range(8, 8 * (MAX_LAYOUTS + 1), 8):  # as many as are kept
        check(call, *inputs(m), 1.0)
    before = operator.calls
    check(call, *inputs(8), 1.0)
    assert operator.calls == before


@torch.no_grad()
def test_other_strides_and_unaligned_tensors(operator: Operator) -> None:
    call = CompiledCall(operator)
    a, b, bias = inputs()
    check(call, a, b, bias, 1.0)
    check(call, a, b.contiguous(), bias, 1.0)
    assert operator.calls == 2
    unaligned = torch.randn(N + 1).bfloat16()[1:]
    for _ in range(2):
        check(call, a, b, unaligned, 1.0)
    assert operator.calls == 4
    check(call, a, b, bias, 1.0)
    assert operator.calls == 4


def test_what_sees_operators(operator: Operator) -> None:
    call = CompiledCall(operator)
    with torch.no_grad():
        check(call, *inputs(), 1.0)
        with Mode():
            check(call, *inputs(), 1.0)
    check(call, *inputs(), 1.0)  # gradients may be recorded
    assert operator.calls == 3
    with torch.no_grad():
        check(call, *inputs(), 1.0)
    assert operator.calls == 3


@torch.no_grad()
def test_a_tensor_whose_memory_was_freed_is_not_read(operator: Operator) -> None:
    call = CompiledCall(operator)
    a, b, bias = inputs()
    check(call, a, b, bias, 1.0)
    freed = a.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(Exception, match="memory"):
        call(freed, b, None, None, 0, EPILOGUE, [1.0], [bias])


@torch.no_grad()
def test_the_precision_of_fp32_is_torchs_setting(calls: Calls) -> None:  # noqa: F811
    operator = Operator()
    call, (a, b, _) = CompiledCall(operator), inputs(dtype=torch.float32)
    exact, errors = a.double() @ b.double(), []
    before = torch.get_float32_matmul_precision()
    try:
        for setting in ("highest", "high", "highest", "high"):
            torch.set_float32_matmul_precision(setting)
            errors.append((call(a, b, None, None, 0, PLAIN, [], []).double() - exact).abs().max())
    finally:
        torch.set_float32_matmul_precision(before)
    assert errors[0] == errors[2] < errors[1] / 50
    assert errors[1] == errors[3]
    assert operator.calls == 2


@torch.no_grad()
def test_groups_of_rows(calls: Calls) -> None:  # noqa: F811
    operator = Operator()
    call, b = CompiledCall(operator), torch.randn(3, K, N).bfloat16()
    for ends in ([8, 8, 24], [0, 16, 24], [24, 24, 24]):
        a, offsets = torch.randn(M, K).bfloat16(), torch.tensor(ends, dtype=torch.int32)
        actual = call(a, b, None, offsets, 0, PLAIN, [], [])
        rows = zip([0, *ends], ends, b, strict=False)
        expected = torch.cat([a[begin:end].double() @ matrix.double() for begin, end, matrix in rows])
        torch.testing.assert_close(actual.double(), expected, rtol=1e-2, atol=2e-2)
    assert operator.calls == 1
