"""Calls of plain tensors that run the launches of an earlier call: which do, and that they compute the same.

Tensors on the CPU pass for tensors on a GPU, and what is launched executes in the simulator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.foreign import comparison
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import gemmsmith
import gemmsmith.torch as gt
from gemmsmith.arrays import ArrayInfo, access
from gemmsmith.backends.cuda import run as cuda
from gemmsmith.backends.sim.run import run as simulate
from gemmsmith.core.errors import ArgumentError
from gemmsmith.epilogue.outputs import result_argument
from gemmsmith.torch import cached_call, fallback, graph_serialization, ops
from gemmsmith.torch.plain_tensors import MAX_LAYOUTS

M, K, N, G = 24, 16, 24, 3
same_gradients = partial(comparison.same_gradients, backend="sim", of_gradients=4)


class Calls:
    """What ran: the operators that were dispatched, and how many launches were simulated."""

    def __init__(self) -> None:
        self.dispatched: list[str] = []
        self.launches = 0


class SimulatedLaunches(cuda.BoundLaunches):
    """Launches that are executed on the CPU."""

    calls: Calls

    def __init__(self, launches: Any, arguments: Any, like: Any, unallocated_results: Any) -> None:
        self.launches, self.arguments, self._arrays = launches, arguments, access.adapter_of(like)
        layouts = {name: (tuple(x.shape), x.dtype, x.strides) for name, x in unallocated_results.items()}
        self.unallocated_results = [(name, result_argument(name), layout) for name, layout in layouts.items()]

    def for_one_call(self) -> SimulatedLaunches:
        return self

    def outputs_do_not_overlap(self, addresses: Any) -> bool:
        return True

    def launch(self, addresses: dict[str, Any], like: Any, workspace: Any) -> None:
        arguments: dict[str, Any] = {}
        for name, x in self.arguments.items():
            arguments[name] = addresses[name]
            if isinstance(x, ArrayInfo):
                arguments[name] = given = x._replace(device="cpu", address=addresses[name])
                assert given.alignment == x.alignment
        assert not simulate(self.launches, arguments, 0, None).hazards
        self.calls.launches += 1


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    ran = Calls()

    def dispatch(epilogue: str, a: Any, b: Any, numbers: Any, operands: Any, offsets: Any) -> Any:
        ran.dispatched.append(epilogue)
        return ops._cuda_kernel(a, b, None, offsets, 0, epilogue, numbers, operands)

    def dispatch_slices(a: Any, b: Any, offsets: Any) -> Any:
        ran.dispatched.append("along k")
        return ops._slices_cuda(a, b, offsets)

    monkeypatch.setattr(SimulatedLaunches, "calls", ran, raising=False)
    monkeypatch.setattr(cuda, "BoundLaunches", SimulatedLaunches)
    monkeypatch.setattr(ops, "_dispatch", dispatch)
    monkeypatch.setattr(ops, "SLICES", dispatch_slices)
    monkeypatch.setattr(fallback, "kernels_unsupported", lambda device: False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", None, raising=False)  # allocate without CUDA
    monkeypatch.setattr(access, "_ADAPTERS", {})
    return ran


def drawn(*shape: int, by: float = 1.0, dtype: Any = torch.bfloat16) -> Any:
    return (torch.randn(shape) * by).to(dtype).requires_grad_()


def inputs(*leading: int) -> tuple[Any, Any, Any]:
    return drawn(*leading, M, K), drawn(N, K, by=K**-0.5), drawn(N)


def biased(acc: Any, bias: Any) -> Any:
    return (acc + bias).sigmoid()


def fused(x: Any, w: Any, bias: Any, **others: Any) -> Any:
    return gt.gemm(x, w.mT, epilogue=biased, bias=bias, **others)


def plain(x: Any, w: Any, bias: Any) -> Any:
    return biased(x @ w.mT, bias)


def cached(calls: Calls, call: Callable[[], Any]) -> Any:
    """Return the result of a call that dispatches nothing and launches something."""
    dispatched, launches = len(calls.dispatched), calls.launches
    result = call()
    assert calls.dispatched[dispatched:] == []
    assert calls.launches > launches
    return result


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("leading", [(), (2,), (2, 2)])
def test_gradients(leading: tuple[int, ...], recompute: bool, calls: Calls) -> None:
    call = partial(fused, recompute=recompute)
    same_gradients(call, plain, *inputs(*leading))
    same_gradients(call, plain, *inputs(*leading))
    cached(calls, lambda: same_gradients(call, plain, *inputs(*leading)))


def test_rows_that_are_copied(calls: Calls) -> None:
    def transposed() -> Any:
        return drawn(M, 2, K).detach().transpose(0, 1).requires_grad_()

    for _ in range(2):
        same_gradients(fused, plain, transposed(), *inputs()[1:])
    cached(calls, lambda: same_gradients(fused, plain, transposed(), *inputs()[1:]))


def test_several_results_by_name_and_a_number(calls: Calls) -> None:
    def named(acc: Any, bias: Any, factor: Any) -> Any:
        z = (acc + bias).tanh() * factor
        return {"z": z, "sums": z.sum(-1)}

    def call(factor: Any, *tensors: Any) -> Any:
        x, w, bias = tensors
        results = gt.gemm(x, w.mT, epilogue=named, bias=bias, factor=factor)
        return results["z"], results["sums"]

    def exact(factor: Any, x: Any, w: Any, bias: Any) -> Any:
        return tuple(named(x @ w.mT, bias, factor).values())

    for factor in (1.5, 3):
        same_gradients(partial(call, factor), partial(exact, factor), *inputs())
    cached(calls, lambda: same_gradients(partial(call, -2), partial(exact, -2), *inputs()))
    with pytest.raises(ArgumentError, match="factor: got"):
        call(1e300, *inputs())


def test_operators(calls: Calls) -> None:
    """As compiled code calls them: through the dispatcher, whose Autograd kernel finds what ran."""
    x, w, bias = (y.detach() for y in inputs())
    epilogue = graph_serialization.serialize(
        gemmsmith.plan(x, w.mT, epilogue=biased, bias=bias)._planned.binding.source_graph
    )
    arguments = w.mT, None, None, ops.op_signature(epilogue)[1], epilogue, [], [bias]
    want = ops.call_op(epilogue, x, w.mT, [], [bias])
    launches = calls.launches
    for y in (x, x.clone()):
        assert torch.equal(ops.OPERATORS[1](y, *arguments), want)
    assert calls.launches == launches + 2
    with pytest.raises(ArgumentError, match="dual"), forward_ad.dual_level():
        ops.OPERATORS[1](forward_ad.make_dual(x, x), *arguments)


def test_operators_of_groups(calls: Calls) -> None:
    x, w = drawn(M, K).detach(), drawn(G, K, N).detach()
    offsets = torch.tensor([8, 8, M], dtype=torch.int32)
    epilogue = graph_serialization.serialize(
        gemmsmith.plan(x, w[0], epilogue=torch.sigmoid)._planned.binding.source_graph
    )
    want = ops.call_op(epilogue, x, w, [], [], offsets)
    launches = calls.launches
    got = ops.OPERATORS[1](x.clone(), w, None, offsets, ops.op_signature(epilogue)[1], epilogue, [], [])
    assert torch.equal(got, want)
    assert calls.launches == launches + 1


def test_more_layouts_than_are_compared_at_once(calls: Calls) -> None:
    """In turns; tensors at other multiples than of 16 bytes too."""
    x, w, bias = (y.detach() for y in inputs())
    rows = range(1, MAX_LAYOUTS + 4)
    for _ in range(2):
        for m in rows:
            for first in (0, 1):
                y = torch.randn(M * K + 1).to(x.dtype)[first:][: m * K].view(m, K)
                want = torch.empty(m, N, dtype=x.dtype).copy_(plain(y.double(), w.double(), bias.double()))
                torch.testing.assert_close(fused(y, w, bias), want, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_numbers(needs_grad: bool, calls: Calls) -> None:
    """Of any size and sign; what no float can hold is refused as in a first call."""

    def scaled(acc: Any, factor: Any) -> Any:
        return acc * factor

    x, w, _ = inputs()

    def call(factor: Any) -> Any:
        with torch.set_grad_enabled(needs_grad):
            return gt.gemm(x, w.mT, epilogue=scaled, factor=factor)

    by_one = [call(factor) for factor in (1.5, 1)][1]
    for factor in (-1, 0.0, -0.0, 2**70, float("inf")):  # no element is 0
        got = cached(calls, lambda factor=factor: call(factor))
        want = by_one * float(factor)
        assert torch.equal(got, want)
        assert torch.equal(got.signbit(), want.signbit())
    with pytest.raises(ArgumentError, match="factor: got -1000"):
        call(-(10**400))


def test_without_gradients(calls: Calls) -> None:
    x, w, bias = inputs()
    fused(x, w, bias)
    with torch.no_grad():
        first = fused(x, w, bias)
        again = cached(calls, lambda: fused(x, w, bias))
    assert not first.requires_grad
    assert not again.requires_grad
    assert torch.equal(first, again)
    assert fused(x, w, bias).requires_grad


def test_second_derivatives(calls: Calls) -> None:
    def penalty(call: Callable[..., Any], x: Any, w: Any, bias: Any) -> Any:
        (g,) = torch.autograd.grad(call(x, w, bias).float().sum(), x, create_graph=True)
        return torch.autograd.grad(g.float().square().sum(), w)[0]

    for _ in range(3):
        x, w, bias = inputs()
        actual = penalty(fused, x, w, bias).double()
        exact = penalty(lambda x, w, bias: plain(x.double(), w.double(), bias.double()), x, w, bias).double()
        assert (actual - exact).abs().max() < 0.03 * exact.abs().max()
    assert cached(calls, lambda: fused(x, w, bias)).requires_grad


def compare_gradients(inputs: tuple[Any, ...], gradient: Any, between: Callable[[], object] = lambda: None) -> None:
    """Compare the gradients of `fused` with torch's; `between` is called between forward and backward."""
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact = torch.autograd.grad(plain(*exact_inputs), exact_inputs, gradient.double())
    y = fused(*inputs)
    between()
    for actual, x, expected in zip(torch.autograd.grad(y, inputs, gradient), inputs, exact, strict=True):
        assert actual.shape == x.shape
        assert (actual.double() - expected).abs().max() < 0.03 * expected.abs().max()


def only_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail in a backward pass that is not launched again."""
    monkeypatch.setattr(cached_call, "run_backward", lambda *_: pytest.fail("run"))


def test_backward_is_launched_again(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        compare_gradients(inputs(), drawn(M, N).detach())
    only_launched(monkeypatch)
    for _ in range(2):
        cached(calls, lambda: compare_gradients(inputs(), drawn(M, N).detach()))


def test_backward_with_numbers(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(acc: Any, factor: Any) -> Any:
        return (acc * factor).tanh() * factor

    def both(factor: float, x: Any, w: Any) -> Any:
        (actual,) = torch.autograd.grad(gt.gemm(x, w.mT, epilogue=scaled, factor=factor).sum(), x)
        exact_x = x.detach().double().requires_grad_()
        (exact,) = torch.autograd.grad(scaled(exact_x @ w.detach().double().mT, factor).sum(), exact_x)
        assert (actual.double() - exact).abs().max() < 0.03 * exact.abs().max()

    for factor in (0.5, -1.5):
        both(factor, *inputs()[:2])
    only_launched(monkeypatch)
    for factor in (2.0, -0.25):
        both(factor, *inputs()[:2])


@pytest.mark.parametrize("leading", [(), (2, 2)])
@pytest.mark.parametrize(
    ("epilogue", "shape", "has_leading"),
    [
        (lambda acc, y: acc * y, (), False),
        (lambda acc, y: acc * y, (1, N), False),
        (lambda acc, y: (acc * y).tanh(), (M, 1), True),
        (lambda acc, y: acc.sigmoid() * y, (M, N), True),
        (lambda acc, y: acc + y, (M, N), True),
    ],
)
def test_backward_is_the_same_with_any_operand(
    epilogue: Any, shape: tuple[int, ...], has_leading: bool, leading: tuple[int, ...], calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def result() -> tuple[Any, list[Any]]:
        x, w, _ = inputs(*leading)
        y = drawn(*(leading if has_leading else ()), *shape)
        return gt.gemm(x, w.mT, epilogue=epilogue, y=y), [x, w, y]

    gradient = drawn(*leading, M, N).detach()
    for _ in range(3):
        out, tensors = result()
        torch.autograd.grad(out, tensors, gradient)
    out, tensors = result()
    with monkeypatch.context() as patched:
        if not (leading and has_leading):  # such an operand is reshaped, and its call not cached
            only_launched(patched)
        again = torch.autograd.grad(out, tensors, gradient, retain_graph=True)
    monkeypatch.setattr(cached_call, "sees_operators", lambda: True)
    for actual, expected in zip(again, torch.autograd.grad(out, tensors, gradient), strict=True):
        assert torch.equal(actual, expected)
        assert actual.stride() == expected.stride()


def test_backward_from_a_sum_only(calls: Calls) -> None:
    """The gradient of a sum is fp32, and the accumulator's."""

    def summed(acc: Any, bias: Any) -> Any:
        return acc + bias, (acc + bias).sum(-1)

    for _ in range(3):
        x, w, bias = inputs()
        _, sums = gt.gemm(x, w.mT, epilogue=summed, bias=bias)
        gradient = torch.randn(M)
        grads = torch.autograd.grad(sums, (x, w), gradient)
        exact = gradient.double().unsqueeze(1).expand(M, N)
        for actual, expected in zip(grads, (exact @ w.double(), exact.mT @ x.double()), strict=True):
            assert (actual.double() - expected).abs().max() < 0.03 * expected.abs().max()


def test_backward_from_other_gradients(calls: Calls) -> None:
    """Other strides or another alignment of the results' gradient are another backward pass."""
    memory = drawn(M * N + 1).detach()
    row = drawn(N).detach()
    gradients = (
        memory[: M * N].view(M, N), memory[1:].view(M, N), memory[: M * N].view(N, M).mT, row.expand(M, N),
        row[:1].expand(M, N),
    )  # fmt: skip
    for _ in range(3):
        for gradient in gradients:
            compare_gradients(inputs(), gradient)


def test_backward_from_other_saved_tensors(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks that return saved tensors in another layout, once each, and weights whose memory was exchanged."""
    gradient = drawn(M, N).detach()
    unpacked: list[Any] = []

    def unpack(x: Any) -> Any:
        unpacked.append(x)
        return x.mT.contiguous().mT

    for _ in range(3):
        compare_gradients(inputs(), gradient)
    for _ in range(3):
        unpacked.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            compare_gradients(inputs(), gradient)
        assert len(unpacked) == 3 + 3  # and those of the exact gradients
    for _ in range(3):
        x, w, bias = inputs()

        def exchange(x: Any = x) -> None:
            x.data = x.data.mT.contiguous().mT

        compare_gradients((x, w, bias), gradient, exchange)
    only_launched(monkeypatch)
    compare_gradients(inputs(), gradient)


def test_only_what_requires_gradients_gets_one(calls: Calls) -> None:
    x, w, bias = inputs()
    for _ in range(2):
        fused(x, w, bias)
    x, bias = x.detach(), bias.detach()
    for _ in range(3):
        (g,) = torch.autograd.grad(fused(x, w, bias).sum(), w)
    assert g.shape == w.shape
    assert not fused(x, w.detach(), bias).requires_grad


def test_changes_between_calls(calls: Calls) -> None:
    """Another stride, alignment, dtype or precision, and another value that the function reads, are another call."""
    factor = 2.0

    def scaled(acc: Any) -> Any:
        return acc * factor

    def call(x: Any, w: Any) -> Any:
        return gt.gemm(x, w.mT, epilogue=scaled)

    memory = drawn(2 * M * K + 1).detach()
    exactly, off_by_one = memory[: M * K].view(M, K), memory[1 : M * K + 1].view(M, K)
    every_other_row = memory[: 2 * M * K].view(M, 2, K)[:, 0]
    (w,) = inputs()[1:2]
    for _ in range(3):
        for x in (exactly, off_by_one, every_other_row, exactly.float(), exactly.half()):
            y = w.to(x.dtype)
            comparison.close(call(x, y).detach(), 2 * x.double() @ y.detach().double().mT, 1, "sim", K)
    x, y = torch.randn(M, K), drawn(N, K, dtype=torch.float32)
    precise = call(x, y)
    torch.set_float32_matmul_precision("high")
    rough = [call(x, y) for _ in range(3)]
    torch.set_float32_matmul_precision("highest")
    assert torch.equal(rough[0], rough[2])
    assert not torch.equal(rough[0], precise)
    assert torch.equal(call(x, y), precise)
    factor = 3.0
    comparison.close(call(exactly, w).detach(), 3 * exactly.double() @ w.detach().double().mT, 1, "sim", K)


def test_either_setting_of_the_precision(calls: Calls) -> None:
    """torch.backends.cuda.matmul.fp32_precision, after which torch.get_float32_matmul_precision() raises, and that."""
    a, b = torch.randn(M, K), torch.randn(K, N)
    half = [x.bfloat16() for x in (a, b)]
    matmul = torch.backends.cuda.matmul
    results: dict[str, list[Any]] = {}
    for setting in ("ieee", "tf32", "none", "tf32", "ieee"):
        matmul.fp32_precision = setting
        gt.gemm(*half)
        results.setdefault(setting, []).append(gt.gemm(a, b))
    torch.set_float32_matmul_precision("high")
    results["tf32"].append(gt.gemm(a, b))
    torch.set_float32_matmul_precision("highest")
    results["ieee"].append(gt.gemm(a, b))
    assert torch.get_float32_matmul_precision() == "highest"
    precise, rough = results["ieee"] + results["none"], results["tf32"]
    assert all(torch.equal(x, precise[0]) for x in precise)
    assert all(torch.equal(x, rough[0]) for x in rough)
    assert not torch.equal(precise[0], rough[0])


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


class FunctionRecorder(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    pass


@pytest.mark.parametrize("has_epilogue", [False, True])
@pytest.mark.parametrize("what", ["dispatch mode", "function mode", "grad", "grad of another", "vmap", "trace", "own"])
def test_what_sees_operators_still_does(
    what: str, has_epilogue: bool, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(x: Any, w: Any, bias: Any) -> Any:
        return gt.gemm(x, w, epilogue=biased, bias=bias) if has_epilogue else gt.gemm(x, w)

    x, w, bias = drawn(M, K), drawn(K, N), drawn(N)
    for _ in range(2):
        call(x, w, bias)
    cached(calls, lambda: call(x, w, bias))
    monkeypatch.undo()  # the tensors are on the CPU again; the call remains cached
    monkeypatch.setattr(SimulatedLaunches, "launch", lambda *_: pytest.fail("launched"))
    if what == "dispatch mode":
        with Recorder() as recorder:
            call(x, w, bias)
        assert any(name.startswith("gemmsmith::gemm") for name in recorder.seen)
    elif what == "function mode":
        with FunctionRecorder() as function_recorder:
            call(x, w, bias)
        assert any(name.startswith("gemmsmith.gemm") for name in function_recorder.seen)
    elif what == "grad":
        assert torch.func.grad(lambda x: call(x, w, bias).sum())(x.detach()).shape == x.shape
    elif what == "grad of another":
        assert torch.func.grad(lambda y: (call(x, w, bias) * y).sum())(torch.ones(())).shape == ()
    elif what == "vmap":
        assert torch.vmap(lambda x: call(x, w, bias))(x.detach().expand(2, M, K)).shape == (2, M, N)
    elif what == "trace":
        assert "gemmsmith::gemm" in str(torch.jit.trace(call, (x, w, bias), check_trace=False).graph)
    else:
        call(x.detach().as_subclass(Own).requires_grad_(), w, bias)


def test_negative_bit(calls: Calls) -> None:
    z, w = torch.randn(M, K, dtype=torch.complex64), drawn(N, K, dtype=torch.float32)
    for _ in range(3):
        gt.gemm(z.imag, w.mT)
    with pytest.raises(ArgumentError, match="negative bit"):
        gt.gemm(z.conj().imag, w.mT)


def test_memory_that_was_freed(calls: Calls) -> None:
    x, w, bias = inputs()
    for _ in range(3):
        fused(x, w, bias)
    bias.untyped_storage().resize_(0)
    launches = calls.launches
    with pytest.raises((ArgumentError, RuntimeError)):
        fused(x, w, bias)
    assert calls.launches == launches


def test_a_view_of_memory_that_was_freed(calls: Calls) -> None:
    """Its address is its offset, not 0."""
    x, w, _ = inputs()
    flat = torch.randn(64 + N).bfloat16()
    bias = flat[64:]
    for _ in range(3):
        fused(x, w, bias)
    flat.untyped_storage().resize_(0)
    launches = calls.launches
    with pytest.raises(ArgumentError, match="without memory"):
        fused(x, w, bias)
    assert calls.launches == launches


@pytest.mark.parametrize("grad", [False, True])
def test_operands_that_a_grouped_gemm_refuses(calls: Calls, grad: bool) -> None:
    """One named as the ends of the groups, and one that no epilogue reads: after calls without them, too."""
    offsets, x, experts = torch.tensor([7, 7, M], dtype=torch.int32), drawn(M, K), drawn(G, K, N)

    def scaled(acc: Any, offsets: float = 2.0) -> Any:
        return acc * offsets

    with torch.set_grad_enabled(grad):
        for epilogue in (None, scaled):
            for _ in range(2):
                gt.grouped_gemm(x, experts, offsets=offsets, epilogue=epilogue)
            with pytest.raises(ArgumentError):
                gt.grouped_gemm(x, experts, offsets=offsets, epilogue=epilogue, operands={"offsets": 3.0})
        with pytest.raises(ArgumentError, match="p: operands need an `epilogue`"):
            gt.grouped_gemm(x, experts, offsets=offsets, p=3.0)


def test_saved_tensors_are_packed(calls: Calls) -> None:
    x, w, bias = inputs()
    for _ in range(2):
        fused(x, w, bias)
    packed: list[Any] = []

    def pack(y: Any) -> Any:
        packed.append(y)
        return y

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        y = cached(calls, lambda: fused(x, w, bias))
    assert len(packed) == 3  # x, w and the result, whose derivative is that of a sigmoid
    y.sum().backward()
    assert x.grad is not None


def test_a_gemm_in_a_hook(calls: Calls) -> None:
    """What a hook launches during a call is not taken for the call's own."""

    def pack(y: Any) -> Any:
        with torch.no_grad():
            gt.gemm(torch.ones(M, K).bfloat16(), torch.ones(K, N).bfloat16())
        return y

    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
            same_gradients(fused, plain, *inputs())
    same_gradients(fused, plain, *inputs())


def test_autocast(calls: Calls) -> None:
    x, w, bias = (y.detach().float().requires_grad_() for y in inputs())
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            assert fused(x, w, bias).dtype == torch.bfloat16
    assert fused(x, w, bias).dtype == torch.float32


def test_threads(calls: Calls) -> None:
    fused(*inputs())
    errors: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(3):
                same_gradients(fused, plain, *inputs())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_layer(calls: Calls) -> None:
    layer = gt.FusedLinear(K, N, activation="gelu", dtype=torch.bfloat16)

    def call(x: Any, w: Any, bias: Any) -> Any:
        return torch.func.functional_call(layer, {"weight": w, "bias": bias}, (x,))

    def exact(x: Any, w: Any, bias: Any) -> Any:
        return torch.nn.functional.gelu(x @ w.mT + bias)

    for _ in range(2):
        same_gradients(call, exact, *inputs())
    cached(calls, lambda: same_gradients(call, exact, *inputs()))
    layer.activation = torch.relu
    same_gradients(call, lambda x, w, bias: (x @ w.mT + bias).relu(), *inputs())


@pytest.mark.parametrize("has_epilogue", [False, True])
def test_groups(has_epilogue: bool, calls: Calls) -> None:
    offsets = torch.tensor([7, 7, M], dtype=torch.int32)

    def call(x: Any, experts: Any, bias: Any) -> Any:
        others = {"epilogue": biased, "bias": bias} if has_epilogue else {}
        y = gt.grouped_gemm(x, experts.mT, offsets=offsets, **others)
        return y if has_epilogue else y + bias

    def exact(x: Any, experts: Any, bias: Any) -> Any:
        rows = torch.cat([x[:7] @ experts[0].mT, x[7:] @ experts[2].mT])
        return biased(rows, bias) if has_epilogue else rows + bias

    def drawn_inputs() -> tuple[Any, Any, Any]:
        return drawn(M, K), drawn(G, N, K, by=K**-0.5), drawn(N)

    for _ in range(2):
        same_gradients(call, exact, *drawn_inputs(), roundings=1)
    cached(calls, lambda: same_gradients(call, exact, *drawn_inputs(), roundings=1))
    x, experts, bias = drawn_inputs()
    with torch.no_grad():
        first = call(x, experts, bias)
        assert torch.equal(cached(calls, lambda: call(x, experts, bias)), first)
    offsets = torch.tensor([5, 9, M], dtype=torch.int32)
    with torch.no_grad():
        assert not torch.equal(cached(calls, lambda: call(x, experts, bias)), first)
        with pytest.raises(ArgumentError, match=r"offsets: got torch.int64"):
            gt.grouped_gemm(x, experts.mT, offsets=offsets.long())
