"""Two products, one after the other: the derivative of the first one's epilogue is an epilogue of the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gemmsmith.epilogue.frontend.derivative import OPERAND, WANTED
from gemmsmith.torch.backward import A, B, fed, forward, numbers, tensors
from gemmsmith.torch.gradient import BARE, first_derivative_only, named, product, summed, transforming
from gemmsmith.torch.operator import call


def chained(epilogue: str, a: Any, b: Any, given: Sequence[float], operands: Sequence[Any], down: Any) -> Any:
    """epilogue(a @ b) @ down, of a text with one result that has n columns; a (m, k), b (k, n), down (n, p).

    The gradient of the first product is computed where that of its result is multiplied: the latter is not stored. No
    second derivatives. Raises ArgumentError.
    """
    every = {A: a, B: b, **dict(zip(tensors(epilogue), operands, strict=True))}
    wanted = tuple([name for name, x in every.items() if x.requires_grad])
    if not (wanted and torch.is_grad_enabled()) or transforming():
        (h,) = product(epilogue, a, b, given, operands)
        return product(BARE, h, down, [], [])[0]
    longer, stored = forward(epilogue, wanted, str(a.dtype), False)
    values = dict(zip(numbers(epilogue), given, strict=True))
    return _Chain.apply(
        longer, stored, wanted, tuple([values[name] for name in numbers(longer)]), a, b, down,
        *[every[name] for name in tensors(longer)],
    )[0]  # fmt: skip


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(
        epilogue: str, stored: Any, wanted: Any, given: Any, a: Any, b: Any, down: Any, *operands: Any
    ) -> tuple[Any, ...]:
        found = call(epilogue, a, b, given, operands)
        found = found if isinstance(found, tuple) else (found,)
        return (call(BARE, found[0], down, [], []), *found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        epilogue, stored, wanted, given, a, b, down, *operands = inputs
        ctx.constants = epilogue, stored, wanted, str(a.dtype)
        ctx.numbers, ctx.shapes = given, [x.shape for x in operands]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        reads = [name for name, _ in fed(epilogue, stored, wanted, str(a.dtype)).tensors]
        known = named(epilogue, (a, b), operands, output[1:])
        ctx.save_for_backward(a, b, down, output[1], *[known[name] for name in reads])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        epilogue, stored, wanted, dtype = ctx.constants
        first_derivative_only()
        if gradients[0] is None:
            return (None,) * (7 + len(ctx.shapes))
        a, b, down, h, *read = ctx.saved_tensors
        step = fed(epilogue, stored, wanted, dtype)
        of_numbers = dict(zip([OPERAND + name for name in numbers(epilogue)], ctx.numbers, strict=True))
        made = product(step.epilogue, gradients[0], down.mT, [of_numbers[name] for name in step.numbers], read)
        found = dict(zip(step.results, made, strict=True))
        (of_down,) = product(BARE, h.mT, gradients[0], [], []) if ctx.needs_input_grad[6] else (None,)
        of_a = of_b = None
        if ctx.needs_input_grad[4]:
            (of_a,) = product(BARE, found["out"], b.mT, [], [])
        if ctx.needs_input_grad[5]:
            (of_b,) = product(BARE, a.mT, found["out"], [], [])
        others = [
            summed(found[WANTED + name], shape) if WANTED + name in found else None
            for name, shape in zip(tensors(epilogue), ctx.shapes, strict=True)
        ]
        return (None, None, None, None, of_a, of_b, of_down, *others)
