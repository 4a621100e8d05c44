"""Calls of plain tensors: the launches of an earlier call are found by one signature of all arguments, and repeated.

Plain tensors are torch.Tensor and Parameter, not subclasses. Launches bypass torch's dispatcher, so nothing that sees
operators may be active: a mode, a transform, a trace.
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
from gemmsmith.core.dicts import BoundedCache
from gemmsmith.core.grouping import Grouping
from gemmsmith.epilogue.inputs import operand_argument
from gemmsmith.host.autotune import on_entry
from gemmsmith.host.cached_run import record_run
from gemmsmith.torch import fallback

TENSOR_TYPES, NUMBER_TYPES = frozenset({torch.Tensor, torch.nn.Parameter}), frozenset({float, int})


@dataclass(slots=True, eq=False)
class Call:
    """All calls whose arguments differ only in addresses and numbers.

    Attributes:
        run: runs such a call again: a CachedRun without gradients, a CachedCall with gradients, a BackwardRun in a
            backward pass. None if no call has run yet, or if not all that it does is cached.
    """

    needs_grad: bool
    run: Any = None


class Arguments(NamedTuple):
    """The arguments of a call.

    Attributes:
        call: what is known of calls with such arguments.
        pointers: addresses and numbers by Pointer name.
    """

    source: Hashable
    call: Call
    pointers: dict[str, Any]


MAX_CACHED_CALLS = 1024
"""Entries of the caches by call. Chosen; not measured."""
_CALLS: dict[Hashable, Call] = BoundedCache(MAX_CACHED_CALLS)
"""Calls by the signature of their arguments."""
MAX_LAYOUTS = 8
"""Layouts per entry of _LAYOUTS. Tensors of other layouts are found by their signature, which takes longer. Chosen; not
measured."""
_LAYOUTS: dict[Hashable, tuple[tuple[Callable[..., bool], Call], ...]] = BoundedCache(MAX_CACHED_CALLS)
"""Calls, the latest first, by everything in a signature but the tensors. With each is a function of `matches`, which
returns whether tensors have the call's layouts: a faster way to find a call than by its signature. All tensors of these
calls are aligned to 16 bytes, which the functions do not check."""
on_entry(_CALLS.clear)
on_entry(_LAYOUTS.clear)


def multiplies_in_tf32() -> bool:
    """Return whether torch's settings let it multiply fp32 on a GPU in TF32.

    The setting is read in a way that also works for torch.backends.cuda.matmul.fp32_precision: once that has been set,
    torch.get_float32_matmul_precision() raises RuntimeError.
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
    """Return the arguments of a call, with what earlier calls of the same signature have cached.

    None if the call cannot be cached: without a fingerprint, `source`, or if an operand is neither a plain tensor nor a
    number. Only to be called if `sees_operators` is False. `options`: a hashable key of the arguments that are neither
    arrays nor numbers.
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
    """Return the arguments with the `Call` of their signature, which is made if there is none.

    None, `source` and `options`: as in `read_arguments`. `arrays`: arrays and numbers by Pointer name; addresses
    replace the arrays in it, and it becomes `Arguments.pointers`.
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
    """Return a function that returns whether other tensors are like these in everything but their addresses.

    It is Dynamo's check of guards: dtype, shape, strides, device, requires_grad and dispatch keys, in one call.
    """
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def runs_kernels(a: Any) -> bool:
    """Return whether the tensor a is on a GPU on which gemmsmith's kernels run."""
    return a.is_cuda and not fallback.kernels_unsupported(a.get_device())


def in_groups(request: Request, offsets: Any, along: Literal["m", "k"] = "m") -> Request:
    """Return a request of gemmsmith.gemm as one of grouped_gemm."""
    operands = with_arrays(request.operands, {"offsets": offsets})
    return request._replace(operands=operands, grouping=Grouping("offsets", along))


def run_or_call(arguments: Arguments | None, like: Any, call: Callable[[], Any]) -> Any:
    """Return the results of a call without gradients: repeat an earlier call's launches, or call and record its own.

    `arguments`: from `read_arguments`; None, or those of a call with gradients: nothing is cached. Results are
    allocated as `like`.
    """
    if arguments is None or arguments.call.needs_grad:
        return call()
    if (run := arguments.call.run) is not None:
        return run(arguments.pointers, like)
    results, arguments.call.run = record_run(call)
    return results


def run_cached_call(
    arguments: Arguments | None, a: Any, b: Any, operands: Mapping[str, Any], offsets: Any = None
) -> Any:  # fmt: skip
    """Return the results of a call by repeating an earlier one's launches; None if none are cached for its arguments.

    Gradients are recorded if they are needed.
    """
    if arguments is None or (run := arguments.call.run) is None:
        return None
    if arguments.call.needs_grad:
        return run(arguments.pointers, a, b, operands, offsets)
    return run(arguments.pointers, a)
