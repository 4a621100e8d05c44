"""Two products, one after the other: the derivative of the first one's epilogue is an epilogue of the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import Extent
from gemmsmith.epilogue.frontend.derivative import OPERAND, WANTED
from gemmsmith.epilogue.frontend.tracer import trace
from gemmsmith.torch.backward import Forward, Names, constant, fed, numbers, results, tensors
from gemmsmith.torch.gradient import BARE, exporting, first_derivative_only, planned, product, summed, transforming
from gemmsmith.torch.operator import call
from gemmsmith.torch.text import write
from gemmsmith.torch.tracing import dtype_of


def chained(
    epilogue: str, a: Any, b: Any, given: Sequence[float], operands: Sequence[Any], down: Any, bias: Any
) -> Any:  # fmt: skip
    """epilogue(a @ b) @ down + bias, of a text with one result that has n columns; a (m, k), b (k, n), down (n, p),
    bias (p,) or None.

    The gradient of the first product is computed where that of its result is multiplied: the latter is not stored. No
    second derivatives. Raises ArgumentError.
    """
    if len(results(epilogue)) != 1:
        raise ArgumentError(f"epilogue: got a function with {len(results(epilogue))} results; use one")
    more = [] if bias is None else [bias]
    second = _biased(str(bias.dtype)) if more else BARE
    made, wanted = planned(epilogue, a, b, operands, recompute=False)
    recorded = wanted and torch.is_grad_enabled() and 0 not in made.flat
    if not recorded or transforming() or exporting():  # with its second derivatives
        (h,) = product(epilogue, a, b, given, operands)
        return product(second, h, down, [], more)[0]
    numbers = tuple([given[i] for i in made.numbers])
    return _Chain.apply(made, wanted, numbers, second, a, b, down, bias, *[operands[i] for i in made.tensors])[0]


@constant
def _biased(dtype: str) -> str:
    """The text of a product and a bias of this dtype."""
    return write(trace(lambda acc, bias: acc + bias, (2, 2), {"bias": (Extent(width=1), dtype_of(dtype))}))


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(
        made: Forward, wanted: Names, numbers: Any, second: str, a: Any, b: Any, down: Any, bias: Any, *operands: Any
    ) -> tuple[Any, ...]:  # fmt: skip
        found = call(made.epilogue, a, b, numbers, operands)
        found = found if isinstance(found, tuple) else (found,)
        return (call(second, found[0], down, [], [] if bias is None else [bias]), *found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        made, wanted, given, _, a, b, down, bias, *operands = inputs
        ctx.made, ctx.wanted, ctx.numbers = made, wanted, given
        ctx.shapes, ctx.bias_dtype = [x.shape for x in operands], None if bias is None else bias.dtype
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        every = (a, b, *operands, *output[1:])
        ctx.save_for_backward(a, b, down, output[1], *[every[i] for i in made.kept_at])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        first_derivative_only()
        if gradients[0] is None:
            return (None,) * (8 + len(ctx.shapes))
        epilogue = ctx.made.epilogue
        a, b, down, h, *kept = ctx.saved_tensors
        known = dict(zip(ctx.made.kept, kept, strict=True))
        for name, x in zip(numbers(epilogue), ctx.numbers, strict=True):
            known[OPERAND + name] = x
        step = fed(epilogue, ctx.made.stored, ctx.wanted, str(a.dtype))
        read = [known[name] for name, _ in step.tensors]
        values = product(step.epilogue, gradients[0], down.mT, [known[name] for name in step.numbers], read)
        found = dict(zip(step.results, values, strict=True))
        of_a = of_b = of_down = of_bias = None
        dz = found.get("out")
        if dz is not None and ctx.needs_input_grad[4]:
            (of_a,) = product(BARE, dz, b.mT, [], [])
        if dz is not None and ctx.needs_input_grad[5]:
            (of_b,) = product(BARE, a.mT, dz, [], [])
        if ctx.needs_input_grad[6]:
            (of_down,) = product(BARE, h.mT, gradients[0], [], [])
        if ctx.needs_input_grad[7]:
            of_bias = gradients[0].sum(0, dtype=ctx.bias_dtype)
        others = [
            summed(found[WANTED + name], shape) if WANTED + name in found else None
            for name, shape in zip(tensors(epilogue), ctx.shapes, strict=True)
        ]
        return (None, None, None, None, of_a, of_b, of_down, of_bias, *others)
