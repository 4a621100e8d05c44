"""Calls of plain tensors: what an earlier call has launched is found by one signature of all arguments.

It runs without the dispatcher, so nothing that sees operators may be active: a mode, a transform, a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import _C
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling, is_exporting

from gemmsmith.arrays.torch_tensors import MAX_OFFSET_BYTES, has_no_memory
from gemmsmith.binding.groups import with_arrays
from gemmsmith.binding.request import Request
from gemmsmith.core.bounded_cache import BoundedCache
from gemmsmith.core.grouping import Grouping
from gemmsmith.epilogue.inputs import operand_argument
from gemmsmith.host.cached_run import record_run
from gemmsmith.torch import fallback

TENSOR_TYPES, NUMBER_TYPES = frozenset({torch.Tensor, torch.nn.Parameter}), frozenset({float, int})


@dataclass(slots=True, eq=False)
class Call:
    """Calls whose arguments differ only in addresses and numbers.

    `needs_grad`: gradients are recorded. `run` runs such a call again, from `Arguments.pointers` and what it needs of
    the arguments themselves; None if no call has run, or if not all that it does is cached.
    """

    needs_grad: bool
    run: Any = None


class Arguments(NamedTuple):
    """The arguments of a call.

    `source`: the epilogue's fingerprint. `pointers`: addresses and numbers by Pointer name.
    """

    source: Hashable
    call: Call
    pointers: dict[str, Any]


MAX_CACHED_CALLS = 1024
"""Entries of the caches by call. Chosen; not measured."""
_CALLS: dict[Hashable, Call] = BoundedCache(MAX_CACHED_CALLS)
"""By the signature of their arguments."""
MAX_LAYOUTS = 8
"""Layouts of a call whose comparison is fast; of others the signatures are compared. Chosen; not measured."""
_LAYOUTS: dict[Hashable, tuple[tuple[Callable[..., bool], Call], ...]] = BoundedCache(MAX_CACHED_CALLS)
"""By what a signature contains besides its tensors: calls of tensors at multiples of 16 bytes, the latest first. Before
each is a function of tensors, which returns whether their layouts are the call's (`matches`)."""


def multiplies_in_tf32() -> bool:
    """Return whether torch multiplies fp32 on a GPU in TF32, by whichever of its settings that was set.

    torch.get_float32_matmul_precision() raises RuntimeError once torch.backends.cuda.matmul.fp32_precision is set.
    """
    return bool(torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32")


def sees_operators() -> bool:
    """Return whether something besides autograd sees operators: a compiler, a mode, a transform, a trace."""
    return bool(
        is_dynamo_compiling()
        or _C._len_torch_dispatch_stack()
        or _C._len_torch_function_stack()
        or forward_ad._current_level >= 0
        or _C._functorch.peek_interpreter_stack() is not None
        or _C._get_tracing_state() is not None
        or is_exporting()
    )


def read_arguments(
    source: Hashable, options: Hashable, a: Any, b: Any, operands: Mapping[str, Any], offsets: Any = None
) -> Arguments | None:  # fmt: skip
    """Return the arguments of a call that nothing sees; `options`: those that are neither arrays nor numbers.

    None without a fingerprint `source`, or if an operand is neither a plain tensor nor a number.
    """
    if source is None:
        return None
    arrays = {"a": a, "b": b}
    for name, x in operands.items():
        arrays[operand_argument(name)] = x
    if offsets is not None:
        if "offsets" in operands:  # refused by what is not cached
            return None
        arrays[operand_argument("offsets")] = offsets
    return read_arrays(source, options, arrays)


def read_arrays(source: Hashable, options: Hashable, arrays: dict[str, Any]) -> Arguments | None:
    """Return the arguments with the call that an earlier one with the same layouts has made, or a new one.

    `arrays`: arrays and numbers by Pointer name; becomes the `pointers`. Else as `read_arguments`.
    """
    grad_enabled = torch.is_grad_enabled()
    tensors, numbers, addresses = [], [], 0
    try:
        for name, x in arrays.items():
            if type(x) in TENSOR_TYPES:
                arrays[name] = address = x.data_ptr()
                # The check of a nested tensor's layout would end the process.
                if x.is_nested or (address < MAX_OFFSET_BYTES and has_no_memory(x, address)):
                    return None
                tensors.append(x)
                addresses |= address
            elif type(x) in NUMBER_TYPES:
                arrays[name] = float(x)
                numbers.append(name)
            else:
                return None
        key = source, options, multiplies_in_tf32(), grad_enabled, *arrays, *numbers
        is_aligned = not addresses & 15
        layouts = _LAYOUTS.get(key, ()) if is_aligned else ()
        for match, call in layouts:
            if match(*tensors):
                return Arguments(source, call, arrays)
        signature, needs_grad = key, False
        for x in tensors:
            requires_grad = grad_enabled and x.requires_grad
            signature += x.dtype, x.shape, x.stride(), x.device, x.is_neg(), requires_grad, x.data_ptr() & 15
            needs_grad = needs_grad or requires_grad
    except (RuntimeError, OverflowError):
        return None  # a tensor that is sparse, nested, or of a transform that has ended; a number beyond float64
    if (known := _CALLS.get(signature)) is None:
        _CALLS[signature] = known = Call(needs_grad)
    if is_aligned:
        _LAYOUTS[key] = ((matches(tensors), known), *layouts[: MAX_LAYOUTS - 1])
    return Arguments(source, known, arrays)


def matches(tensors: Sequence[Any]) -> Callable[..., bool]:
    """Return whether other tensors are like these in all but their addresses, as a function of them."""
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def runs_kernels(a: Any) -> bool:
    """Return whether kernels multiply a tensor: it is on a GPU that they run on."""
    return a.is_cuda and not fallback.kernels_unsupported(a.get_device())


def in_groups(request: Request, offsets: Any, along: Literal["m", "k"] = "m") -> Request:
    """Return a request of gemmsmith.gemm as one of grouped_gemm, for groups that end at `offsets`."""
    operands = with_arrays(request.operands, {"offsets": offsets})
    return request._replace(operands=operands, grouping=Grouping("offsets", along))


def run_or_call(arguments: Arguments | None, like: Any, call: Callable[[], Any]) -> Any:
    """Return the results of a call without gradients: of its launches, or of `call`, whose launches are kept."""
    if arguments is None or arguments.call.needs_grad:
        return call()
    if (run := arguments.call.run) is not None:
        return run(arguments.pointers, like)
    results, arguments.call.run = record_run(call)
    return results


def run_cached_call(
    arguments: Arguments | None, a: Any, b: Any, operands: Mapping[str, Any], offsets: Any = None
) -> Any:  # fmt: skip
    """Return the results of a call that an earlier one has prepared, with gradients or without, else None."""
    if arguments is None or (run := arguments.call.run) is None:
        return None
    if arguments.call.needs_grad:
        return run(arguments.pointers, a, b, operands, offsets)
    return run(arguments.pointers, a)
