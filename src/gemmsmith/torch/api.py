"""gemmsmith.torch.gemm: a product with its epilogue, on tensors that may have gradients or be compiled."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import has_static_value

from gemmsmith import checks
from gemmsmith.api import gemm as launch
from gemmsmith.core.bounded import Bounded
from gemmsmith.core.dtypes import number_operand
from gemmsmith.core.errors import ARGUMENTS, ArgumentError, meant
from gemmsmith.core.graph import over
from gemmsmith.core.switches import switches
from gemmsmith.epilogue.frontend.classify import classify
from gemmsmith.epilogue.frontend.fingerprint import fingerprint
from gemmsmith.epilogue.frontend.snapshot import snapshot
from gemmsmith.torch import fallback, text
from gemmsmith.torch.backward import Forward, Names, constant, numbers, tensors
from gemmsmith.torch.chain import chained
from gemmsmith.torch.fallback import FLOATS
from gemmsmith.torch.gradient import applied, exporting, planned, product, transforming
from gemmsmith.torch.operator import precision, product_shape
from gemmsmith.torch.tracing import MOST_KNOWN, Kinds, epilogue_text

FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}
UE8M0 = torch.float8_e8m0fnu
MULTIPLIED = (*FLOATS, *FP8, torch.int8)
"""The dtypes of a and b, and of operands below."""
READ = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool)
_NO_ARGUMENTS = frozenset(ARGUMENTS) - {"scale_a", "scale_b", "epilogue", "operands"}


def gemm(
    a: Any, b: Any, *, epilogue: Any = None, recompute: bool = False, scale_a: Any = None, scale_b: Any = None,
    operands: Mapping[str, Any] | None = None, **named: Any,
) -> Any:  # fmt: skip
    """epilogue(a @ b), as gemmsmith.gemm, with gradients, under torch.compile and under transforms of torch.func.

    a: (..., m, k), b: (k, n), or (batch, k, n) for an a of (batch, m, k) or (m, k). dtypes as in gemmsmith.gemm, and
    float64 on the CPU, where everything is computed in float64; fp32 is multiplied as
    torch.set_float32_matmul_precision says: "highest" by 3xTF32, else by TF32.
    epilogue: a function of the product and of operands by name, as in gemmsmith.gemm: the product has a's indices. What
    an operand is follows from its shape: () a scalar, (n,) a row, (m, 1) a column, (m, n) a matrix, with a's leading
    indices in front or without. Numbers are operands too, which have no gradient.
    recompute: for the backward pass nothing is stored that the forward pass does not return; it multiplies a and b once
    more where it needs the product. Otherwise one more matrix is stored where it needs one: the value before an
    activation. Nothing is where the epilogue is linear or its result is enough, as for relu, sigmoid and tanh.
    scale_a, scale_b: of whole tensors, rows of a and columns of b; block scales without gradients only.
    operands: those whose names are also arguments of this function.

    Gives one tensor, a tuple or a dict, as the function does; results are row-major. Those of a maximum or minimum
    share its gradient among equal elements, as in torch.amax. No gradients: quantize, top_k_softmax, fp8 results, fp8
    and int8 operands; forward mode. Raises ArgumentError, which names the argument, and EpilogueError.
    """
    if recompute is not False:
        (recompute,) = switches(recompute=recompute)
    given = checks.operands(operands, named)
    if named and not _NO_ARGUMENTS.isdisjoint(named):
        name = next(name for name in named if name in _NO_ARGUMENTS)
        raise ArgumentError(
            f"{name}: got an argument of gemmsmith.gemm, which has no gradients; call that, or give an operand of this "
            "name in `operands`"
        )
    a, b = autocast(a, b)
    if _plain(a, b, scale_a, scale_b, *given.values()):
        return launch(
            a, b, epilogue=epilogue, scale_a=scale_a, scale_b=scale_b, operands=given, precision=precision(a)
        )  # fmt: skip
    scales = {} if scale_a is None and scale_b is None else _scales(scale_a, scale_b, given)
    every = {**given, **scales} if scales else given
    key = _signature(a, b, epilogue, recompute, every, scales)
    known = _KNOWN.get(key) if key is not None else None
    if known is not None:
        written, folds, leading, shape, made, wanted = known
        of = [_number(name, every[name]) for name in numbers(written)]
        found = applied(
            made, wanted, a.flatten(0, 1) if folds else a, b, of, [every[name] for name in tensors(written)]
        )
    else:
        if key is not None:
            epilogue, source = snapshot(epilogue)
            key = None if source is None else _signature(a, b, epilogue, recompute, every, scales)
        written, x, y, arrays, leading, shape = _bound(a, b, epilogue, given, scales)
        of, read = [arrays[name] for name in numbers(written)], [arrays[name] for name in tensors(written)]
        found = product(written, x, y, of, read, recompute)
        if key is not None and y is b and all(arrays[name] is every[name] for name in tensors(written)):
            _KNOWN[key] = Known(written, x is not a, leading, shape, *planned(written, x, y, read, recompute))
    kept, names = _kept(written)
    values = [_unfolded(x, kind, leading, shape) for x, kind in zip(found, kept, strict=True)]
    if names == ("out", *[f"out{i}" for i in range(1, len(names))]):
        return values[0] if len(values) == 1 else tuple(values)
    return dict(zip(names, values, strict=True))


class Known(NamedTuple):
    """How a product with gradients runs: its text, whether a's first two indices are folded into one, a's leading
    indices, the product's shape; what `planned` gives."""

    text: str
    folds: bool
    leading: tuple[int, ...]
    shape: tuple[int, ...]
    made: Forward
    wanted: Names


_KNOWN: dict[Hashable, Known] = Bounded(MOST_KNOWN)
"""By the signature of the arguments: finding it out takes longer than all else that a call does on the host."""


def _scales(scale_a: Any, scale_b: Any, operands: Mapping[str, Any]) -> dict[str, Any]:
    """The scales that are given, as fp32, by names that no operand has."""
    found = {}
    for name, x in (("scale_a", scale_a), ("scale_b", scale_b)):
        while name in operands:
            name += "_"
        if x is not None:
            powers = isinstance(x, torch.Tensor) and x.dtype in (UE8M0, torch.uint8)
            found[name] = x.view(UE8M0).float() if powers else x
    return found


def _signature(
    a: Any, b: Any, epilogue: Any, recompute: bool, given: Mapping[str, Any], scales: Iterable[str]
) -> Hashable:
    """All that `Known` depends on, for plain tensors of few dimensions whose gradients are recorded; else None."""
    if torch.compiler.is_dynamo_compiling() or not torch.is_grad_enabled() or transforming() or exporting():
        return None
    source = fingerprint(epilogue)
    if source is None or not isinstance(a, torch.Tensor) or a.dim() > 3:
        return None
    found: list[Hashable] = [source, recompute, tuple(scales)]
    recorded = False
    for name, x in (("a", a), ("b", b), *given.items()):
        kind = type(x)
        if (kind is torch.Tensor or kind is torch.nn.Parameter) and not x.is_nested:
            wanted = x.requires_grad
            found.append((name, x.shape, x.dtype, x.device, x.layout, wanted))
            recorded = recorded or wanted
        elif kind is float or kind is int:
            found.append(name)
        else:
            return None
    return tuple(found) if recorded else None


def chain(a: Any, b: Any, down: Any, *, epilogue: Any, operands: Mapping[str, Any], bias: Any = None) -> Any:
    """epilogue(a @ b) @ down + bias. The backward pass computes the epilogue's derivative where it multiplies by down.

    a (..., m, k), b (k, n), down (n, p), bias (p,) or None -> (..., m, p). The epilogue, of one result, and its
    operands are as in `gemm`, with a's leading indices or without rows. No second derivatives. Raises ArgumentError.
    """
    (a, b), (_, down) = autocast(a, b), autocast(a, down)
    for name, x in (("a", a), ("down", down), ("bias", bias)):
        if name != "bias" or bias is not None:
            _check(name, x, a)
    written, a, b, arrays, leading, shape = _bound(a, b, epilogue, checks.operands(operands, {}), {})
    if a.dim() != 2 or b.dim() != 2:
        raise ArgumentError("operands: got one with rows of its own in each batch only; call gemm twice")
    if down.dim() != 2:
        raise ArgumentError(f"down: got {down.dim()} dimensions; use (n, p)")
    if bias is not None and tuple(bias.shape) != tuple(down.shape[1:]):
        raise ArgumentError(f"bias: got shape {tuple(bias.shape)}; use {tuple(down.shape[1:])}")
    values = [arrays[name] for name in tensors(written)]
    y = chained(written, a, b, [arrays[name] for name in numbers(written)], values, down, bias)
    return y.reshape(*leading, shape[-2], y.shape[-1])


def autocast(a: Any, b: Any) -> tuple[Any, Any]:
    """a and b in autocast's dtype, where it is on."""
    if not (torch.compiler.is_dynamo_compiling() or torch._C._is_any_autocast_enabled()):
        return a, b
    if not isinstance(a, torch.Tensor) or a.is_meta or not torch.is_autocast_enabled(a.device.type):
        return a, b
    dtype = torch.get_autocast_dtype(a.device.type)
    eligible = (torch.float32, torch.float16, torch.bfloat16)
    cast = [x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in eligible else x for x in (a, b)]
    return cast[0], cast[1]


def _bound(
    a: Any, b: Any, epilogue: Any, given: Mapping[str, Any], scales: Mapping[str, Any]
) -> tuple[str, Any, Any, dict[str, Any], tuple[Any, ...], tuple[Any, ...]]:
    """The epilogue's text; a, b and operands of a product as it runs, its batch folded into its rows if that can be;
    a's leading indices, and the product's shape before."""
    for name, x in (("a", a), ("b", b)):
        _check(name, x, a)
        if x.dtype not in MULTIPLIED:
            raise ArgumentError(f"{name}: got {x.dtype}; use one of {', '.join(map(str, MULTIPLIED))}")
    if a.dtype != b.dtype and not {a.dtype, b.dtype} <= FP8:
        raise ArgumentError(f"b: got {b.dtype} with a of {a.dtype}; use the same for both")
    if epilogue is None and given:
        name = next(iter(given))
        raise ArgumentError(f"{name}: got an operand without an epilogue that reads it; give `epilogue`{meant(name)}")
    if a.dim() < 2 or b.dim() not in (2, 3) or (b.dim() == 3 and a.dim() > 3):
        raise ArgumentError(
            f"a, b: got {a.dim()} and {b.dim()} dimensions; use a (..., m, k) and b (k, n), or both (batch, ., .)"
        )
    leading = a.shape[:-2]
    a = a.flatten(0, -3) if a.dim() > 3 else a
    shape = product_shape(a.shape, b.shape)
    leading = leading if len(leading) > 1 else shape[:-2]
    arrays: dict[str, Any] = {}
    kinds: Kinds = ()
    for name, x in (*given.items(), *scales.items()):
        if isinstance(x, (int, float, Real)):
            if not _is_symbol(x):
                arrays[name] = _number(name, x)
                kinds = (*kinds, (name, (0, 0, 0), ""))
                continue
            x = a.new_ones((), dtype=torch.float64 if a.dtype == torch.float64 else torch.float32) * x
        _check(name, x, a)
        if x.dtype not in READ and not (x.dtype == a.dtype == torch.float64):
            raise ArgumentError(f"{name}: got {x.dtype}; use one of {', '.join(map(str, READ))}")
        arrays[name] = x = _flat(name, x, leading)
        if name in scales:
            _expect_plain_scale(name, x, shape)
        extent = classify(name, tuple(x.shape), shape)
        batch = 1 if extent.batch else 0  # by a branch, which makes a symbolic condition a constant
        kinds = (*kinds, (name, (batch, extent.height, extent.width), str(x.dtype)))
        if x.dim() == 3 and not batch:
            arrays[name] = x.squeeze(0)
    written = epilogue_text(epilogue, (*leading, *shape[-2:]), kinds[: len(given)], kinds[len(given) :])
    if len(shape) == 3 and b.dim() == 2 and a.dim() == 3:
        written, folds, columns = _folded(written)
        if folds:  # the batch's rows are rows of one product
            a = a.flatten(0, 1)
            arrays = {name: x.flatten(0, 1) if name in columns else x for name, x in arrays.items()}
    return written, a, b, arrays, leading, shape


_PLAIN = frozenset({float, int, type(None)})


def _plain(a: Any, *others: Any) -> bool:
    """Whether gemmsmith.gemm can run at once: plain tensors on a GPU, no gradients, nothing that watches."""
    if torch.compiler.is_dynamo_compiling() or not isinstance(a, torch.Tensor) or not a.is_cuda or a.dim() > 3:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack() or forward_ad._current_level >= 0:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or fallback.needed(a.get_device()):
        return False
    recorded = torch.is_grad_enabled()
    for x in (a, *others):
        kind = type(x)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if recorded and x.requires_grad:
                return False
        elif kind not in _PLAIN:
            return False
    return True


def _is_symbol(x: Any) -> bool:
    """Whether a number of compiled code has no value: as a number of the operator it would get one, and a graph of its
    own."""
    return torch.compiler.is_dynamo_compiling() and not has_static_value(x)


def _number(name: str, x: Any) -> float:
    return float(x) if torch.compiler.is_dynamo_compiling() else number_operand(name, x)


def expect_tensor(name: str, x: Any) -> None:
    """ArgumentError for what is no tensor."""
    if isinstance(x, torch.fx.Proxy):
        raise ArgumentError(f"{name}: got a Proxy of torch.fx.symbolic_trace; use torch.export, or a leaf module")
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(f"{name}: got {type(x).__name__}; use a tensor")


def _check(name: str, x: Any, a: Any) -> None:
    """ArgumentError for tensors that cannot be read."""
    expect_tensor(name, x)
    if x.is_nested:
        raise ArgumentError(f"{name}: got a nested tensor; use a dense one, for instance x.to_padded_tensor(0)")
    if x.layout is not torch.strided:
        raise ArgumentError(f"{name}: got a {x.layout} tensor; use a dense one, for instance x.to_dense()")
    if x.is_complex():
        raise ArgumentError(f"{name}: got a tensor of {x.dtype}; use a real one")
    if x.device != a.device:
        raise ArgumentError(f"{name}: got a tensor on {x.device} with a on {a.device}; use one device")
    if transforming() and forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise ArgumentError(f"{name}: got a dual tensor, of forward mode; use reverse mode: backward, torch.func.grad")


def _flat(name: str, x: Any, leading: tuple[Any, ...]) -> Any:
    """An operand with all its leading indices in one."""
    if x.dim() <= 3 and len(leading) < 2:
        return x
    if x.dim() <= 2:
        return x
    own = tuple(x.shape[:-2])
    if own == tuple(leading):
        return x.flatten(0, -3)
    if all(n == 1 for n in own):
        return x.reshape(1, *x.shape[-2:])
    if len(own) > len(leading):
        raise ArgumentError(f"{name}: got shape {tuple(x.shape)} for an a with {len(leading)} leading indices")
    return x.expand(*leading, *x.shape[-2:]).flatten(0, -3)


def _expect_plain_scale(name: str, x: Any, shape: tuple[Any, ...]) -> None:
    own = tuple(x.shape[-2:])
    vector = (shape[-2], 1) if name.startswith("scale_a") else (1, shape[-1])
    if own not in ((), (1,), (1, 1), vector):
        raise ArgumentError(
            f"{name}: got shape {tuple(x.shape)}; use () or {vector}; block scales need torch.no_grad() and a GPU"
        )


@constant
def _folded(epilogue: str) -> tuple[str, bool, tuple[str, ...]]:
    """The text for a product whose batch is folded into its rows, whether that is possible, and the operands with a
    batch of rows: it is where nothing is the same for the rows of one batch only, or for all batches."""
    graph = text.read(epilogue)
    if any(node.op in ("chunk", "interleave") and node.value[-1] == "m" for node in graph.nodes):
        return epilogue, False, ()
    if any(
        node.op == "reduce" and ("b" in over(node.value[1])) != ("m" in over(node.value[1])) for node in graph.nodes
    ):
        return epilogue, False, ()
    if any(o.extent.batch != (o.extent.height > 0) for o in graph.operands):
        return epilogue, False, ()
    columns = tuple(o.name for o in graph.operands if o.extent.batch)
    return text.write(text.unbatched(graph)), True, columns


@constant
def _kept(epilogue: str) -> tuple[tuple[tuple[str, bool], ...], tuple[str, ...]]:
    """Of each result the indices over which it is reduced, and keepdim; the results' names."""
    graph = text.read(epilogue)
    axes = [over(graph.nodes[r.node].value[1]) if graph.is_reduced(r) else "" for r in graph.results]
    kinds = tuple((axis, r.keepdim) for axis, r in zip(axes, graph.results, strict=True))
    return kinds, tuple(r.name for r in graph.results)


def _unfolded(x: Any, kind: tuple[str, bool], leading: tuple[Any, ...], shape: tuple[Any, ...]) -> Any:
    """A result with a's leading indices."""
    if not leading:
        return x
    summed, keepdim = kind
    sizes = {"b": leading, "m": (shape[-2],), "n": x.shape[-1:]}
    kept = [(1,) * len(own) * keepdim if index in summed else own for index, own in sizes.items()]
    return x.reshape([size for own in kept for size in own])
