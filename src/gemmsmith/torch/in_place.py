"""The operator that writes an epilogue's result over the operand c: gemmsmith::gemm_in_place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gemmsmith.host.cached_run import run_cached
from gemmsmith.torch import fallback, graph_serialization
from gemmsmith.torch.backward_plan import dynamo_constant
from gemmsmith.torch.ops import OPERATORS, as_request, call_op, define_op, result_dtype

C = "c"
"""The operand whose memory gets the result, of the same shape and as many bits."""


def call_in_place(epilogue: str, a: Any, b: Any, c: Any, operands: Sequence[Any]) -> Any:
    """Return the epilogue's only result, in c's memory if it has as many bits and c is no subclass of Tensor.

    `epilogue` is serialized, and has an operand "c"; `operands` are the others, in its order.
    """
    dtype = getattr(torch, _result_dtype(epilogue, str(a.dtype)))
    if type(c) is not torch.Tensor or c.dtype.itemsize != dtype.itemsize:
        return call_op(epilogue, a, b, [], _with_c(epilogue, c, operands))
    torch.ops.gemmsmith.gemm_in_place(a, b, c, epilogue, list(operands))
    return c.view(dtype)


@dynamo_constant
def _result_dtype(epilogue: str, a: str) -> str:
    """Return the name of the result's dtype in torch, for an `a` whose dtype has the name `a`."""
    graph = graph_serialization.deserialize(epilogue)
    return str(result_dtype(graph, graph.results[0], getattr(torch, a.removeprefix("torch.")))).removeprefix("torch.")


@dynamo_constant
def _position_of_c(epilogue: str) -> int:
    """Return the position of c among the operands."""
    return [o.name for o in graph_serialization.deserialize(epilogue).operands].index(C)


def _with_c(epilogue: str, c: Any, operands: Sequence[Any]) -> list[Any]:
    """Return all operands, in the graph's order."""
    position = _position_of_c(epilogue)
    return [*operands[:position], c, *operands[position:]]


def _write_copy(a: Any, b: Any, c: Any, epilogue: str, operands: Sequence[Any]) -> None:
    """Copy what the operator that returns its result has computed."""
    key, all_operands = graph_serialization.digest(epilogue), _with_c(epilogue, c, operands)
    result = OPERATORS[len(all_operands), 1](a, b, key, epilogue, [], *all_operands)
    c.view(result.dtype).copy_(result)


def _write_in_place(a: Any, b: Any, c: Any, epilogue: str, operands: Sequence[Any]) -> None:
    if fallback.kernels_unsupported(a.get_device()):
        return _write_copy(a, b, c, epilogue, operands)
    graph = graph_serialization.deserialize(epilogue)
    request = as_request(graph, a, b, [], _with_c(epilogue, c, operands))
    run_cached(request._replace(out=c.view(result_dtype(graph, graph.results[0], a.dtype))))
    return None


define_op(
    "gemm_in_place", "(Tensor a, Tensor b, Tensor(a!) c, str epilogue, Tensor[] operands) -> ()",
    lambda a, b, c, epilogue, operands: None,
    lambda a, b, *_, **__: 2 * int(a[0]) * int(a[1]) * int(b[1]),
    CPU=_write_copy, CUDA=_write_in_place,
)  # fmt: skip
