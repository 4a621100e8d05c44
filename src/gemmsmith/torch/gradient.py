"""A product with its epilogue that has gradients: an autograd.Function around the operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad

from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import Graph
from gemmsmith.epilogue.frontend.derivative import GRADIENT, KEPT, OPERAND, VALUE, WANTED
from gemmsmith.torch import text
from gemmsmith.torch.backward import (
    A,
    B,
    Forward,
    Names,
    Reduced,
    Step,
    backward,
    constant,
    forward,
    numbers,
    results,
    tensors,
)
from gemmsmith.torch.fallback import FLOATS
from gemmsmith.torch.operator import LIBRARY, OPERATORS, call, product_shape

BARE = " | accumulator | out 0"
"""The product, in a's dtype."""


def product(
    epilogue: str, a: Any, b: Any, given: Sequence[float], operands: Sequence[Any], recompute: bool = False
) -> tuple[Any, ...]:
    """The results of a text's graph, in order. a (m, k) or (batch, m, k), b (k, n) or (batch, k, n); numbers and
    tensors in the order of the graph's operands. They have gradients where those are recorded. `recompute`: the
    backward pass multiplies again rather than that anything more is stored. Raises ArgumentError.
    """
    if not _records(a, b, *operands) or exporting():
        found = call(epilogue, a, b, given, operands)
        return found if isinstance(found, tuple) else (found,)
    return applied(*planned(epilogue, a, b, operands, recompute), a, b, given, operands)


def applied(
    made: Forward, wanted: Names, a: Any, b: Any, given: Sequence[float], operands: Sequence[Any]
) -> tuple[Any, ...]:  # fmt: skip
    """The results of what is planned."""
    apply = _Product.apply if torch.compiler.is_dynamo_compiling() or transforming() else _applied
    found = apply(
        made, wanted, tuple([given[i] for i in made.numbers]), a, b, *[operands[i] for i in made.tensors]
    )  # fmt: skip
    return found[: len(made.of)]  # type: ignore[no-any-return]


def planned(epilogue: str, a: Any, b: Any, operands: Sequence[Any], recompute: bool) -> tuple[Forward, Names]:
    """What computes a text's results, and the names of what needs a gradient."""
    of_all = transforming()
    inputs = zip((A, B, *tensors(epilogue)), (a, b, *operands), strict=True)
    wanted = tuple([name for name, x in inputs if x.requires_grad or (of_all and x.is_floating_point())])
    if a.dtype not in FLOATS:
        raise ArgumentError(f"a: got {a.dtype}, with something that requires grad; use bf16, or torch.no_grad()")
    return forward(epilogue, wanted, str(a.dtype), recompute), wanted


def transforming() -> bool:
    """Whether a transform of torch.func is at work, or forward mode. ArgumentError for torch.func.jvp."""
    if torch.compiler.is_dynamo_compiling():
        return False
    stack = torch._C._functorch.get_interpreter_stack() or ()
    if any(interpreter.key() == torch._C._functorch.TransformType.Jvp for interpreter in stack):
        raise ArgumentError("a, b: got forward mode, which gemm does not have; use reverse mode, as torch.func.grad")
    return bool(stack) or forward_ad._current_level >= 0


@torch.compiler.assume_constant_result
def exporting() -> bool:
    """Whether operators are noted that will record their gradients themselves: by torch.export or torch.jit.trace."""
    return bool(torch.compiler.is_exporting() or torch.jit.is_tracing())


def _records(*inputs: Any) -> bool:
    return (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)) or transforming()


def _of_operator(op: Any) -> Callable[..., Any]:
    """What the operator does for Autograd: in a program that was exported, say, nothing else records gradients."""

    def run(a: Any, b: Any, key: int, epilogue: str, given: list[float], *operands: Any) -> Any:
        every = (a, b, *operands)
        if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in every):
            raise ArgumentError(f"{op.name()}: got a dual tensor, of forward mode; use reverse mode")
        if torch.is_grad_enabled() and any(x.requires_grad for x in every) and not exporting():
            if transforming():
                raise ArgumentError(f"{op.name()}: got a gradient in compiled code; use torch.func.grad outside of it")
            found = product(epilogue, a, b, given, operands)
            return found if len(found) > 1 else found[0]
        with torch._C._AutoDispatchBelowAutograd():
            return op(a, b, key, epilogue, given, *operands)

    return run


for _op in OPERATORS.values():
    LIBRARY.impl(_op.overloadpacket.__name__, _of_operator(_op), "Autograd")


class _Product(torch.autograd.Function):
    """The results of a text, those that only the backward pass reads behind the others."""

    @staticmethod
    def forward(made: Forward, wanted: Names, numbers: Any, a: Any, b: Any, *operands: Any) -> tuple[Any, ...]:
        found = call(made.epilogue, a, b, numbers, operands)
        return found if isinstance(found, tuple) else (found,)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        made, wanted, given, *arrays = inputs
        ctx.made, ctx.wanted, ctx.numbers, ctx.dtype = made, wanted, given, arrays[0].dtype
        ctx.shapes = [x.shape for x in arrays]
        every = (*arrays, *output)
        ctx.save_for_backward(*[every[i] for i in made.kept_at])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[output[i] for i in made.flat])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        epilogue, dtype, shape = ctx.made.epilogue, ctx.dtype, product_shape(*ctx.shapes[:2])
        known = dict(zip(ctx.made.kept, ctx.saved_tensors, strict=True))
        for name, x in zip(numbers(epilogue), ctx.numbers, strict=True):
            known[OPERAND + name] = x
        of = []
        for i, (name, g) in enumerate(zip(results(epilogue), gradients, strict=True)):
            # compiled, a gradient of what users do not see is a matrix of zeros; else one of a gradient's
            unseen = name.startswith(KEPT) and torch.compiler.is_dynamo_compiling()
            if g is not None and i not in ctx.made.flat and not unseen:
                of.append(name)
                known[GRADIENT + name] = g
        if not of:
            return (None,) * (3 + len(ctx.shapes))
        reduced, steps, passed_on = backward(epilogue, ctx.made.stored, tuple(of), ctx.wanted, str(dtype))
        like = known[GRADIENT + of[0]]
        for r in reduced:
            _shape(r, known, shape, dtype, like)
        found = {}
        for step in steps:
            found.update(_run(step, known, shape, dtype, like))
        if passed_on:
            found["out"] = known[passed_on].expand(shape)
        of_a, of_b = _of_factors(found.get("out"), known.get(A), known.get(B), ctx)
        of_operands = [found.get(WANTED + name) for name in tensors(epilogue)]
        every = zip((of_a, of_b, *of_operands), ctx.shapes, strict=True)
        return (None, None, None, *[None if g is None else summed(g, own) for g, own in every])

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Any, ...], int]:
        made, wanted, given, *arrays = inputs
        first = [x if d is None else x.movedim(d, 0) for x, d in zip(arrays, dims[3:], strict=True)]
        batched = [d is not None for d in dims[3:]]
        (a, b, *operands), (_, of_b, *of_operands) = first, batched
        graph = text.read(made.epilogue)
        everywhere = any(n.op == "reduce" and n.value[1] != "n" and n.value[1] != "m" for n in graph.nodes)
        if everywhere or a.dim() - batched[0] != 2 or b.dim() - of_b != 2:  # its own batch, or sums over it
            rows = [
                _Product.apply(*inputs[:3], *[x[i] if d else x for x, d in zip(first, batched, strict=True)])
                for i in range(info.batch_size)
            ]
            return tuple(torch.stack(column) for column in zip(*rows, strict=True)), 0
        if not (batched[0] or of_b):
            a = a.expand(info.batch_size, *a.shape)
        operands = [_matrix(x) if d else x for x, d in zip(operands, of_operands, strict=True)]
        names = tuple(n for n, d in zip(tensors(made.epilogue), of_operands, strict=True) if d)
        longer = made._replace(epilogue=_batched(made.epilogue, names))
        return _Product.apply(longer, wanted, given, a, b, *operands), 0


_applied = super(torch.autograd.Function, _Product).apply
"""`apply` without its look at the signature of forward, which takes longer than all else."""


def _shape(r: Reduced, known: dict[str, Any], shape: tuple[Any, ...], dtype: Any, like: Any) -> None:
    """Gives a reduction's value and gradient the indices again that it is over; divides the gradient."""
    summed = [i for i, index in enumerate("bmn"[3 - len(shape) :]) if index in r.over]
    for name in (GRADIENT + r.name, VALUE + r.name):
        if name in known and not r.keepdim:
            for i in summed:
                known[name] = known[name].unsqueeze(i)
    name = GRADIENT + r.name
    if name in known and r.mean_of:
        sizes, count = (*shape[:-1], shape[-1] // r.mean_of), 1
        for i in summed:
            count = count * sizes[i]
        known[name] = known[name] / count
    if name in known and r.ties:
        known[name] = known[name] / _run(r.ties, known, shape, dtype, like)["out"]


def _run(step: Step, known: dict[str, Any], shape: tuple[Any, ...], dtype: Any, like: Any) -> dict[str, Any]:
    """A step's results by name."""
    values = [known[name].expand(*shape[:-1], shape[-1] // w) if w else known[name] for name, w in step.tensors]
    if step.reads_product:
        a, b = known[A], known[B]
    else:
        a = like.new_empty((*shape[:-1], 0), dtype=dtype)
        b = like.new_empty((0, shape[-1]), dtype=dtype)
    found = product(step.epilogue, a, b, [known[name] for name in step.numbers], values)
    return dict(zip(step.results, found, strict=True))


def _of_factors(dz: Any, a: Any, b: Any, ctx: Any) -> tuple[Any, Any]:
    """The gradients of a and b, from the product's."""
    of_a = of_b = None
    if dz is not None and ctx.needs_input_grad[3]:
        (of_a,) = product(BARE, dz, b.mT, [], [])
    if dz is not None and ctx.needs_input_grad[4]:
        if a.dim() == 3 and len(ctx.shapes[1]) == 2:  # one sum over all rows of the batch
            a, dz = a.flatten(0, 1), dz.flatten(0, 1)
        (of_b,) = product(BARE, a.mT, dz, [], [])
    return of_a, of_b


def summed(g: Any, shape: Any) -> Any:
    """A gradient summed over what an operand of that shape is broadcast over."""
    while g.dim() > len(shape):
        g = g.squeeze(0) if g.shape[0] == 1 else g.sum(0)
    for i, extent in enumerate(shape):
        if extent == 1 and g.shape[i] != 1:
            g = g.sum(i, keepdim=True)
    return g


def first_derivative_only() -> None:
    """In a backward pass: ArgumentError where that is recorded, too."""
    if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():
        raise ArgumentError("create_graph: got True for what has no second derivative; use gemmsmith.torch.gemm")


def _matrix(x: Any) -> Any:
    """An operand with a batch in front as (batch, rows, columns)."""
    return x.reshape(x.shape[0], *(1,) * (3 - x.dim()), *x.shape[1:])


@constant
def _batched(epilogue: str, names: tuple[str, ...]) -> str:
    """The text where these operands have a batch."""
    graph = text.read(epilogue)
    operands = [replace(o, extent=o.extent._replace(batch=o.extent.batch or o.name in names)) for o in graph.operands]
    return text.write(Graph(graph.nodes, tuple(operands), graph.results))
