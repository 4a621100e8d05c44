"""The experts of transformers' models by grouped GEMMs: `experts_implementation="gemmsmith"`.

What a class does between the two products, its `_apply_gate`, is an epilogue function: it is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce, wraps
from types import MethodType
from typing import Any

import torch

from gemmsmith.core.bounded_cache import BoundedCache
from gemmsmith.core.errors import ArgumentError, EpilogueError
from gemmsmith.torch.graph_serialization import serialize
from gemmsmith.torch.mlp.gated_epilogues import HALVES, Gate, trace_gate
from gemmsmith.torch.moe.experts import gated_experts
from gemmsmith.torch.moe.fp8_experts import fp8_gated_experts
from gemmsmith.torch.tracing import serialize_epilogue

NAME = "gemmsmith"
MAX_GATES = 16
"""Gates of a class that are kept, as of layers with limits of their own. Chosen; not measured."""


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
    """Return a method that calls wrapper(method, self, ...)."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(method, *args, **kwargs)

    call.checks_experts = True  # type: ignore[attr-defined]
    return call


def _accept(method: Callable[..., Any], self: Any, requested_experts: Any) -> Any:
    """Accept ours, of a model that is about to be made or whose experts can be computed."""
    if requested_experts != NAME:
        return method(self, requested_experts)
    _check_experts(self.modules())
    return NAME


def _check_when_made(method: Callable[..., Any], self: Any) -> None:
    """Check the experts of a model that has been made."""
    method(self)
    _check_experts(
        x for x in self.modules() if getattr(getattr(x, "config", None), "_experts_implementation", "") == NAME
    )


def _check_experts(modules: Iterable[Any]) -> None:
    """Raise ArgumentError, with the class's name, if there are experts among the modules that are not computed."""
    for module in modules:
        if hasattr(type(module), "_apply_gate") and hasattr(module, "config"):
            _check_fp8(module) if hasattr(module, "activation_scheme") else gate_of(module)


def _experts_forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """Compute what an experts module of transformers does."""
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
    """Compute what an experts module in FP8 of transformers does."""
    gate, name = _check_fp8(self), _first_weight(self)
    return fp8_gated_experts(
        hidden_states, top_k_index, top_k_weights, getattr(self, name), getattr(self, f"{name}_scale_inv"),
        self.down_proj, self.down_proj_scale_inv, gate.activation,
    )  # fmt: skip


def _check_fp8(module: Any) -> Gate:
    """Return the gate of experts in FP8. Raises ArgumentError, with the class's name, for what is not computed."""
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
    """Return the name of the weight that multiplies a module's input."""
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"


def gate_of(module: Any) -> Gate:
    """Return a module's gate. Raises ArgumentError, with the class's name, if it cannot be traced."""
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
"""Attributes that a gate reads, by their paths, with their values."""
_GATES: dict[Any, list[tuple[Any, Gate]]] = BoundedCache(1024)
"""Gates by the module's class, its `_apply_gate` and what that takes, with what they read of a module."""


def _call(module: Any, product: _Product, halves: dict[str, Any]) -> Any:
    """Call what a module, or its recorder, does between the products."""
    if len(halves) < len(HALVES):
        return module.act_fn(*halves.values())
    product.halves = tuple(halves.values())
    return module._apply_gate(product)


class _Product:
    """The product of gate and up, as a gate takes it apart."""

    def __init__(self) -> None:
        self.halves: tuple[Any, ...] = ()
        self.interleaved = False

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Any, ...]:
        """Return gate and up, one behind the other."""
        if (chunks, dim) != (2, -1):
            raise EpilogueError(f"chunk: got {chunks}, {dim}; use chunk(2, dim=-1)")
        return self.halves

    def __getitem__(self, key: Any) -> Any:
        """Return gate or up, which alternate."""
        is_half = isinstance(key, tuple) and len(key) == 2 and key[0] is Ellipsis and isinstance(key[1], slice)
        if not is_half or key[1].stop is not None or key[1].step != 2 or key[1].start not in (None, 0, 1):
            raise EpilogueError("gate_up: got an index; use [..., ::2] and [..., 1::2]")
        self.interleaved = True
        return self.halves[key[1].start or 0]


class _Recorder:
    """A module whose gate is traced. Records what the gate reads of it."""

    def __init__(self, module: Any, path: tuple[str, ...], reads: _Reads) -> None:
        self._module, self._path, self._reads = module, path, reads

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module, and record it: a submodule as a recorder, a method bound to this."""
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
        """Call the module's forward on this recorder. Raises EpilogueError if the module has hooks."""
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            if hooks := getattr(self._module, name):
                raise EpilogueError(f"{'.'.join(self._path)} has hooks")
            self._reads.append(((*self._path, name), hooks.copy()))
        return self.forward(*args, **kwargs)


def _is_same(x: Any, y: Any) -> bool:
    return x is y or (type(x) is type(y) and bool(x == y))
