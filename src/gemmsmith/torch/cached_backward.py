"""Backward passes of plain tensors that are run again by their launches."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from gemmsmith.core.bounded_cache import BoundedCache
from gemmsmith.epilogue.inputs import operand_argument
from gemmsmith.graph.frontend.derivative import GRAD_OUTPUT_PREFIX, GRAD_PREFIX, INPUT_PREFIX
from gemmsmith.host.cached_run import CachedRun
from gemmsmith.torch.autograd import run_backward, sum_to_size
from gemmsmith.torch.backward_plan import (
    A,
    B,
    ForwardSpec,
    GradKernel,
    Names,
    make_grad_kernels,
    number_names,
    result_names,
    tensor_names,
)
from gemmsmith.torch.ops import as_tuple
from gemmsmith.torch.plain_tensors import read_arrays, sees_operators

MAX_RUNS = 64
"""Backward passes that are cached for one forward pass. Chosen; not measured."""


class BackwardRun(NamedTuple):
    """The launches of a backward pass.

    `kernels`: the kernels that read the results' gradients, and the launches of each. `passthrough`: the position of
    the result whose gradient is the accumulator's, or None. `grad_a`, `grad_b`: the launches of the GEMMs of the
    accumulator's gradient, or None.
    """

    kernels: tuple[tuple[GradKernel, CachedRun], ...]
    passthrough: int | None
    grad_a: CachedRun | None
    grad_b: CachedRun | None


class CachedBackward(NamedTuple):
    """The backward passes of one forward pass.

    `spec` to `b_is_column_major` are what `run_backward` reads. `pointers`: Pointer names of what a pass reads: of the
    results' gradients ("" for one that is not read), of the saved tensors, and of the numbers. `grads`: names of the
    operands' gradients. `runs`: the launches by signature of what a pass reads, None for a pass that computes more.
    """

    spec: ForwardSpec
    wrt: Names
    dtype: torch.dtype
    shapes: tuple[Any, ...]
    b_is_column_major: bool
    pointers: Names
    grads: Names
    runs: dict[Hashable, BackwardRun | None]

    def __call__(self, ctx: Any, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Return the gradients of the inputs, from those of the results."""
        saved_tensors, arguments = ctx.saved_tensors, None
        if not (torch.is_grad_enabled() or sees_operators()):
            values = zip(self.pointers, (*gradients, *saved_tensors, *ctx.numbers), strict=True)
            arguments = read_arrays("backward", None, {name: x for name, x in values if name and x is not None})
        if arguments is not None and (run := self.runs.get(arguments.signature)) is not None:
            return self._launch(run, arguments.pointers, gradients)
        ctx.spec, ctx.wrt, ctx.dtype, ctx.shapes, ctx.b_is_column_major = self[:5]
        if arguments is None or arguments.signature in self.runs:
            return run_backward(ctx, saved_tensors, gradients)
        launches: list[CachedRun | None] = []
        grads = run_backward(ctx, saved_tensors, gradients, launches)
        self.runs[arguments.signature] = self._find_run(launches, gradients, is_grouped=saved_tensors[0] is not None)
        return grads

    def _launch(self, run: BackwardRun, pointers: dict[str, Any], gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Launch a backward pass, and return the gradients of the inputs."""
        like = next(g for g in gradients if g is not None)
        grads = {} if run.passthrough is None else {"out": gradients[run.passthrough]}
        for kernel, launches in run.kernels:
            arguments = {**pointers} if kernel.reads_accumulator else {**pointers, "a": 0, "b": 0}
            grads.update(zip(kernel.results, as_tuple(launches(arguments, like)), strict=True))
        grad_a = grad_b = None
        if run.grad_a is not None:
            grad_a = run.grad_a({**pointers, "a": grads["out"].data_ptr()}, like)
        if run.grad_b is not None:
            a_and_gradient = pointers["a"], grads["out"].data_ptr()
            x, y = a_and_gradient[::-1] if self.b_is_column_major else a_and_gradient
            product = run.grad_b({**pointers, "a": x, "b": y}, like)
            grad_b = product.mT if self.b_is_column_major else product
        all_grads = zip((grad_a, grad_b, *[grads.get(name) for name in self.grads]), self.shapes, strict=True)
        return (
            None, None, None, None,
            *[g if g is None or g.shape == shape else sum_to_size(g, shape) for g, shape in all_grads],
        )  # fmt: skip

    def _find_run(
        self, launches: Sequence[CachedRun | None], gradients: Sequence[Any], is_grouped: bool
    ) -> BackwardRun | None:  # fmt: skip
        """Return a pass that has just run, from the launches of its GEMMs, or None if it computes more than these."""
        spec, names = self.spec, result_names(self.spec.epilogue)
        outputs = [i for i, g in enumerate(gradients) if g is not None and self.pointers[i]]
        if not outputs:
            return None
        reductions, kernels, passthrough = make_grad_kernels(
            spec.epilogue, spec.saved_outputs, tuple([names[i] for i in outputs]), self.wrt, str(self.dtype)
        )
        sums_over_batches = B in self.wrt and len(self.shapes[0]) > len(self.shapes[1])
        ignores_rows = is_grouped and not {A, B}.issuperset(self.wrt)
        if reductions or sums_over_batches or ignores_rows or None in launches:
            return None
        runs: list[Any] = list(launches)  # there is no None
        shapes = dict(zip(self.grads, self.shapes[2:], strict=True))
        kernel_runs = [(kernel, runs.pop(0).with_result_shapes(shapes)) for kernel in kernels]
        return BackwardRun(
            tuple(kernel_runs),
            names.index(passthrough.removeprefix(GRAD_OUTPUT_PREFIX)) if passthrough else None,
            runs.pop(0) if runs and A in self.wrt else None,
            runs.pop(0) if runs and B in self.wrt else None,
        )


def make_cached_backward(
    spec: ForwardSpec, wrt: Names, dtype: torch.dtype, shapes: tuple[Any, ...], b_is_column_major: bool
) -> CachedBackward:
    """Return the backward passes of a forward pass, none of which has run."""
    gradients = [
        "" if i in spec.nondifferentiable else operand_argument(GRAD_OUTPUT_PREFIX + name)
        for i, name in enumerate(result_names(spec.epilogue))
    ]
    products = {A: "a", B: "b"}
    saved = [products.get(name) or operand_argument(name) for name in spec.saved_names]
    numbers = [operand_argument(INPUT_PREFIX + name) for name in number_names(spec.epilogue)]
    return CachedBackward(
        spec, wrt, dtype, shapes, b_is_column_major,
        (*gradients, operand_argument("offsets"), *saved, *numbers),
        tuple([GRAD_PREFIX + name for name in tensor_names(spec.epilogue)]),
        BoundedCache(MAX_RUNS),
    )  # fmt: skip
