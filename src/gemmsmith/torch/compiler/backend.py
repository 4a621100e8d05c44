"""The Inductor passes that fuse epilogues into matmuls, and a torch.compile backend that is Inductor with them."""

from __future__ import annotations

import hashlib
from functools import lru_cache, partial
from importlib import resources
from typing import Any

import torch
from torch._inductor import config, list_mode_options
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.ir import FallbackKernel, IRNode, TensorBox
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.virtualized import V
from torch.utils import _pytree

import gemmsmith
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.scalars import as_bools
from gemmsmith.torch.compiler.fuse import fuse
from gemmsmith.torch.compiler.hoist_grad_scale import hoist_scalar_grad
from gemmsmith.torch.compiler.measure import configured_timer
from gemmsmith.torch.ops import OPERATORS
from gemmsmith.tuning import measured_configs


class _CachedPass(CustomGraphPass):
    """A graph pass whose results Inductor may cache, since it has a key."""

    def __init__(self, autotune: bool = False) -> None:
        super().__init__()
        self.autotune = autotune

    def uuid(self) -> str:
        """Return a digest of gemmsmith's sources, tuning tables and the GPUs, as part of Inductor's cache keys."""
        return hashlib.sha256(
            f"{_package_digest()} {_gpus()} {self.autotune}".encode() + measured_configs.state()
        ).hexdigest()


class JointGraphPass(_CachedPass):
    """Joint-graph pass: runs before AOTAutograd partitions forward and backward."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Hoist scalar gradients out of the graph's matmuls."""
        hoist_scalar_grad(graph)


class PostGradPass(_CachedPass):
    """Post-grad pass: runs over each forward and backward graph before Inductor fuses the remaining operations."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Fuse epilogues into the graph's matmuls, and replace others; with max_autotune, by measured times."""
        fuse(graph, configured_timer())


PASSES = {"joint_custom_pre_pass": JointGraphPass, "post_grad_custom_pre_pass": PostGradPass}
"""The passes by the names of their Inductor options."""


@lru_cache(maxsize=1)
def _package_digest() -> str:
    digest = hashlib.sha256(gemmsmith.__version__.encode())
    waiting = [resources.files("gemmsmith")]
    while waiting:
        for file in sorted(waiting.pop().iterdir(), key=lambda x: x.name):
            if file.is_dir():
                waiting.append(file)
            elif file.name.endswith((".py", ".json")):
                digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def _gpus() -> list[str]:
    devices = range(torch.cuda.device_count())
    return [f"{torch.cuda.get_device_name(i)} {torch.cuda.get_device_capability(i)}" for i in devices]


def options(*, autotune: bool = False, **others: Any) -> dict[str, Any]:
    """Return options for torch.compile(model, options=...) that fuse epilogues into matmuls.

    Args:
        autotune: the first calls of each of the graph's GEMMs measure configs, as in `gemmsmith.autotune`.
        **others: options of Inductor to add, such as max_autotune=True.

    Returns:
        `others` and the options that install gemmsmith's passes.

    Raises:
        ArgumentError: `others` has a pass of its own where gemmsmith's has to be.
    """
    for name in PASSES:
        if others.get(name) is not None:
            raise ArgumentError(f"{name}: got {others[name]!r}, which would replace gemmsmith's pass; leave it out")
    (autotune,) = as_bools(autotune=autotune)
    return {**others, **{name: graph_pass(autotune) for name, graph_pass in PASSES.items()}}


def backend(module: Any, inputs: Any, *, mode: str | None = None, **kwargs: Any) -> Any:
    """Compile a graph with Inductor and gemmsmith's passes: torch.compile(model, backend="gemmsmith").

    Args:
        module: the torch.fx.GraphModule that Dynamo passes.
        inputs: its example inputs.
        mode: a mode of torch.compile, such as "max-autotune".
        **kwargs: `options`, a dict of Inductor's options, as torch.compile passes it.

    Returns:
        The compiled function.

    Raises:
        ArgumentError: an option would replace one of gemmsmith's passes; see `options()`.
    """
    patches = options(**(list_mode_options(mode) if mode else {}), **kwargs.get("options", {}))
    return compile_fx(module, inputs, config_patches=patches)


class _CompiledCallKernel(FallbackKernel):
    """Inductor's node for the call of an operator; generated code calls a `CompiledCall` instead of the operator.

    That repeats launches of earlier calls, without torch's dispatcher.
    """

    def codegen(self, wrapper: Any) -> None:
        """Generate the call; in Python code, define the CompiledCall among the module's imports before, and call it."""
        if not (V.graph.cpp_wrapper or getattr(V.graph, "fx_wrapper", False)):
            root = wrapper
            while hasattr(root, "parent_wrapper"):  # the wrapper of a subgraph has no imports of its own
                root = root.parent_wrapper
            name = f"gemmsmith_{self.get_name()}"
            root.add_import_once("from gemmsmith.torch.compiled_call import CompiledCall")
            tuned = ", autotune=True" if getattr(config.post_grad_custom_pre_pass, "autotune", False) else ""
            root.add_import_once(f"{name} = CompiledCall({self.get_kernel_name()}{tuned})")
            self.set_python_kernel_name(name)
            for x in self.outputs:  # they need no check: they have the layout of the operator's fake results
                x.skip_size_stride_alignment_checks = True
        super().codegen(wrapper)


def _lower(op: Any, *arguments: Any) -> Any:
    """Lower a call of one of gemmsmith's operators: return Inductor's nodes of the results."""
    results = _CompiledCallKernel.create(op, *arguments)
    return _pytree.tree_map_only(IRNode, TensorBox.create, results)


for _op in OPERATORS.values():
    if _op not in lowerings:
        register_lowering(_op, type_promotion_kind=None, broadcast=False)(partial(_lower, _op))
