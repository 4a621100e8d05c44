"""A backend that runs gemmsmith's pass and executes the graphs node by node, without code generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch._inductor.decomposition import decompositions
from torch._inductor.lowering import lowerings

from gemmsmith.torch.compiler.backend import options
from gemmsmith.torch.compiler.fuse import Outcome, fuse
from gemmsmith.torch.compiler.measure import Timer


class Passed:
    """A backend of torch.compile. `outcomes` are those of all matmuls; `graphs` are the graphs after the pass."""

    __name__ = "passed"

    def __init__(self, timer: Timer | None = None) -> None:
        self.timer = timer
        self.outcomes: list[Outcome] = []
        self.graphs: list[torch.fx.Graph] = []

    def __call__(self, module: Any, inputs: Any) -> Any:
        return compile_fx(module, inputs, inner_compile=self._inner, config_patches=options())

    def _inner(self, module: Any, inputs: Any, **_: Any) -> Any:
        self.outcomes += fuse(module.graph, self.timer)
        module.graph.lint()
        targets = {node.target for node in module.graph.nodes}
        assert not targets.intersection(decompositions).difference(lowerings), "Inductor decomposes these before"
        module.recompile()
        self.graphs.append(module.graph)
        return make_boxed_func(module.forward)

    @property
    def fused(self) -> list[Outcome]:
        return [x for x in self.outcomes if x.epilogue]

    @property
    def texts(self) -> list[str]:
        """The serialized epilogues of gemmsmith's matmuls."""
        nodes = (node for graph in self.graphs for node in graph.nodes if "gemmsmith" in str(node.target))
        return [next(x for x in node.args if isinstance(x, str)) for node in nodes]


def compiled(
    function: Callable[..., Any], timer: Timer | None = None, **options: Any
) -> tuple[Callable[..., Any], Passed]:
    torch._dynamo.reset()
    passed = Passed(timer)
    return torch.compile(function, backend=passed, fullgraph=True, **options), passed
