"""The operators on the CPU: opcheck for all numbers of operands, the reference's values, layouts, and errors."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import gemmsmith
from gemmsmith.core.dtypes import BF16, E4M3, FP32
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph, Node, Operand, Result, identity_graph
from gemmsmith.torch import gemm
from gemmsmith.torch.graph_serialization import digest, serialize
from gemmsmith.torch.ops import MAX_OPERANDS, MAX_RESULTS, OPERATORS, call_op, op_signature


def summed(inputs: int, outputs: int) -> str:
    """Return the serialized epilogue acc + x0 + x1 ..., with further results of it."""
    nodes = [Node("accumulator")]
    for i in range(inputs):
        nodes += [Node("operand", (), f"x{i}"), Node("add", (len(nodes) - 1, len(nodes)))]
    last = len(nodes) - 1
    nodes += [Node("reduce", (last,), ("sum", axis)) for axis in ("n", "m", "all")[: outputs - 1]]
    results = tuple(Result(f"out{i or ''}", last + i) for i in range(outputs))
    return serialize(
        EpilogueGraph(
            tuple(nodes),
            tuple(Operand(f"x{i}", BroadcastDims(columns_per_value=1), BF16) for i in range(inputs)),
            results,
        )
    )


@pytest.mark.parametrize("inputs", range(MAX_OPERANDS + 1))
@pytest.mark.parametrize("outputs", range(1, MAX_RESULTS + 1))
def test_every_arity_passes_opcheck(inputs: int, outputs: int) -> None:
    text = summed(inputs, outputs)
    a, b = torch.randn(5, 8).bfloat16(), torch.randn(8, 16).bfloat16()
    operands = [torch.randn(16).bfloat16() for _ in range(inputs)]
    torch.library.opcheck(OPERATORS[outputs], (a, b, None, None, digest(text), text, [], operands))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [((5, 24), (24, 16)), ((3, 5, 24), (24, 16)), ((5, 24), (2, 24, 16))])
def test_values_are_those_of_gemm(shape, dtype) -> None:
    def epilogue(acc, bias, alpha):
        z = acc * alpha + bias
        return z.relu(), z, z.sum(-1, keepdim=True), z.max()

    a, b = (torch.randn(s).to(dtype) for s in shape)
    bias = torch.randn(16)
    plan = gemmsmith.plan(a, b, epilogue=epilogue, bias=bias, alpha=0.5)
    actual = call_op(serialize(plan._planned.binding.source_graph), a, b, [0.5], [bias])
    expected = gemmsmith.gemm(a, b, epilogue=epilogue, bias=bias, alpha=0.5)
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == y.dtype
        assert x.stride() == y.stride()
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_numbers_and_batches_pass_opcheck() -> None:
    nodes = (Node("accumulator"), Node("operand", (), "s"), Node("mul", (0, 1)), Node("operand", (), "x"))
    operands = (Operand("s", BroadcastDims()), Operand("x", BroadcastDims(True, 1, 1), BF16))
    text = serialize(EpilogueGraph((*nodes, Node("add", (2, 3))), operands, (Result("out", 4),)))
    a, b, x = (torch.randn(s).bfloat16() for s in ((2, 5, 8), (8, 16), (2, 5, 16)))
    torch.library.opcheck(OPERATORS[1], (a, b, None, None, digest(text), text, [0.5], [x]))


def test_another_number_is_no_other_epilogue() -> None:
    """No new kernel is compiled for it."""
    called: list[Any] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(args)
            return func(*args, **(kwargs or {}))

    a, b = torch.randn(5, 8).bfloat16(), torch.randn(8, 16).bfloat16()
    with Watch():
        for s in (0.5, 3):
            gemm(a, b, epilogue=lambda acc, s: acc * s, s=s)
    (_, _, *first, half, _), (_, _, *second, three, _) = called
    assert first == second
    assert (half, three) == ([0.5], [3.0])


@pytest.mark.parametrize("rows", [1, 3])
def test_sums_of_int8_are_exact_and_wrap(rows: int) -> None:
    """Beyond 2^24, and beyond int32."""
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((rows, 140_001), (140_001, 5)))
    a[0], b[:, 0] = 127, 127
    b[:, 1], b[0, 1] = 126, 125
    expected = (a.long() @ b.long()).int()
    assert expected[0, 0] < 0
    assert torch.equal(gemm(a, b), expected)
    halved = gemm(a, b, epilogue=lambda acc: (acc * 0.5).float())
    torch.testing.assert_close(halved, expected.double().mul(0.5).float(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_results_saturate(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    a = torch.tensor([[1e30], [-1e30], [torch.inf], [torch.nan], [1]]).bfloat16()
    actual = gemm(a, torch.ones(1, 16).bfloat16(), epilogue=lambda acc: (acc.to(dtype), acc.to(dtype).float() * 2))
    expected = torch.tensor([limit, -limit, limit, torch.nan, 1])
    torch.testing.assert_close(actual[0][:, 0].float(), expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(actual[1][:, 0], (expected * 2).bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_float64_is_not_rounded() -> None:
    a, b, bias = (torch.randn(s, dtype=torch.float64) for s in ((5, 8), (8, 16), (16,)))
    d, total = call_op(summed(1, 2), a, b, [], [bias])
    assert d.dtype == total.dtype == torch.float64
    torch.testing.assert_close(d, a @ b + bias, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(total, (a @ b + bias).sum(-1), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("strides", [(8, 1), (1, 5)])
def test_results_are_row_major_whatever_the_inputs_are(strides) -> None:
    a = torch.empty_strided((5, 8), strides, dtype=torch.bfloat16).normal_()
    out = call_op(summed(0, 1), a, torch.randn(16, 8).bfloat16().T, [], [])
    assert out.stride() == (16, 1)


def test_scales_lie_as_the_next_product_reads_them() -> None:
    """In fake tensors with symbolic sizes, too."""
    nodes = Node("accumulator"), Node("quantize", (0,), (E4M3, 128)), Node("scale", (1,))
    text = serialize(EpilogueGraph(nodes, (), (Result("out", 1, E4M3), Result("out1", 2, FP32))))
    compiled = torch.compile(lambda a, b: call_op(text, a, b, [], []), backend="aot_eager", fullgraph=True)
    b = torch.randn(8, 256).bfloat16()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in (5, 7, 12):
            a = torch.randn(m, 8).bfloat16()
            torch._dynamo.mark_dynamic(a, 0)
            for actual, expected in zip(compiled(a, b), call_op(text, a, b, [], []), strict=True):
                assert actual.stride() == expected.stride()
            assert expected.stride() == (1, -(-m // 4) * 4)


def test_fakes_keep_symbolic_sizes() -> None:
    """One graph for any m."""
    text = summed(1, 3)
    compiled = torch.compile(lambda a, b, x: call_op(text, a, b, [], [x]), backend="aot_eager", fullgraph=True)
    b, x = torch.randn(8, 16).bfloat16(), torch.randn(16).bfloat16()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in (5, 7, 11):
            a = torch.randn(m, 8).bfloat16()
            torch._dynamo.mark_dynamic(a, 0)
            for actual, expected in zip(compiled(a, b, x), call_op(text, a, b, [], [x]), strict=True):
                assert actual.stride() == expected.stride()
                torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_another_process_reads_the_text() -> None:
    """The whole epilogue is in the call."""
    text = summed(0, 1)
    code = (
        "import torch, gemmsmith.torch.ops\n"
        f"a, op = torch.ones(4, 8).bfloat16(), torch.ops.gemmsmith.gemm_1\n"
        f"print(op(a, a.T, None, None, {digest(text)}, {text!r}, [], []))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.count("8.") == 16


def test_flops_are_counted() -> None:
    with FlopCounterMode(display=False) as counter:
        call_op(summed(0, 1), torch.randn(2, 5, 8).bfloat16(), torch.randn(8, 16).bfloat16(), [], [])
    assert counter.get_total_flops() == 2 * 2 * 5 * 8 * 16


def test_an_empty_product() -> None:
    out = call_op(serialize(identity_graph(BF16)), torch.randn(4, 0).bfloat16(), torch.randn(0, 16).bfloat16(), [], [])
    assert not out.any()


def test_gradients_are_never_lost() -> None:
    """The operator itself records them, as in an exported program."""
    a, b = (torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    pairs = call_op(summed(0, 2), a, b, [], []), (a @ b, (a @ b).sum(-1))
    for y, z in zip(
        *(torch.autograd.grad([y.square().sum() for y in results], (a, b)) for results in pairs), strict=True
    ):
        torch.testing.assert_close(y, z)
    with torch.no_grad():
        assert not call_op(summed(0, 1), a, b, [], []).requires_grad


def test_limits() -> None:
    with pytest.raises(ArgumentError, match="operands: got 9 tensors; use at most 8"):
        op_signature(summed(9, 1))
    with pytest.raises(ArgumentError, match=r"got shapes \(5, 8\) and \(9, 16\)"):
        call_op(summed(0, 1), torch.randn(5, 8).bfloat16(), torch.randn(9, 16).bfloat16(), [], [])


VALUES = {"int": 1, "bool": False, "str": "silu", "float": 1.0, "List[float]": [], "List[bool]": [True, True]}


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_operator_refuses_tensors_on_several_devices(device: str) -> None:
    """The dispatcher calls the kernel of one device: if one is on meta the fake one, which leaves memory as it is."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("gemmsmith::")]
    assert {"gemmsmith::gemm_1", "gemmsmith::gated_experts", "gemmsmith::fp8_mlp"} <= {*names}
    for name in names:
        schema, count = torch._C._get_schema(name, ""), re.search(r"_(\d)$", name)
        arguments = {x.name: VALUES.get(str(x.type), torch.ones(8, 8)) for x in schema.arguments}
        if "epilogue" in arguments:
            arguments["epilogue"] = summed(1, int(count[1]) if count else 1)
        lists = {x.name for x in schema.arguments if str(x.type) == "List[Tensor]"}
        first, *others = [x for x, value in arguments.items() if isinstance(value, torch.Tensor)]
        op = getattr(torch.ops.gemmsmith, name.removeprefix("gemmsmith::"))
        for moved in (first, *others) if others else ():
            values = {**arguments, moved: arguments[moved].to(device)}
            named = others[0] if moved == first else moved
            message = f"^{named}: got a tensor on ({device}|cpu).* with {first} on ({device}|cpu).*; use one device"
            with pytest.raises(ArgumentError, match=message):
                op(*[[x] if name in lists else x for name, x in values.items()])


def test_meta_tensors_alone_have_shapes() -> None:
    a, b = torch.empty(5, 8, device="meta"), torch.empty(8, 16, device="meta")
    y = gemm(a, b, epilogue=lambda acc: acc.relu())
    assert y.is_meta
    assert y.shape == (5, 16)
