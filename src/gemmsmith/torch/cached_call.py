"""Repeated calls of `gemm` and `grouped_gemm` that record gradients, with the launches of an earlier such call.

A call with arrays of the same signatures as an earlier one plans nothing, neither its forward nor its backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gemmsmith.binding.results import arrange_results
from gemmsmith.core.dtypes import validate_fp32_scalar
from gemmsmith.epilogue.inputs import operand_argument
from gemmsmith.graph.frontend.derivative import GRAD_OUTPUT_PREFIX, GRAD_PREFIX, INPUT_PREFIX
from gemmsmith.host.cached_run import CachedRun, record_runs
from gemmsmith.torch.autograd import (
    fast_apply,
    is_column_major,
    plan_forward,
    run_backward,
    save_for_backward,
    sum_to_size,
)
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
from gemmsmith.torch.plain_tensors import Arguments, read_arrays, runs_kernels, sees_operators


class CachedCall(NamedTuple):
    """What an earlier call that records gradients has prepared, for calls of tensors with the same signatures.

    Attributes:
        launches: the launches of its forward pass, or None if it calls the operator instead.
        folds_batch: whether all leading dimensions of a are folded into M.
        shapes: the results' shapes for the caller; None if the results are not reshaped.
    """

    launches: CachedRun | None
    spec: ForwardSpec
    wrt: Names
    backward: CachedBackward
    numbers: Names
    tensors: Names
    folds_batch: bool
    shapes: tuple[Any, ...] | None
    names: Names

    def __call__(self, pointers: dict[str, Any], a: Any, b: Any, operands: Mapping[str, Any], offsets: Any) -> Any:
        """Run the call with other tensors and numbers, and return the results in the form of the epilogue.

        `pointers`: addresses and numbers by Pointer name; modified.
        """
        numbers = tuple([validate_fp32_scalar(name, operands[name]) for name in self.numbers])
        tensors = [operands[name] for name in self.tensors]
        if self.folds_batch:
            a = a.flatten(0, -2)
            pointers["a"] = a.data_ptr()  # of a copy, for some strides
        if self.launches is None:
            outputs = fast_apply(self.spec, self.wrt, numbers, offsets, a, b, *tensors)
        else:
            outputs = _apply_cached(self, pointers, numbers, offsets, a, b, *tensors)
        results = outputs[: len(self.spec.user_outputs)]
        if self.shapes is not None:
            results = tuple([x.reshape(shape) for x, shape in zip(results, self.shapes, strict=True)])
        if self.names == ("out",):
            return results[0]
        return arrange_results(dict(zip(self.names, results, strict=True)), self.names)


class _CachedGemmFunction(torch.autograd.Function):
    """`GemmFunction` that runs cached launches.

    It has no setup_context, which takes 2 us and which only torch.func's transforms need: in these no call is cached.
    """

    @staticmethod
    def forward(
        ctx: Any, call: CachedCall, pointers: dict[str, Any], numbers: Any, offsets: Any, *arrays: Any
    ) -> tuple[Any, ...]:
        """Run the call's launches, and save what its backward pass reads.

        `pointers`: as in `CachedCall.__call__`. `arrays`: a, b and the operands that are tensors.
        """
        ctx.cached_backward, ctx.numbers = call.backward, numbers
        outputs = as_tuple(call.launches(pointers, arrays[0]))  # type: ignore[misc]  # there are launches
        save_for_backward(ctx, call.spec, offsets, arrays, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return ctx.cached_backward(ctx, gradients)  # type: ignore[no-any-return]


_apply_cached = super(torch.autograd.Function, _CachedGemmFunction).apply


class CachedBackward:
    """The backward pass of a cached call: repeats the launches of an earlier backward pass with arrays like its own."""

    def __init__(self, spec: ForwardSpec, wrt: Names, dtype: Any, shapes: tuple[Any, ...], b_is_column_major: bool):
        """Keep what backward needs to know of the forward pass.

        `wrt`: the inputs that need gradients. `dtype`: a's. `shapes`: those of a, b and the operands that are tensors.
        """
        self._forward = spec, wrt, dtype, shapes, b_is_column_major
        gradients = [
            "" if i in spec.nondifferentiable else operand_argument(GRAD_OUTPUT_PREFIX + name)
            for i, name in enumerate(result_names(spec.epilogue))
        ]
        products = {A: "a", B: "b"}
        saved = [products.get(name) or operand_argument(name) for name in spec.saved_names]
        numbers = [operand_argument(INPUT_PREFIX + name) for name in number_names(spec.epilogue)]
        # Pointer names of what a pass reads, "" for a result's gradient that is not read, and names of the gradients
        self._pointers = (*gradients, operand_argument("offsets"), *saved, *numbers)
        self._grads = [GRAD_PREFIX + name for name in tensor_names(spec.epilogue)]

    def __call__(self, ctx: Any, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Return the gradients of `GemmFunction`'s inputs, from those of its results, of which some may be None.

        The first backward pass for arrays of new signatures runs `run_backward` and records its launches.
        """
        saved_tensors, arguments = ctx.saved_tensors, None
        if not (torch.is_grad_enabled() or sees_operators()):
            values = zip(self._pointers, (*gradients, *saved_tensors, *ctx.numbers), strict=True)
            arguments = read_arrays(self, None, {name: x for name, x in values if name and x is not None})
        if arguments is not None and (run := arguments.call.run) is not None:
            return run(arguments.pointers, gradients)  # type: ignore[no-any-return]
        ctx.spec, ctx.wrt, ctx.dtype, ctx.shapes, ctx.b_is_column_major = self._forward
        grads, runs = record_runs(lambda: run_backward(ctx, saved_tensors, gradients))
        if arguments is not None:
            arguments.call.run = self._find_run(runs, gradients, is_grouped=saved_tensors[0] is not None)
        return grads  # type: ignore[no-any-return]

    def _find_run(
        self, runs: list[CachedRun | None], gradients: Sequence[Any], is_grouped: bool
    ) -> BackwardRun | None:  # fmt: skip
        """Return the launches of a backward pass that has just run, so that they can be repeated.

        None if the pass did more than GEMMs: if it expanded gradients of reductions, summed over batches, or set rows
        of no group to zero; or if a GEMM's launches are not cached.
        """
        (spec, wrt, dtype, shapes, b_is_column_major), names = self._forward, result_names(self._forward[0].epilogue)
        outputs = [i for i, g in enumerate(gradients) if g is not None and self._pointers[i]]
        if not outputs:
            return None
        reductions, kernels, passthrough = make_grad_kernels(
            spec.epilogue, spec.saved_outputs, tuple([names[i] for i in outputs]), wrt, str(dtype)
        )
        sums_over_batches = B in wrt and len(shapes[0]) > len(shapes[1])
        ignores_rows = is_grouped and not {A, B}.issuperset(wrt)
        has_grad_acc = passthrough or any("out" in kernel.results for kernel in kernels)
        products = [name for name in (A, B) if name in wrt and has_grad_acc]
        is_complete = len(runs) == len(kernels) + len(products) and None not in runs
        if reductions or sums_over_batches or ignores_rows or not is_complete:
            return None
        shapes_by_name = dict(zip(self._grads, shapes[2:], strict=True))
        launches: list[Any] = list(runs)  # there is no None
        kernel_runs = [(kernel, launches.pop(0).with_result_shapes(shapes_by_name)) for kernel in kernels]
        of_products = dict(zip(products, launches, strict=True))
        return BackwardRun(
            tuple(kernel_runs), names.index(passthrough.removeprefix(GRAD_OUTPUT_PREFIX)) if passthrough else None,
            of_products.get(A), of_products.get(B), b_is_column_major, self._grads, shapes,
        )  # fmt: skip


class BackwardRun(NamedTuple):
    """The launches of a backward pass that consists of GEMMs only.

    Attributes:
        kernels: the kernels that compute gradients of the accumulator and of operands, each with its launches.
        passthrough: the position of the result whose gradient is also the accumulator's, which then needs no kernel;
            or None.
        grad_a: the launches of the GEMM that computes a's gradient, or None.
        grad_b: likewise for b.
        b_is_column_major: whether b is; its gradient then is, too.
        grads: names of the operands' gradients.
        shapes: shapes of a, b and the operands that are tensors.
    """

    kernels: tuple[tuple[GradKernel, CachedRun], ...]
    passthrough: int | None
    grad_a: CachedRun | None
    grad_b: CachedRun | None
    b_is_column_major: bool
    grads: Sequence[str]
    shapes: tuple[Any, ...]

    def __call__(self, pointers: dict[str, Any], gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Launch the pass, and return the gradients of `GemmFunction`'s inputs, of which the first four have none."""
        like = next(g for g in gradients if g is not None)
        grads = {} if self.passthrough is None else {"out": gradients[self.passthrough]}
        for kernel, launches in self.kernels:
            arguments = {**pointers} if kernel.reads_accumulator else {**pointers, "a": 0, "b": 0}
            grads.update(zip(kernel.results, as_tuple(launches(arguments, like)), strict=True))
        grad_a = grad_b = None
        if self.grad_a is not None:
            grad_a = self.grad_a({**pointers, "a": grads["out"].data_ptr()}, like)
        if self.grad_b is not None:
            a_and_gradient = pointers["a"], grads["out"].data_ptr()
            x, y = a_and_gradient[::-1] if self.b_is_column_major else a_and_gradient
            product = self.grad_b({**pointers, "a": x, "b": y}, like)
            grad_b = product.mT if self.b_is_column_major else product
        all_grads = zip((grad_a, grad_b, *[grads.get(name) for name in self.grads]), self.shapes, strict=True)
        return (
            None, None, None, None,
            *[g if g is None or g.shape == shape else sum_to_size(g, shape) for g, shape in all_grads],
        )  # fmt: skip


def cache_call(
    arguments: Arguments, runs: Sequence[CachedRun | None], epilogue: str, a: Any, b: Any, operands: Mapping[str, Any],
    recompute: bool, results: Sequence[Any], names: Names, folds_batch: bool = False,
) -> None:  # fmt: skip
    """Cache a call that records gradients, which has just run.

    `runs`: the GEMMs that it ran, None for one whose launches are not cached. a, b and the operands are as the operator
    gets them, the results as the caller gets them. `folds_batch`: all leading dimensions of a are folded into M.
    """
    numbers, tensors = number_names(epilogue), tensor_names(epilogue)
    spec, wrt = plan_forward(epilogue, a, b, [operands[name] for name in tensors], recompute)
    shapes = tuple([x.shape for x in (a, b, *[operands[name] for name in tensors])])
    arguments.call.run = CachedCall(
        runs[0] if len(runs) == 1 and runs_kernels(a) else None, spec, wrt,
        CachedBackward(spec, wrt, a.dtype, shapes, is_column_major(b)), numbers, tensors, folds_batch,
        tuple([x.shape for x in results]) if folds_batch else None, names,
    )  # fmt: skip
