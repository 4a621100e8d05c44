"""Inductor's lowering of gemmsmith's operators: generated code calls each by a `CompiledCall` of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch._inductor.ir import FallbackKernel, IRNode, TensorBox
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.virtualized import V
from torch.utils import _pytree

from gemmsmith.torch.grouped_ops import ROWS
from gemmsmith.torch.ops import OPERATORS


class _CompiledCallKernel(FallbackKernel):
    """A call of an operator in generated code: Inductor's own, but for what is called."""

    def codegen(self, wrapper: Any) -> None:
        """Name the function that is called, and define it in the module of the generated code."""
        if not (V.graph.cpp_wrapper or getattr(V.graph, "fx_wrapper", False)):
            root = wrapper
            while hasattr(root, "parent_wrapper"):  # of a subgraph, which has no imports of its own
                root = root.parent_wrapper
            name = f"gemmsmith_{self.get_name()}"
            root.add_import_once("from gemmsmith.torch.compiled_call import CompiledCall")
            root.add_import_once(f"{name} = CompiledCall({self.get_kernel_name()})")
            self.set_python_kernel_name(name)
            for x in self.outputs:  # which have the layout that the operator's shape function gives them
                x.skip_size_stride_alignment_checks = True
        super().codegen(wrapper)


def _lower(op: Any, *arguments: Any) -> Any:
    results = _CompiledCallKernel.create(op, *arguments)
    return _pytree.tree_map_only(IRNode, TensorBox.create, results)


def register_lowerings() -> None:
    """Register the lowerings of the operators that find their launches in generated code."""
    for op in (*OPERATORS.values(), *ROWS.values()):
        if op not in lowerings:
            register_lowering(op, type_promotion_kind=None, broadcast=False)(partial(_lower, op))
