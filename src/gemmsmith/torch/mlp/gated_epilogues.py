"""Epilogues of gated MLPs and their gradients: h = activation(gate) * up, elementwise, which the GEMM with down reads.

gate and up are two products of the same x, here called the halves: one GEMM computes both, with columns of gate and up
in turns ("interleaved"), 8 at a time. A gate, the function of the halves, is given by the name of its activation,
"silu", "gelu", "gelu_tanh" or "relu"; or as a serialized graph of the operands "gate" and "up", or of "gate" alone. It
is the first argument, `activation`, of the epilogues below. `acc` is the accumulator; a weight is a column (rows, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

from gemmsmith.arrays import INTERLEAVE_COLUMNS
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.errors import ArgumentError, EpilogueError
from gemmsmith.core.graph import BroadcastDims, EpilogueGraph
from gemmsmith.graph.approximations import GELU_A, GELU_B
from gemmsmith.graph.frontend.derivative import GRAD_OUTPUT_PREFIX, GRAD_PREFIX, INPUT_PREFIX, derivative
from gemmsmith.graph.frontend.interleave import deinterleave
from gemmsmith.graph.frontend.tracer import trace
from gemmsmith.graph.functions import Function
from gemmsmith.torch.backward_plan import dynamo_constant
from gemmsmith.torch.graph_serialization import SECTION_SEPARATOR, deserialize, graph_dtype, serialize

HALVES = ("gate", "up")
"""Names of a gate's operands."""
BIASES = ("gate_bias", "up_bias")
"""Names of the biases of the halves."""

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "silu": lambda x: x * x.sigmoid(),
    "gelu": lambda x: x * x.tracer("ndtr", x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + (GELU_A * (x + GELU_B * x * x * x)).tanh()),
    "relu": lambda x: x.relu(),
}
"""Activations by name, in terms of simpler functions, so that a gate and its derivative share some of these."""


class Gate(NamedTuple):
    """A gate, and the layout of the weight of both halves.

    Attributes:
        activation: the name of an activation, or a serialized graph.
        interleaved: whether single rows of gate and of up alternate in the weight; otherwise gate's rows are first.
    """

    activation: str = "silu"
    interleaved: bool = False


def check_activation(activation: str) -> None:
    """Raise ArgumentError if it is neither the name of an activation nor a serialized graph."""
    if activation not in ACTIVATIONS and SECTION_SEPARATOR not in activation:
        raise ArgumentError(f"activation: got {activation!r}; use one of {', '.join(ACTIVATIONS)}")


@dynamo_constant
def width(activation: str) -> Literal[1, 2]:
    """Return the number of halves that a gate reads: 2, or 1 for a function of "gate" alone."""
    return 2 if len(_graph(activation).operands) == 2 else 1


def gate_and_up(weight: Any) -> tuple[Any, Any]:
    """Return the two operands b, (count, k, n) each, of a weight (count, 2 * n, k) with gate's rows, then up's."""
    n = weight.shape[1] // 2
    return weight[:, :n].mT, weight[:, n:].mT


def weighted(_: str, acc: Any, weight: Any) -> Any:
    """Return a product times a weight."""
    return acc * weight


def added(_: str, acc: Any, c: Any) -> Any:
    """Return a product plus a matrix."""
    return acc + c


def gated(activation: str, acc: Any, **biases: Any) -> Any:
    """Return h for an accumulator of interleaved halves, or of the only half. `biases`: those of the halves."""
    return _apply(activation, _halves(activation, acc, biases))


def gate_and_halves(activation: str, acc: Any, **biases: Any) -> tuple[Any, ...]:
    """Return h, and the halves, biases included, which backward reads."""
    halves = _halves(activation, acc, biases)
    return _apply(activation, halves), *halves


def weighted_gate_and_halves(activation: str, acc: Any, weight: Any, **biases: Any) -> tuple[Any, ...]:
    """Return h times a weight, and the halves, biases included, which backward reads."""
    h, *halves = gate_and_halves(activation, acc, **biases)
    return h * weight, *halves


def weighted_gate(activation: str, acc: Any, weight: Any, **halves: Any) -> Any:
    """Return h times a weight, from halves that are operands; the accumulator is not read."""
    return _apply(activation, list(halves.values())) * weight


def backward(activation: str, acc: Any, **halves: Any) -> tuple[Any, ...]:
    """Return the gradients of the halves, operands, from the gradient of h, which is the accumulator."""
    graph = _derivative(activation)
    values = {INPUT_PREFIX + name: x for name, x in halves.items()}
    grads = dict(zip(graph.result_names, _replay(graph, values | {f"{GRAD_OUTPUT_PREFIX}out": acc}), strict=True))
    return tuple(grads.get(GRAD_PREFIX + name, acc.where(False, 0.0)) for name in halves)


def weighted_backward(activation: str, acc: Any, weight: Any, **halves: Any) -> tuple[Any, ...]:
    """Return the gradients of the halves and of the weight, and h times the weight.

    The accumulator is the gradient of h times the weight; the gradient of a weight therefore is a row's sum of acc * h.
    """
    h = _apply(activation, list(halves.values()))
    return *backward(activation, acc * weight, **halves), (acc * h).sum(-1), h * weight


def _halves(activation: str, acc: Any, biases: Mapping[str, Any]) -> list[Any]:
    """Return the halves of an accumulator, with their biases, if any, added."""
    halves = deinterleave(acc) if width(activation) == 2 else (acc,)
    return [x + b for x, b in zip(halves, biases.values(), strict=True)] if biases else list(halves)


def _apply(activation: str, halves: Sequence[Any]) -> Any:
    """Return the gate h of its halves."""
    (h,) = _replay(_graph(activation), dict(zip(HALVES, halves, strict=False)))
    return h


def _replay(graph: EpilogueGraph, operands: Mapping[str, Any]) -> list[Any]:
    """Return a graph's results for traced values in place of its operands, so that they become part of the epilogue."""
    values: list[Any] = []
    tracer = next(iter(operands.values())).tracer
    for node in graph.nodes:
        inputs = [values[i] for i in node.inputs]
        match node.op:
            case "operand":
                values.append(operands[node.attribute])
            case "constant":
                values.append(tracer.value(node.attribute))
            case "cast":
                values.append(tracer.value(tracer.cast(*inputs, node.attribute)))
            case _ if node.op in ACTIVATIONS:
                values.append(ACTIVATIONS[node.op](*inputs))
            case _:
                values.append(tracer(node.op, *inputs))
    return [values[r.node] for r in graph.results]


@lru_cache(maxsize=64)
def _graph(activation: str) -> EpilogueGraph:
    """Return a gate as a graph of operands, with one result."""
    if activation in ACTIVATIONS:
        return trace_gate(lambda gate, up: ACTIVATIONS[activation](gate) * up, HALVES)
    graph = check_gate(deserialize(activation))
    return trace_gate(lambda **halves: _replay(graph, halves)[0], [o.name for o in graph.operands])


def trace_gate(function: Callable[..., Any], names: Sequence[str]) -> EpilogueGraph:
    """Return the graph of a function of halves of these names. Raises EpilogueError if it is not elementwise."""
    graph = trace(lambda _, **halves: function(**halves), (2, 2), dict.fromkeys(names, (_MATRIX, FP32)))
    return check_gate(graph)


def check_gate(graph: EpilogueGraph) -> EpilogueGraph:
    """Return the graph of a gate as it is. Raises EpilogueError if it has several results, or is not elementwise."""
    others = [
        n for n in graph.nodes if not isinstance(n.operation, Function) and n.op not in ("operand", "constant", "cast")
    ]
    if others or len(graph.results) != 1:
        received = others[0].op if others else f"{len(graph.results)} results"
        raise EpilogueError(f"epilogue: got {received} in a gate; use elementwise functions, and one result")
    return graph


@lru_cache(maxsize=64)
def _derivative(activation: str) -> EpilogueGraph:
    """Return the graph of the gradients of a gate's halves, with operands and results named as by `derivative`."""
    graph = _graph(activation)
    return derivative(graph, ["out"], [o.name for o in graph.operands], (), FP32)


_MATRIX, _COLUMN = BroadcastDims(False, 1, 1), BroadcastDims(False, 1, 0)
_EPILOGUES: dict[str, Callable[..., Any]] = {f.__name__: f for f in (
    weighted, added, gated, gate_and_halves, weighted_gate_and_halves, weighted_gate, backward, weighted_backward,
)}  # fmt: skip


@dynamo_constant
def epilogue_of(
    name: str, activation: str, dtype: str, weight_dtype: str = "torch.float32", has_bias: bool = False
) -> str:
    """Return one of the epilogues above as a serialized graph.

    Its operands are, in this order: the weight, for names with "weighted"; for "added", the matrix c; and the halves,
    if the epilogue does not compute them, or else their biases. Dtypes are texts such as "torch.bfloat16". `has_bias`:
    for "gated" a row for each group (expert), else one for each row.
    """
    count, kind = width(activation), _MATRIX
    names: tuple[str, ...] = BIASES[:count] if has_bias else ()
    if name == "added":
        names = ("c",)
    elif name in ("weighted_gate", "backward", "weighted_backward"):
        names = HALVES[:count]
    else:
        kind = BroadcastDims(True, 0, count) if name == "gated" else BroadcastDims(False, 1, count)
    operands = {"weight": (_COLUMN, graph_dtype(weight_dtype))} if name.startswith("weighted") else {}
    operands |= {x: (kind, graph_dtype(dtype)) for x in names}
    return serialize(trace(partial(_EPILOGUES[name], activation), (2, 2 * INTERLEAVE_COLUMNS), operands))
