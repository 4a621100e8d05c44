"""What torch.compile with gemmsmith would fuse in a model, and what not, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch.utils._pytree import tree_leaves

from gemmsmith.core.graph import Graph
from gemmsmith.torch.compiler.backend import options
from gemmsmith.torch.compiler.fuse import Outcome, fuse
from gemmsmith.torch.compiler.nodes import hints

MEGABYTE = 1e6


@dataclass(frozen=True)
class Explanation:
    """The products of each graph that torch makes: first one going forward, then, if there is a gradient, one going
    backward, and so on for each break. `print` shows them as a table."""

    graphs: tuple[tuple[Outcome, ...], ...]

    @property
    def products(self) -> list[Outcome]:
        """The products of all graphs."""
        return [outcome for graph in self.graphs for outcome in graph]

    @property
    def fused(self) -> list[Outcome]:
        """The products that have an epilogue."""
        return [outcome for outcome in self.products if outcome.epilogue]

    def __str__(self) -> str:
        saved = sum(x.saved for x in self.fused) / MEGABYTE
        lines = [f"{len(self.fused)} of {len(self.products)} products have an epilogue; {saved:.4g} MB less is moved"]
        for number, graph in enumerate(self.graphs):
            rows = [(x.product, " x ".join(map(str, hints(x.shape))), _said(x), x.line) for x in graph]
            widths = [max(len(row[i]) for row in rows) if rows else 0 for i in range(3)]
            lines += [f"graph {number}", *(_row(row, widths) for row in rows)]
        return "\n".join(lines)

    def picture(self, path: Path | str) -> None:
        """Draws the epilogues, each once, with the names of their products. ImportError without matplotlib; ValueError
        where there is none."""
        from gemmsmith.epilogue.frontend.show import pictures

        names: dict[Graph, list[str]] = {}
        for outcome in self.fused:
            if outcome.epilogue:
                names.setdefault(outcome.epilogue, []).append(outcome.product)
        if not names:
            raise ValueError("no product has an epilogue; print the explanation to see why")
        pictures([(", ".join(of), graph) for graph, of in names.items()], path)


def _said(x: Outcome) -> str:
    if x.why:
        return f"- {x.why}"
    return f"{', '.join(x.computed) or 'another dtype'}: {x.saved / MEGABYTE:.3g} MB less"


def _row(row: tuple[str, ...], widths: list[int]) -> str:
    return "  ".join(["", *(x.ljust(width) for x, width in zip(row, widths, strict=False)), row[-1]]).rstrip()


def explain(model: Callable[..., Any], *inputs: Any, **named: Any) -> Explanation:
    """What is fused in model(*inputs, **named), and in its backward pass where a result requires grad.

    Torch traces the model as torch.compile would; the graphs are not computed: they give zeros. So no state of the
    model changes, unless it is changed at a break of the graph. Raises what torch.compile does.
    """
    graphs: list[tuple[Outcome, ...]] = []

    def inner(module: Any, _: Any, **__: Any) -> Any:
        graphs.append(tuple(fuse(module.graph)))
        results = next(node for node in module.graph.nodes if node.op == "output").args[0]
        fakes = [x.meta["val"] if isinstance(x, torch.fx.Node) else x for x in results]
        return make_boxed_func(lambda *_: [_zeros(x) for x in fakes])

    def backend(module: Any, given: Any) -> Any:
        return compile_fx(module, given, inner_compile=inner, config_patches=options())

    found = torch.compile(model, backend=backend)(*inputs, **named)
    tensors = [x for x in tree_leaves(found) if isinstance(x, torch.Tensor) and x.requires_grad]
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    wanted = [
        x for x in [*parameters, *tree_leaves((inputs, named))] if isinstance(x, torch.Tensor) and x.requires_grad
    ]
    if tensors and wanted:
        torch.autograd.grad(tensors, wanted, [torch.zeros_like(x) for x in tensors], allow_unused=True)
    return Explanation(tuple(graphs))


def _zeros(fake: Any) -> Any:
    """What a graph gives in place of a result."""
    if isinstance(fake, torch.Tensor):
        zeros = torch.empty_strided(hints(fake.shape), hints(fake.stride()), dtype=fake.dtype, device=fake.device)
        return zeros.zero_()
    return hints([fake])[0] if isinstance(fake, torch.SymInt) else fake
