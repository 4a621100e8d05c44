"""Two products, one after the other: the derivative of the first one's epilogue is an epilogue of the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gemmsmith.epilogue.frontend.derivative import OPERAND, WANTED
from gemmsmith.torch.backward import Forward, Names, fed, numbers, tensors
from gemmsmith.torch.gradient import BARE, first_derivative_only, planned, product, summed, transforming
from gemmsmith.torch.operator import call


def chained(epilogue: str, a: Any, b: Any, given: Sequence[float], operands: Sequence[Any], down: Any) -> Any:
    """epilogue(a @ b) @ down, of a text with one result that has n columns; a (m, k), b (k, n), down (n, p).

    The gradient of the first product is computed where that of its result is multiplied: the latter is not stored. No
    second derivatives. Raises ArgumentError.
    """
    made, wanted = planned(epilogue, a, b, operands, recompute=False)
    if not (wanted and torch.is_grad_enabled()) or transforming():  # with its second derivatives
        (h,) = product(epilogue, a, b, given, operands)
        return product(BARE, h, down, [], [])[0]
    numbers = tuple([given[i] for i in made.numbers])
    return _Chain.apply(made, wanted, numbers, a, b, down, *[operands[i] for i in made.tensors])[0]


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(
        made: Forward, wanted: Names, numbers: Any, a: Any, b: Any, down: Any, *operands: Any
    ) -> tuple[Any, ...]:
        found = call(made.epilogue, a, b, numbers, operands)
        found = found if isinstance(found, tuple) else (found,)
        return (call(BARE, found[0], down, [], []), *found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        made, wanted, given, a, b, down, *operands = inputs
        ctx.made, ctx.wanted, ctx.numbers = made, wanted, given
        ctx.shapes = [x.shape for x in operands]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        every = (a, b, *operands, *output[1:])
        ctx.save_for_backward(a, b, down, output[1], *[every[i] for i in made.kept_at])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        first_derivative_only()
        if gradients[0] is None:
            return (None,) * (6 + len(ctx.shapes))
        epilogue = ctx.made.epilogue
        a, b, down, h, *kept = ctx.saved_tensors
        known = dict(zip(ctx.made.kept, kept, strict=True))
        for name, x in zip(numbers(epilogue), ctx.numbers, strict=True):
            known[OPERAND + name] = x
        step = fed(epilogue, ctx.made.stored, ctx.wanted, str(a.dtype))
        read = [known[name] for name, _ in step.tensors]
        values = product(step.epilogue, gradients[0], down.mT, [known[name] for name in step.numbers], read)
        found = dict(zip(step.results, values, strict=True))
        of_a = of_b = of_down = None
        if ctx.needs_input_grad[3]:
            (of_a,) = product(BARE, found["out"], b.mT, [], [])
        if ctx.needs_input_grad[4]:
            (of_b,) = product(BARE, a.mT, found["out"], [], [])
        if ctx.needs_input_grad[5]:
            (of_down,) = product(BARE, h.mT, gradients[0], [], [])
        others = [
            summed(found[WANTED + name], shape) if WANTED + name in found else None
            for name, shape in zip(tensors(epilogue), ctx.shapes, strict=True)
        ]
        return (None, None, None, of_a, of_b, of_down, *others)
