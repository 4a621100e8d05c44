"""The experts of transformers' models by grouped GEMMs: `experts_implementation="gemmsmith"`.

A class of experts in transformers computes its activation, between the two products, by a method `_apply_gate`. That is
traced like an epilogue, and becomes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce, wraps
from types import MethodType
from typing import Any

import torch

from gemmsmith.core.dicts import BoundedCache
from gemmsmith.core.errors import ArgumentError, EpilogueError
from gemmsmith.torch.graph_serialization import serialize
from gemmsmith.torch.mlp.gated_epilogues import HALVES, Gate, trace_gate
from gemmsmith.torch.moe.experts import gated_experts
from gemmsmith.torch.moe.fp8_experts import fp8_gated_experts
from gemmsmith.torch.tracing import serialize_epilogue

NAME = "gemmsmith"
MAX_GATES = 16
"""Gates that are kept for one class, whose layers may read different values, such as limits. Chosen; not measured."""


def register_experts() -> None:
    """Let models of transformers (from 5.0 on) compute their experts by `experts_implementation="gemmsmith"`.

    Afterwards `AutoModelForCausalLM.from_pretrained(..., experts_implementation="gemmsmith")` or
    `model.set_experts_implementation("gemmsmith")` selects it, also for experts in FP8 with scales of 128 x 128, if
    transformers has an interface for these. Both raise an ArgumentError that names the class of experts whose gate
    cannot be traced. Two methods of transformers' PreTrainedModel are wrapped for that, and since older releases accept
    only their own implementations.
    """
    from transformers import PreTrainedModel
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_forward)
    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    except ImportError:  # older, or without Triton, which older ones import
        pass
    else:
        ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, _fp8_experts_forward)
    for name, wrapper in (("get_correct_experts_implementation", _accept), ("post_init", _check_when_made)):
        method = getattr(PreTrainedModel, name)
        if not hasattr(method, "checks_experts"):
            setattr(PreTrainedModel, name, _wrapped(method, wrapper))


def _wrapped(method: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method to replace `method`: it calls wrapper(method, self, ...). Its `checks_experts` marks it."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(method, *args, **kwargs)

    call.checks_experts = True  # type: ignore[attr-defined]
    return call


def _accept(method: Callable[..., Any], self: Any, requested_experts: Any) -> Any:
    """Accept "gemmsmith" as the implementation of experts; leave others to `method`.

    It wraps get_correct_experts_implementation of the model `self`, which older releases let return their own
    implementations only. Raises ArgumentError if the model has experts that cannot be computed; a model whose modules
    are still to be made has none.
    """
    if requested_experts != NAME:
        return method(self, requested_experts)
    _check_experts(self.modules())
    return NAME


def _check_when_made(method: Callable[..., Any], self: Any) -> None:
    """Check a model at the end of its constructor: raise ArgumentError if its experts cannot be computed.

    It wraps `method`, the post_init of the model `self`, which constructors call when all modules exist. Only modules
    whose config selects this implementation are checked.
    """
    method(self)
    _check_experts(
        x for x in self.modules() if getattr(getattr(x, "config", None), "_experts_implementation", "") == NAME
    )


def _check_experts(modules: Iterable[Any]) -> None:
    """Raise ArgumentError, with the class's name, if there are experts among the modules that cannot be computed."""
    for module in modules:
        if hasattr(type(module), "_apply_gate") and hasattr(module, "config"):
            # Only experts in FP8 have an activation_scheme; both functions raise
            _check_fp8(module) if hasattr(module, "activation_scheme") else gate_of(module)


def _experts_forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """Compute the forward of `self`, an experts module of transformers; the arguments are its forward's."""
    gate, name = gate_of(self), _first_weight(self)
    gate_up, down = getattr(self, name), self.down_proj
    if self.is_transposed:
        gate_up, down = gate_up.mT, down.mT
    biases = (getattr(self, f"{name}_bias"), self.down_proj_bias) if self.has_bias else (None, None)
    y = gated_experts(
        hidden_states, top_k_index, top_k_weights, gate_up, down, gate, biases=biases,
        post=self.post_expert_norm if getattr(self, "has_post_expert_norm", False) else None,
    )  # fmt: skip
    return y.to(hidden_states.dtype)


def _fp8_experts_forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """Compute the forward of `self`, an experts module of transformers in FP8; the arguments are its forward's."""
    gate, name = _check_fp8(self), _first_weight(self)
    return fp8_gated_experts(
        hidden_states, top_k_index, top_k_weights, getattr(self, name), getattr(self, f"{name}_scale_inv"),
        self.down_proj, self.down_proj_scale_inv, gate.activation,
    )  # fmt: skip


def _check_fp8(module: Any) -> Gate:
    """Return the gate of a module of experts in FP8.

    Raises ArgumentError, with the class's name, if it has a feature that is not supported.
    """
    gate, scheme, block = gate_of(module), module.activation_scheme, tuple(module.block_size or ())
    features = {
        f"scales of blocks {block}": block != (128, 128), f"activation_scheme={scheme}": scheme != "dynamic",
        "biases": module.has_bias, "gate and up that alternate": gate.interleaved,
    }  # fmt: skip
    if unsupported := [name for name, is_present in features.items() if is_present]:
        raise ArgumentError(
            f"experts_implementation: got {type(module).__name__} with {', '.join(unsupported)}; use dynamic scales of "
            "128 x 128, gate before up, no biases, or eager"
        )
    return gate


def _first_weight(module: Any) -> str:
    """Return the name of the weight of an experts module that multiplies its input."""
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"


def gate_of(module: Any) -> Gate:
    """Return the gate of an experts module, as a serialized graph. Raises ArgumentError if it cannot be traced.

    A gate that was traced before is returned again if the module has the same class, and the same values of all
    attributes that the gate had read.
    """
    names = HALVES if getattr(module, "has_gate", True) else HALVES[:1]
    if torch.compiler.is_dynamo_compiling():  # which guards what the gate reads
        product, operands = _Product(), tuple([(name, (0, 1, 1), "torch.float32") for name in names])
        text = serialize_epilogue(lambda _, **halves: _call(module, product, halves), (2, 2), operands, ())
        return Gate(text, product.interleaved)
    function = getattr(module._apply_gate, "__func__", module._apply_gate)
    known = _GATES.setdefault((type(module), function, names), [])
    for reads, gate in known:
        if all(_is_same(reduce(lambda x, name: getattr(x, name, None), path, module), x) for path, x in reads):
            return gate
    product, reads = _Product(), []
    try:
        graph = trace_gate(lambda **halves: _call(_Recorder(module, (), reads), product, halves), names)
    except (EpilogueError, AttributeError) as error:
        raise ArgumentError(
            f"experts_implementation: got {type(module).__name__}, whose gate is no epilogue ({error}); use eager"
        ) from error
    gate = Gate(serialize(graph), product.interleaved)
    known.insert(0, (tuple(reads), gate))
    del known[MAX_GATES:]
    return gate


_Reads = list[tuple[tuple[str, ...], Any]]
"""Attributes that a gate has read: the path of each from the module, such as ("act_fn", "beta"), and its value."""
_GATES: dict[Any, list[tuple[Any, Gate]]] = BoundedCache(1024)
"""Gates by a module's class, its `_apply_gate`, and names of the halves; each with the attributes that it has read."""


def _call(module: Any, product: _Product, halves: dict[str, Any]) -> Any:
    """Return the gate of traced halves, as a module (or its recorder) computes it.

    A module without a gate applies its act_fn; others call `_apply_gate`, with `product` in place of the product.
    """
    if len(halves) < len(HALVES):
        return module.act_fn(*halves.values())
    product.halves = tuple(halves.values())
    return module._apply_gate(product)


class _Product:
    """Stands for the product of gate and up while a gate is traced: the gate takes it apart by `chunk` or by index.

    Attributes:
        halves: the traced values gate and up.
        interleaved: whether the gate took every second column, so that gate and up alternate.
    """

    def __init__(self) -> None:
        self.halves: tuple[Any, ...] = ()
        self.interleaved = False

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Any, ...]:
        """Return gate and up, as halves of the columns. Raises EpilogueError for other chunks."""
        if (chunks, dim) != (2, -1):
            raise EpilogueError(f"chunk: got {chunks}, {dim}; use chunk(2, dim=-1)")
        return self.halves

    def __getitem__(self, key: Any) -> Any:
        """Return gate for [..., ::2] or up for [..., 1::2]: columns alternate. Raises EpilogueError for other keys."""
        is_half = isinstance(key, tuple) and len(key) == 2 and key[0] is Ellipsis and isinstance(key[1], slice)
        if not is_half or key[1].stop is not None or key[1].step != 2 or key[1].start not in (None, 0, 1):
            raise EpilogueError("gate_up: got an index; use [..., ::2] and [..., 1::2]")
        self.interleaved = True
        return self.halves[key[1].start or 0]


class _Recorder:
    """Stands for a module while its gate is traced, and records the attributes that the gate reads.

    `path`: the module's path from the module of experts; `reads`: the list to which reads are appended.
    """

    def __init__(self, module: Any, path: tuple[str, ...], reads: _Reads) -> None:
        self._module, self._path, self._reads = module, path, reads

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module, and record it.

        A submodule is returned as a recorder, and a method bound to this recorder, so that what they read is recorded.
        Raises EpilogueError for values other than functions, numbers, strings and None.
        """
        x, path = getattr(self._module, name), (*self._path, name)
        if isinstance(x, torch.nn.Module):
            return _Recorder(x, path, self._reads)
        if isinstance(x, MethodType) and x.__self__ is self._module:
            return MethodType(x.__func__, self)
        if not (callable(x) or isinstance(x, (bool, int, float, str, type(None)))):
            raise EpilogueError(f"it reads {'.'.join(path)}, of type {type(x).__name__}")
        self._reads.append((path, x))
        return x

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, a submodule such as act_fn: run its forward on this recorder, so that reads are recorded.

        Raises EpilogueError if the module has hooks. That it has none is recorded, too.
        """
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            if hooks := getattr(self._module, name):
                raise EpilogueError(f"{'.'.join(self._path)} has hooks")
            self._reads.append(((*self._path, name), hooks.copy()))
        return self.forward(*args, **kwargs)


def _is_same(x: Any, y: Any) -> bool:
    """Return whether an attribute still has the value that a gate has read: the same object, or an equal one."""
    return x is y or (type(x) is type(y) and bool(x == y))
